"""Which of Megatron's FP8 flags go together with --param-rounding-format mxfp8; docs/mxfp8.md has the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_FORMAT = "--param-rounding-format mxfp8"


def uses_transformer_engine(look_up: Callable[[str, Any], Any]) -> bool:
    """Whether Transformer Engine holds the params as MXFP8Tensors; False: BF16 params hold the MXFP8 values.

    look_up(field, default): of Megatron-LM's arguments or the configurations made of them. Raises ValueError, with the way out, for
    flags under which the params would be quantized elsewhere or to something else.
    """
    if not look_up("fp8", None):
        return False
    recipe = look_up("fp8_recipe", None)
    recipe = str(getattr(recipe, "value", recipe))
    if recipe != "mxfp8":
        raise ValueError(
            f"{_FORMAT} does not work with --fp8-recipe {recipe}, under which weights become another format; use --fp8-recipe mxfp8, or "
            "leave --fp8-format out: BF16 params then hold the MXFP8 values"
        )
    if not look_up("fp8_param_gather", False):
        raise ValueError(
            f"{_FORMAT} does not work with --fp8-format without --fp8-param-gather: Transformer Engine would quantize the params once "
            "more, to nearest, at every forward pass; add --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag, or leave --fp8-format out"
        )
    if not look_up("reuse_grad_buf_for_mxfp8_param_ag", False):
        raise ValueError(
            f"{_FORMAT} does not work with --fp8-param-gather without --reuse-grad-buf-for-mxfp8-param-ag: main params would be quantized "
            "shard by shard inside Transformer Engine; add that flag"
        )
    return True
