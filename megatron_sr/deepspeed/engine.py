"""Stochastic rounding of a DeepSpeed engine: `enable(engine, ParamRounding(...))`.

The rounding state (configuration and step) lies in the param groups of the inner optimizer, as Adam's step does, and so is in
DeepSpeed's own checkpoints, universal ones too. DeepSpeed's `global_steps` would not do: it counts skipped steps.
"""

from __future__ import annotations

import inspect

import torch

from megatron_sr import checkpoint
from megatron_sr.config import ParamRounding
from megatron_sr.deepspeed.sites import Site, site_of, whole
from megatron_sr.deepspeed.support import check_supported, config_names

_ATTRIBUTE = "_param_rounding"


def enable(engine, config: ParamRounding, identities: dict | None = None) -> DeepSpeedRounding:
    """Make a DeepSpeed engine round its main params as `config` says. Once, before the first step and before loading.

    engine      what `deepspeed.initialize` returned first.
    identities  param -> (key, [Segment, ...]) of what this rank holds of it before ZeRO cuts it. Default: the parameter's name, all
                elements in row-major order. Equal identities give equal bits, in Megatron-Core as well.

    nearest leaves the step as it is; it only handles the state of checkpoints of stochastic runs.
    Raises ValueError for what is not supported (C6).
    """
    if hasattr(engine, _ATTRIBUTE):
        raise ValueError(
            'param_rounding is already set up for this engine (by "param_rounding" in its config?); call enable once'
        )
    if not isinstance(getattr(engine, "basic_optimizer", None), torch.optim.Optimizer):
        raise ValueError("param_rounding: the engine has no optimizer, so nothing would be rounded")
    if config.mode == "stochastic":
        check_supported(engine, config, identities is not None)
        with config_names():
            config = config.for_dtype(torch.bfloat16 if engine.bfloat16_enabled() else torch.float16)
    rounding = DeepSpeedRounding(engine, config, identities)
    setattr(engine, _ATTRIBUTE, rounding)
    return rounding


class DeepSpeedRounding:
    """Parameter rounding of one engine, as `enable` has set it up.

    config  the ParamRounding, its format settled.
    step    draws so far, which is the number of successful optimizer steps (C7); 0 with nearest, which draws nothing.
    """

    def __init__(self, engine, config: ParamRounding, identities: dict | None):
        self.config, self.step = config, 0
        self._engine, self._inner = engine, engine.basic_optimizer
        self._names, self._identities = engine.param_names, identities
        self._site: Site | None = None
        if config.mode != "nearest":
            self._check_globs()
            self._site = site_of(engine.optimizer, self._identity, config, lambda: self.step)
            self._site.install()
            self._step, engine.optimizer.step = engine.optimizer.step, self.optimizer_step
            self._set_step(0)
        self._load, engine.load_checkpoint = engine.load_checkpoint, self.load_checkpoint

    def state_dict(self) -> dict:
        """The rounding state. It already rides in the optimizer's own state: needed only to look at it."""
        return checkpoint.rounding_state(self.config, self.step)

    def optimizer_step(self, *args, **kwargs):
        """In the place of the DeepSpeed optimizer's `step`: the same, with one draw unless the step is skipped."""
        before = self.step
        self._site.install()
        for rounding in self._site.roundings.values():
            rounding.written = None
        self._set_step(before + 1)
        try:
            with self._site.stepping():
                result = self._step(*args, **kwargs)
        except BaseException:
            self._set_step(before)
            raise
        if getattr(self._engine.optimizer, "overflow", False):
            self._set_step(before)
        elif self._site.missed(self.step):
            raise RuntimeError(
                "param_rounding: DeepSpeed made a step without writing model params where they are rounded; this version or feature "
                'of DeepSpeed is not supported: use "mode": "nearest"'
            )
        return result

    def recompute(self) -> None:
        """Round again from the main params with the current step. The same bits (C1). Collective."""
        if self._site is not None:
            self._site.install()
            self._site.recompute()

    def load_checkpoint(self, *args, **kwargs):
        """In the place of the engine's method: the same, and the rounding goes on at the saved step with the saved bits.

        ZeRO 3 rebuilds model params by casting main params to nearest; they are rounded again. Raises ValueError, as Megatron's
        loading does, when what decides the bits differs (`on_mismatch`).
        """
        given = inspect.signature(self._load).bind(*args, **kwargs)
        given.apply_defaults()
        ours = self.step
        self._store(None)  # so that what is there afterwards was loaded
        try:
            path, client_state = self._load(*args, **kwargs)
            saved = checkpoint.find(self._inner.param_groups)
            with config_names():
                checkpoint.check_loadable(saved, self.config)
        except BaseException:
            self._set_step(ours)
            raise
        if path is None:
            self._set_step(ours)
        elif saved is not None:
            self._go_on(saved)
        elif given.arguments["load_optimizer_states"] and not given.arguments["load_module_only"]:
            self._set_step(checkpoint.optimizer_step(self._inner))  # of a run without rounding
        else:
            self._set_step(ours)  # weights alone
        if path is not None:
            self.recompute()
        return path, client_state

    def _go_on(self, saved: dict) -> None:
        if self.config.mode == "nearest":
            checkpoint.say(
                f"param_rounding nearest: rounding was stochastic (seed {saved['seed']}) up to step {saved['step']} of this checkpoint; "
                "from the next step on it is DeepSpeed's own cast"
            )
        self._set_step(saved["step"])

    def _set_step(self, step: int) -> None:
        if self.config.mode != "nearest":
            self.step = step
            self._store(checkpoint.rounding_state(self.config, step))
        else:
            self._store(None)

    def _store(self, state: dict | None) -> None:
        for group in self._inner.param_groups:
            if state is None:
                group.pop(checkpoint.KEY, None)
            else:
                group[checkpoint.KEY] = state

    def _identity(self, param: torch.nn.Parameter):
        if self._identities is None:
            return whole(param, self._names[param])
        if param not in self._identities:
            raise ValueError(f"param_rounding: no identity was given for parameter {self._names[param]}")
        return self._identities[param]

    def _check_globs(self) -> None:
        keys = list(self._names.values()) if self._identities is None else [key for key, _ in self._identities.values()]
        if unmatched := self.config.unmatched(keys):
            raise ValueError(
                f"param_rounding: include/exclude {', '.join(unmatched)} matches no parameter; names look like {keys[0]}"
            )
