"""`import megatron_sr.deepspeed.plugin`: every engine that DeepSpeed makes from now on takes "param_rounding" from its config.

    {"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}, "param_rounding": {"mode": "stochastic", "seed": 1234}}

The keys are ParamRounding's fields. Import it before `deepspeed.initialize` is called; also when a Trainer calls it for you. Without
the import DeepSpeed ignores the key, as it does any key it does not know. Engines whose config lacks it are left alone.
"""

from __future__ import annotations

import dataclasses

from deepspeed.runtime.engine import DeepSpeedEngine

from megatron_sr.config import ParamRounding
from megatron_sr.deepspeed.engine import enable
from megatron_sr.deepspeed.support import config_names

KEY = "param_rounding"
_make = DeepSpeedEngine.__init__


def config_of(settings) -> ParamRounding:
    """ParamRounding from the value of "param_rounding". ValueError for unknown keys and wrong values."""
    known = [field.name for field in dataclasses.fields(ParamRounding)]
    if not isinstance(settings, dict):
        raise ValueError(
            f'"{KEY}" in the DeepSpeed config is {settings!r}; write an object such as {{"mode": "stochastic", "seed": 1234}}'
        )
    if unknown := sorted(set(settings) - set(known)):
        raise ValueError(
            f'"{KEY}" in the DeepSpeed config has unknown keys: {", ".join(unknown)}; known are: {", ".join(known)}'
        )
    with config_names():
        return ParamRounding(**settings)


def _init(self, *args, **kwargs):
    _make(self, *args, **kwargs)
    settings = self._config._param_dict  # `self.config` may be the name of a file
    if KEY in settings:
        enable(self, config_of(settings[KEY]))


DeepSpeedEngine.__init__ = _init
