"""megatron-sr: stochastic rounding of model parameters for low-precision RL post-training on Megatron-Core.

    import megatron_sr as sr

    noise = sr.Noise(seed=1234, step=7, key="decoder.layers.mlp.linear_fc1.weight")
    sr.round_to_(model_param, main_param, noise=noise)                     # one tensor
    sr.apply_param_rounding(optimizer, model, sr.ParamRounding(seed=1234)) # a Megatron-Core optimizer

Names are imported on first use: importing this package imports neither torch nor Megatron-Core nor vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from megatron_sr.version import __version__

if TYPE_CHECKING:
    from megatron_sr import formats, mxfp8
    from megatron_sr.config import ParamRounding
    from megatron_sr.coordinates import Segment
    from megatron_sr.fsdp.master_weights import MasterWeights
    from megatron_sr.fsdp.trainer import trainer_optimizer
    from megatron_sr.kernels import adamw, remainder
    from megatron_sr.noise import Noise, random_bits
    from megatron_sr.rounding import RoundingPlan, round_segments_, round_to_

_MODULES = {
    "adamw": "megatron_sr.kernels.adamw",
    "formats": "megatron_sr.formats",
    "mxfp8": "megatron_sr.mxfp8",
    "remainder": "megatron_sr.kernels.remainder",
}
_DEFINED_IN = {
    "MasterWeights": "megatron_sr.fsdp.master_weights",
    "Noise": "megatron_sr.noise",
    "ParamRounding": "megatron_sr.config",
    "RoundingPlan": "megatron_sr.rounding",
    "Segment": "megatron_sr.coordinates",
    "random_bits": "megatron_sr.noise",
    "round_segments_": "megatron_sr.rounding",
    "round_to_": "megatron_sr.rounding",
    "trainer_optimizer": "megatron_sr.fsdp.trainer",
}

__all__ = [
    "MasterWeights",
    "Noise",
    "ParamRounding",
    "RoundingPlan",
    "Segment",
    "__version__",
    "adamw",
    "apply_param_rounding",
    "formats",
    "mxfp8",
    "random_bits",
    "remainder",
    "round_segments_",
    "round_to_",
    "trainer_optimizer",
]


def __getattr__(name: str):
    if name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    elif name in _DEFINED_IN:
        value = getattr(importlib.import_module(_DEFINED_IN[name]), name)
    else:
        raise AttributeError(f"module 'megatron_sr' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def apply_param_rounding(optimizer, model, config: ParamRounding):
    """Make a Megatron-Core optimizer round its main params as `config` says.

    See `megatron_sr.megatron.optimizer.apply_param_rounding`; Megatron-Core is imported here, not with this package.
    """
    from megatron_sr.megatron.optimizer import apply_param_rounding as apply

    return apply(optimizer, model, config)
