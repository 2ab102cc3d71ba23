"""megatron-sr: stochastic rounding of model parameters for low-precision RL post-training on Megatron-Core.

    import megatron_sr as sr

    noise = sr.Noise(seed=1234, step=7, key="decoder.layers.mlp.linear_fc1.weight")
    sr.round_to_(model_param, main_param, noise=noise)                     # one tensor
    sr.apply_param_rounding(optimizer, model, sr.ParamRounding(seed=1234)) # a Megatron-Core optimizer

Importing this package imports torch, but neither Megatron-Core nor vLLM.
"""

from megatron_sr import formats, mxfp8
from megatron_sr.config import ParamRounding
from megatron_sr.coordinates import Segment
from megatron_sr.kernels import adamw, remainder
from megatron_sr.noise import Noise, random_bits
from megatron_sr.rounding import RoundingPlan, round_segments_, round_to_
from megatron_sr.version import __version__

__all__ = [
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
]


def apply_param_rounding(optimizer, model, config: ParamRounding):
    """Make a Megatron-Core optimizer round its main params as `config` says.

    See `megatron_sr.megatron.optimizer.apply_param_rounding`; Megatron-Core is imported here, not with this package.
    """
    from megatron_sr.megatron.optimizer import apply_param_rounding as apply

    return apply(optimizer, model, config)
