"""AdamW and parameter rounding in one pass: gradient, moments and main param are read once, the main param and the
rounded model param are written once.

    m    <- m + (1 - beta1) (g - m)
    v    <- beta2 v + (1 - beta2) g^2
    main <- (1 - lr weight_decay) main - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    param <- round(main; format, seed, t, key, element)

Decoupled weight decay (Loshchilov, Hutter: arXiv 1711.05101); the order of operations is that of torch.optim.AdamW
(foreach=False) on FP32 tensors, see adamw_reference.py. All backends give the same bits, and the param's bits are those
of `round_to_` of the new main param.

**16-bit remainders.** The FP32 main param may be held as the BF16 model param and an int16 remainder: see remainder.py.
Pass the remainders in the place of the main params.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from megatron_sr import formats, kernels
from megatron_sr.coordinates import Segment
from megatron_sr.formats import Format
from megatron_sr.kernels.table import PieceTable
from megatron_sr.noise import Noise, check_u64, philox_key
from megatron_sr.rounding import check_segments

_MODULES = {"reference": "adamw_reference", "cpu": "adamw_cpu", "triton": "triton_adamw"}


class Update(NamedTuple):
    """Constants of one AdamW step, each rounded to FP32 as torch rounds its scalars.

    decay               1 - lr * weight_decay
    average             weight of g - m; 1 - beta1, or -beta1 if `average_from_grad`
    beta2, square       square = 1 - beta2
    root                sqrt(1 - beta2**step)
    eps
    minus_step          -lr / (1 - beta1**step)
    average_from_grad   beta1 <= 0.5: the new m is g + average * (g - m), torch.lerp's more precise form there
    """

    decay: float
    average: float
    beta2: float
    square: float
    root: float
    eps: float
    minus_step: float
    average_from_grad: bool


def make_update(step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> Update:
    """The constants of step number `step` (1, 2, ...). Raises TypeError or ValueError for a value out of range."""
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        raise ValueError(f"step is {step!r}; AdamW counts its steps from 1")
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value!r}; it must be finite and at least 0")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas is {betas!r}; both must lie in 0 <= beta < 1")
    beta1, beta2 = betas
    weight = np.float32(1 - beta1)
    from_grad = bool(weight >= 0.5)
    numbers = (
        1 - lr * weight_decay,
        weight - np.float32(1) if from_grad else weight,
        beta2,
        1 - beta2,
        math.sqrt(1 - beta2**step),
        eps,
        -lr / (1 - beta1**step),
    )
    return Update(*(float(np.float32(x)) for x in numbers), from_grad)


class AdamWTable(PieceTable):
    """A PieceTable whose dst are the model params and whose src are the main params, with the optimizer's state.

    src is FP32, or int16: then the main params are BF16 params with remainders (`remainders`). grads are set anew for
    each step: FP32 or BF16, all of one dtype.
    """

    def __init__(self, params, main_params, exp_avgs, exp_avg_sqs, format: Format, stochastic: bool):
        super().__init__(params, main_params, format, stochastic)
        self.exp_avgs, self.exp_avg_sqs, self.grads = list(exp_avgs), list(exp_avg_sqs), []
        self.remainders = bool(self.src) and self.src[0].dtype == torch.int16

    def state_addresses(self) -> np.ndarray:
        """[pieces, 3] uint64: addresses of each piece's first element in the gradient and in the two moments."""
        return np.column_stack([self.piece_addresses(t) for t in (self.grads, self.exp_avgs, self.exp_avg_sqs)])


