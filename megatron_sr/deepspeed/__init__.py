"""Stochastic rounding in DeepSpeed (0.19.x): ZeRO 1, 2 and 3, BF16_Optimizer, no ZeRO, CPU offload.

    import megatron_sr.deepspeed.plugin          # then "param_rounding": {"mode": "stochastic", "seed": 1234} in the DeepSpeed JSON

or, for an engine that exists,

    from megatron_sr.deepspeed import enable
    engine, *_ = deepspeed.initialize(...)
    enable(engine, ParamRounding(seed=1234))

DeepSpeed itself is imported by `plugin` and `enable`, not with this package.
"""

from megatron_sr.deepspeed.engine import DeepSpeedRounding, enable

__all__ = ["DeepSpeedRounding", "enable"]
