"""Bias of the four ways from FP32 to MXFP8 (nearest or stochastic, twice), and sticking by format; figure of docs/mxfp8.md.

    python tools/measure_mxfp8.py --json mxfp8.json --figure docs/images/mxfp8-bias.png

Single process, CPU, about half a minute. Weights are normal with a standard deviation of 0.02, as initial weights are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from megatron_sr import Noise, mxfp8, round_to_

FLOWS = {"RN/RN": (False, False), "SR/RN": (True, False), "RN/SR": (False, True), "SR/SR": (True, True)}
SIZE = 64


def rounded(w: torch.Tensor, flow: tuple[bool, bool], step: int) -> mxfp8.MXFP8Blocks:
    """FP32 -> BF16 -> MXFP8; flow: stochastic or not, for either rounding."""
    first, second = (Noise(1, step, "w", stream) if on else None for stream, on in enumerate(flow))
    bf16 = round_to_(torch.empty(w.shape, dtype=torch.bfloat16), w, noise=first)
    return mxfp8.quantize(bf16, noise=second, min_scale=mxfp8.BF16_MIN_SCALE)


def spacing(w: torch.Tensor) -> torch.Tensor:
    scale = torch.exp2(mxfp8.quantize(w).scale.double() - 127).repeat_interleave(mxfp8.BLOCK, dim=1)
    return torch.exp2(torch.floor(torch.log2((w.double() / scale).abs().clamp(min=2.0**-6))) - 3) * scale


def biases(draws: list[int]) -> dict[str, list[float]]:
    """Root mean square of (mean over draws - FP32 weight), in MXFP8 spacings, after each number of draws."""
    w = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * 0.02
    unit, out = spacing(w), {}
    for name, flow in FLOWS.items():
        total, out[name] = torch.zeros(SIZE, SIZE, dtype=torch.float64), []
        for step in range(draws[-1]):
            total += (rounded(w, flow, step).dequantize().double() - w.double()) / unit
            if step + 1 in draws:
                out[name].append((total / (step + 1)).square().mean().sqrt().item())
    return out


def sticking(lr: float, steps: int) -> dict[str, list[float]]:
    """Percent of weights, rounded to nearest, that hold their start's value after each of `steps` steps of +-lr (as Adam's first are)."""
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(1024, 1024, generator=generator) * 0.02
    direction = torch.randint(0, 2, w.shape, generator=generator) * 2.0 - 1
    kinds = {"BF16": lambda x: x.bfloat16().float(), "MXFP8": lambda x: rounded(x, FLOWS["RN/RN"], 0).dequantize()}
    return {
        name: [100 * (kind(w + lr * n * direction) == kind(w)).double().mean().item() for n in range(1, steps + 1)]
        for name, kind in kinds.items()
    }


def figure(result: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7, 4.2), layout="constrained")
    axes = picture.add_subplot()
    for (name, values), colour in zip(result["bias"].items(), ("#c44e52", "#dd8452", "#55a868", "#2a78b5")):
        axes.loglog(result["draws"], values, "o-", color=colour, label=name)
    axes.loglog(
        result["draws"],
        [0.4 / n**0.5 for n in result["draws"]],
        ":",
        color="0.4",
        label="noise alone, about 0.4 / sqrt(draws)",
    )
    axes.set(
        title="Bias of FP32 to BF16 to MXFP8 (nearest RN, stochastic SR)",
        xlabel="draws averaged",
        ylabel="rms of mean error [MXFP8 spacings]",
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    picture.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--figure", type=Path, default=None)
    parser.add_argument("--draws", type=int, default=2000)
    args = parser.parse_args()
    draws = sorted({n for n in (1, 4, 16, 64, 250, 1000) if n < args.draws} | {args.draws})
    result = {"size": SIZE, "draws": draws, "bias": biases(draws), "sticking": sticking(1e-6, 4)}
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"bias after {draws[-1]} draws [MXFP8 spacings]")
    for name, values in result["bias"].items():
        print(f"  {name}  {values[-1]:.4f}")
    print("unchanged after 4 steps of +-1e-6, rounded to nearest [%]")
    for name, values in result["sticking"].items():
        print(f"  {name:5}  {values[-1]:.3f}")
    if args.figure:
        figure(result, args.figure)


if __name__ == "__main__":
    main()