class AdamWPlan:
    """AdamW with rounding for the same tensors at every step, as one launch.

    params             model params, contiguous, in a storage dtype of the format (BF16 with remainders).
    main_params        FP32 main params, or int16 remainders.
    exp_avgs,
    exp_avg_sqs        FP32 moments; zeros before the first step.
    keys_and_segments  one (tensor key, [Segment, ...]) for each; as in `RoundingPlan`. Elements that no segment names
                       are not touched.
    seed, stream       of the noise; seed None rounds to nearest.
    backend            auto, reference, cpu or triton.

    Lists are equally long; tensors with one index are contiguous and equally large; all are on one device. Tensors are
    held by reference. Raises TypeError or ValueError otherwise, naming the list and the position.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        main_params: Sequence[torch.Tensor],
        exp_avgs: Sequence[torch.Tensor],
        exp_avg_sqs: Sequence[torch.Tensor],
        keys_and_segments: Sequence[tuple[str, Sequence[Segment]]],
        *,
        seed: int | None,
        stream: int = 0,
        format: str | Format = "bf16",
        backend: str = "auto",
    ):
        format = formats.get(format)
        if seed is not None:
            check_u64("seed", seed)
        check_u64("stream", stream)
        lists = dict(params=params, main_params=main_params, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs)
        _check_lists(lists, keys_and_segments, format)
        self._table = AdamWTable(*lists.values(), format, seed is not None)
        for i, (key, segments) in enumerate(keys_and_segments):
            words = philox_key(seed, key, stream) if seed is not None else (0, 0)
            for segment in check_segments(segments, params[i], main_params[i], i):
                self._table.add(i, segment, words, 0)
        self._table.seal()
        self._backend = load(backend, params[0].device) if params else None

    def step_(
        self,
        grads: Sequence[torch.Tensor],
        *,
        step: int,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        noise_step: int | None = None,
        last_noise_step: int | None = None,
    ) -> None:
        """One AdamW step of all tensors, in place, and their rounding.

        grads            FP32 or BF16, one for each param.
        step             1, 2, ...: AdamW's step, for the bias corrections.
        noise_step       the step of the noise; default: `step`.
        last_noise_step  only with remainders: the noise step that the params were last rounded with, or None if they
                         are in nearest form (remainder.py), as BF16 params with zero remainders are.

        Raises TypeError, ValueError or RuntimeError for tensors that do not fit those of the plan.
        """
        update = make_update(step, lr, betas, eps, weight_decay)
        check_last(self._table, last_noise_step)
        self._table.set_step(check_u64("noise_step", step if noise_step is None else noise_step))
        self._table.grads = _check_grads(grads, self._table.src)
        if self._backend is not None:
            _run(self._table, update, last_noise_step, self._backend)
        self._table.grads = []  # they are not the plan's to keep


def fused_adamw_step_(
    param: torch.Tensor,
    main_param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    noise: Noise | None = None,
    last_noise: Noise | None = None,
    start: int = 0,
    format: str | Format = "bf16",
    backend: str = "auto",
) -> None:
    """One AdamW step of one tensor, in place, and its rounding to `param`: `AdamWPlan` for a single use.

    noise       None rounds to nearest.
    last_noise  only with remainders: the noise that `param` was last rounded with, None if it is in nearest form.
                May differ from `noise` in its step alone.
    start       global index of the first element in its whole tensor.
    """
    if last_noise is not None and noise is None:
        raise ValueError("last_noise is given without noise; to leave stochastic rounding use remainder.recode_ first")
    if last_noise is not None and (last_noise.seed, last_noise.key, last_noise.stream) != (
        noise.seed,
        noise.key,
        noise.stream,
    ):
        raise ValueError(f"last_noise {last_noise} and noise {noise} may only differ in their step")
    plan = AdamWPlan(
        [param],
        [main_param],
        [exp_avg],
        [exp_avg_sq],
        [("" if noise is None else noise.key, [Segment(0, param.numel(), start)])],
        seed=None if noise is None else noise.seed,
        stream=0 if noise is None else noise.stream,
        format=format,
        backend=backend,
    )
    plan.step_(
        [grad],
        step=step,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        noise_step=0 if noise is None else noise.step,
        last_noise_step=None if last_noise is None else last_noise.step,
    )


def load(backend: str, device: torch.device) -> ModuleType:
    """The module of the backend: it has `step_table_` and `recode_table_`. Raises ValueError as kernels.load does."""
    return importlib.import_module(f"megatron_sr.kernels.{_MODULES[kernels.backend_name(backend, device)]}")


def check_last(table: PieceTable, last_step: int | None) -> None:
    """Raise unless `last_step`, the noise step of the params' last rounding, fits the table."""
    if last_step is None:
        return
    check_u64("last_noise_step", last_step)
    if table.src and table.src[0].dtype != torch.int16:
        raise ValueError("last_noise_step is given, but the main params are FP32: only int16 remainders need it")
    if not table.stochastic:
        raise ValueError("last_noise_step is given, but the plan has no seed: it rounds to nearest, without noise")


def _run(table: AdamWTable, update: Update, last_step: int | None, backend: ModuleType) -> None:
    table.refresh()
    backend.step_table_(table, update, last_step)
    # Kernels write through addresses: tell autograd that the tensors have changed.
    changed = (*table.dst, *table.src, *table.exp_avgs, *table.exp_avg_sqs)
    torch.autograd.graph.increment_version([t for t in changed if not t.is_inference()])


def _check_lists(lists: dict, keys_and_segments, format: Format) -> None:
    lengths = {name: len(tensors) for name, tensors in lists.items()} | {"keys_and_segments": len(keys_and_segments)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the lists must be equally long, but their lengths are {lengths}")
    remainders = [t.dtype == torch.int16 for t in lists["main_params"] if isinstance(t, torch.Tensor)]
    if any(remainders) and (not all(remainders) or format is not formats.BF16):
        raise TypeError("int16 remainders need format 'bf16', and main_params must be all int16 or all float32")
    for i in range(lengths["params"]):
        param = lists["params"][i]
        for name, tensors in lists.items():
            where, t = f"{name}[{i}]", tensors[i]
            if not isinstance(t, torch.Tensor):
                raise TypeError(f"{where} must be a torch.Tensor, not {type(t).__name__}")
            if name == "params":
                format.check_storage(t.dtype, where)
            elif t.dtype != (torch.int16 if name == "main_params" and any(remainders) else torch.float32):
                raise TypeError(f"{where} has dtype {t.dtype}; it must be torch.float32 (main_params: or torch.int16)")
            _check_like(t, param, lists["params"][0].device, where, f"params[{i}]")


def _check_grads(grads, main_params: list[torch.Tensor]) -> list[torch.Tensor]:
    grads = list(grads)
    if len(grads) != len(main_params):
        raise ValueError(f"{len(grads)} grads were given for {len(main_params)} params")
    for i, (grad, main) in enumerate(zip(grads, main_params)):
        if not isinstance(grad, torch.Tensor) or grad.dtype not in (torch.float32, torch.bfloat16):
            found = getattr(grad, "dtype", type(grad).__name__)
            raise TypeError(f"grads[{i}] must be a float32 or bfloat16 tensor, not {found}")
        if grad.dtype != grads[0].dtype:
            raise TypeError(f"grads[{i}] has dtype {grad.dtype}, grads[0] {grads[0].dtype}; they must be equal")
        _check_like(grad, main, main.device, f"grads[{i}]", f"main_params[{i}]")
    return grads


def _check_like(t: torch.Tensor, other: torch.Tensor, device: torch.device, name: str, other_name: str) -> None:
    if t.numel() != other.numel():
        raise ValueError(f"{name} has {t.numel()} elements, {other_name} {other.numel()}; they must be equal")
    if t.device != device:
        raise ValueError(f"{name} is on {t.device}, but all tensors must be on {device}")
    if not t.is_contiguous():
        raise ValueError(f"{name} is not contiguous (strides {t.stride()}); pass a contiguous tensor")
