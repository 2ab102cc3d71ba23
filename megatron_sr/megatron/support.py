"""What stochastic rounding cannot do yet in Megatron-Core: refused at start-up with the flag, its value and the way out (C6).

One table serves Megatron-LM's parsed arguments and the configurations behind a finished optimizer, whose fields bear the
same names. Each entry is a place where main params become model params without passing through a cast site of sites/, or
where weights change after it. Optimizers that sites/ does not know are refused there, by their class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_sr.megatron import mxfp8_flags

MXFP8_FIELDS = ("fp8", "fp8_param_gather")
"""Fields that `mxfp8_flags` judges when the format is mxfp8."""


class Refusal(NamedTuple):
    field: str  # of args, OptimizerConfig, DistributedDataParallelConfig or TransformerConfig
    flag: str
    refused: Callable[[Any], bool]
    reason: str
    way_out: str


REFUSALS = (
    Refusal("use_megatron_fsdp", "--use-megatron-fsdp", bool, "Megatron-FSDP casts its own main weights", "leave it out"),
    Refusal("use_torch_fsdp2", "--use-torch-fsdp2", bool, "FSDP2 keeps no Megatron main params",
            "use --use-distributed-optimizer instead"),
    Refusal("optimizer_cuda_graph", "--optimizer-cuda-graph", bool, "a replayed graph would draw the same noise each step",
            "leave it out"),
    Refusal("fp8_param_gather", "--fp8-param-gather", bool, "model params are quantized from FP32 elsewhere", "leave it out"),
    Refusal("fp8", "--fp8-format", bool, "FP8 recipes are not supported yet", "leave it out"),
    Refusal("fp4_param_gather", "--fp4-param-gather", bool, "model params are quantized from FP32 elsewhere", "leave it out"),
    Refusal("fp4", "--fp4-format", bool, "FP4 recipes are not supported yet", "leave it out"),
    Refusal("qk_clip", "--qk-clip", bool, "it edits weights after the optimizer step", "leave it out"),
)  # fmt: skip


def check_supported(*settings, format: str | None = None) -> None:
    """Raise ValueError for the first thing in `settings` (a namespace or configurations) that is not supported with `format`.

    A field is looked up in the first of `settings` that has it; a field that none has is not checked.
    """
    mxfp8 = format == "mxfp8" and mxfp8_flags.uses_transformer_engine(
        lambda field, default: look_up(settings, field, default)
    )
    if not (look_up(settings, "bf16", True) or look_up(settings, "fp16", False)):
        raise ValueError(
            "--param-rounding stochastic does not work with --bf16 off: model params are FP32, so main params are not rounded; "
            "add --bf16 or --fp16, or use --param-rounding nearest"
        )
    for refusal in REFUSALS:
        value = None if mxfp8 and refusal.field in MXFP8_FIELDS else look_up(settings, refusal.field, None)
        if value is not None and refusal.refused(value):
            shown = "off" if value in (None, False) else "on" if value is True else value
            raise ValueError(
                f"--param-rounding stochastic does not work with {refusal.flag} {shown}: {refusal.reason}; "
                f"{refusal.way_out}, or use --param-rounding nearest"
            )


def look_up(settings, field: str, default):
    """The field of the first of `settings` that has it."""
    return next((getattr(s, field) for s in settings if hasattr(s, field)), default)
