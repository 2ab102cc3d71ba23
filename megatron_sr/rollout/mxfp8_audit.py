"""Which format every weight has in the trainer and in the engine, and whether they agree.

An engine decides by patterns over module names which layers to leave in BF16, the trainer by its own rules. If they differ, the
engine computes another model. So the audit asks the live modules, each by its whole name: nothing is matched by a piece of a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from megatron_sr.rollout.manifest import dtype_name
from megatron_sr.rollout.mxfp8_layout import CODES, SCALE, expected_tensors

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_ABSENT = "absent"


class Row(NamedTuple):
    """A weight's Hugging Face name and its format on both sides: "mxfp8", a dtype's name, or "absent"."""

    name: str
    trainer: str
    engine: str


def audit(trainer: Mapping[str, str], engine: Mapping[str, str]) -> list[Row]:
    """One row for every weight of either side, in the trainer's order. Arguments: name -> format."""
    every = [*trainer, *(name for name in engine if name not in trainer)]
    return [Row(name, trainer.get(name, _ABSENT), engine.get(name, _ABSENT)) for name in every]


def audit_engine(model: torch.nn.Module, hf_config) -> list[Row]:
    """A live vLLM model against what its checkpoint's config says, in the trainer's column."""
    return audit(formats_of(expected_tensors(hf_config)), live_formats(model, hf_config.tie_word_embeddings))


def check(rows: Iterable[Row], left: str = "the trainer") -> None:
    """Raise ValueError, listing them, when a weight has another format in the engine than on the left side, called so in the message."""
    wrong = [row for row in rows if row.trainer != row.engine]
    if wrong:
        listed = "; ".join(f"{row.name} is {row.trainer} in {left}, {row.engine} in the engine" for row in wrong[:6])
        raise ValueError(
            f"{len(wrong)} weights have different formats: {listed}. Make the engine's checkpoint with "
            "megatron_sr.rollout.mxfp8_checkpoint for the same BF16 layers as the trainer's, and let `ignore` in its config.json name "
            "whole modules: vLLM takes an entry for a piece of a name"
        )


def table(rows: Iterable[Row]) -> str:
    """The rows as text, one a line; "<-- differs" marks those that do."""
    rows = list(rows)
    width = max((len(row.name) for row in rows), default=0)
    return "\n".join(
        f"{row.name:{width}}  {row.trainer:9} {row.engine:9}{'' if row.trainer == row.engine else ' <-- differs'}"
        for row in rows
    )


def formats_of(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, str]:
    """Name -> format of the weights among tensors to be sent or expected (name -> (shape, dtype)); scales are part of a weight."""
    return {
        name: "mxfp8" if dtype == CODES and name + SCALE in tensors else dtype_name(dtype)
        for name, (_, dtype) in tensors.items()
        if not (name.endswith(SCALE) and name.removesuffix(SCALE) in tensors)
    }


def live_formats(model: torch.nn.Module, tied: bool) -> dict[str, str]:
    """Name -> format of every weight of a live vLLM model. tied: its head is the embedding."""
    formats: dict[str, str] = {}
    for path, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        for leaf, parameter in parameters.items():
            if leaf.endswith(SCALE) and leaf.removesuffix(SCALE) in parameters:
                continue
            format = "mxfp8" if leaf + SCALE in parameters else dtype_name(_dtype(module, parameter))
            for name in _names(path, leaf, parameter):
                if not (tied and name == "lm_head.weight"):
                    formats[name] = format
    return formats


def _dtype(module, parameter) -> torch.dtype:
    """BF16 linears of the CPU may keep a widened or an empty parameter: their layer's dtype counts."""
    return getattr(module, "params_dtype", parameter.dtype) if not parameter.numel() else _narrowed(parameter)


def _narrowed(parameter: torch.Tensor) -> torch.dtype:
    wide = parameter.dtype == torch.float32 and torch.equal(parameter, parameter.to(torch.bfloat16).float())
    return torch.bfloat16 if wide else parameter.dtype


def _names(path: str, leaf: str, parameter: torch.Tensor) -> list[str]:
    """The Hugging Face names that a module's parameter holds."""
    if leaf in ("w13_weight", "w2_weight"):
        prefix = path.removesuffix(".routed_experts")
        parts = ("gate_proj", "up_proj") if leaf == "w13_weight" else ("down_proj",)
        return [f"{prefix}.{expert}.{part}.weight" for expert in range(parameter.shape[0]) for part in parts]
    prefix, _, last = path.rpartition(".")
    return [f"{prefix}.{part}.{leaf}" for part in _FUSED[last]] if last in _FUSED else [f"{path}.{leaf}"]
