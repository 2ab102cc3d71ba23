"""Stochastic rounding for FusedAdam of Transformer Engine and Apex, by hooks around its `step`.

Their kernel casts the FP32 main param to the model param by itself, to nearest.

    FP32 main params     after each step the params are rounded again, stochastically, from the main params: one launch.
    16-bit remainders    the param is the upper half of its main param (kernels/remainder.py), rounded to nearest as the
                         kernel knows it. Before each step stochastic params are turned into that form, afterwards back.

**A param and its remainder are never mixed up.** `form` says how params are rounded at present. Every way in and out of
the optimizer passes through it: the hooks, and `get_unscaled_state` / `set_scaled_state`, through which `state_dict`,
`load_state_dict` and Megatron's checkpoints read and write. They carry the whole FP32 main param instead of the
remainder, so a checkpoint means the same whatever the form, and plain Transformer Engine refuses it (it asserts int16)
instead of reading a quarter of all main params one BF16 ulp off. An exception between the hooks leaves nearest form.
"""

from __future__ import annotations

import torch

from megatron_sr import checkpoint
from megatron_sr.config import ParamRounding
from megatron_sr.fused_adam import layout
from megatron_sr.kernels import remainder
from megatron_sr.noise import check_u64
from megatron_sr.rounding import RoundingPlan

_MAIN = "master_param"
_ATTRIBUTE = "_megatron_sr_rounding"


def round_fused_adam(optimizer: torch.optim.Optimizer, identities: dict, config: ParamRounding) -> FusedAdamRounding:
    """Make a FusedAdam round its main params as `config` says. Once, before the first step and before loading.

    optimizer   transformer_engine.pytorch.optimizers.FusedAdam or apex.optimizers.FusedAdam with `master_weights=True`.
    identities  param -> (key of its whole tensor, [Segment, ...]), for every BF16 or FP16 param of the optimizer.

    The rounding state (mode, seed, step, ...) rides in the param groups, as Adam's step does. `nearest` leaves the step alone
    and only drops that state from checkpoints of stochastic runs. Raises ValueError for what is not supported, with the way out.
    """
    if hasattr(optimizer, _ATTRIBUTE):
        raise ValueError("param rounding is already set up for this optimizer; call round_fused_adam only once")
    if config.mode == "stochastic":
        layout.check_supported(optimizer)
    kind = (
        RemainderRounding if layout.stores_remainders(optimizer) and config.mode == "stochastic" else FusedAdamRounding
    )
    rounding = kind(optimizer, identities, config)
    setattr(optimizer, _ATTRIBUTE, rounding)
    return rounding


class FusedAdamRounding:
    """Rounding of one FusedAdam with FP32 main params.

    config  the ParamRounding, its format settled.
    step    successful steps so far: the noise of the params' last rounding.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, identities: dict, config: ParamRounding):
        self.config, self.step = config, 0
        self._optimizer, self._identities = optimizer, {}
        self._plan, self._planned = None, []
        if config.mode == "stochastic":
            params = layout.low_precision_params(optimizer)
            if not params:
                raise ValueError(
                    "param rounding: the optimizer holds no BF16 or FP16 params; FP32 params need no rounding"
                )
            self.config = config.for_dtype(params[0].dtype)
            if self.config.format == "mxfp8":
                raise ValueError(
                    "param rounding: MXFP8 is Megatron's (docs/mxfp8.md); FusedAdam's hooks round to BF16 or FP16"
                )
            self._identities = {p: _identity(p, identities) for p in params}
            optimizer.register_step_pre_hook(lambda _, args, kwargs: self.before_step(*args[1:], **kwargs))
            optimizer.register_step_post_hook(lambda _, args, kwargs: self.after_step(kwargs))
            self._store()
        checkpoint.on_load(optimizer, self.config, loaded=lambda state: self._loaded(state["step"]))

    def set_step(self, step: int) -> None:
        """Continue after `step` successful steps; the params become the rounding of the main params at that step."""
        self.step = check_u64("step", step)
        self._store()
        self.recompute()

    @torch.no_grad()
    def recompute(self) -> None:
        """Round the params again from the main params: the same bits however often it is called. Nothing before the first step."""
        if self.config.mode == "stochastic" and self._refresh():
            self._plan.run_(self.noise_step)

    @property
    def noise_step(self) -> int:
        return 0 if self.config.noise == "fixed" else self.step

    def before_step(self, closure=None, **_) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "param rounding: a replayed CUDA graph would draw the same noise each step; step outside of the graph"
            )

    def after_step(self, step_kwargs: dict) -> None:
        if layout.skipped(self._optimizer, step_kwargs):
            self.recompute()
        else:
            self.set_step(self.step + 1)

    def _loaded(self, step: int) -> None:
        # Transformer Engine restores its state only after this hook; the model params come from the model's checkpoint.
        if self.config.mode == "stochastic":
            self.step = step
            self._store()

    def _store(self) -> None:
        checkpoint.store(self._optimizer, checkpoint.rounding_state(self.config, self.step))

    def _rounded(self) -> list[torch.nn.Parameter]:
        """The params that `include` and `exclude` leave to stochastic rounding; the kernel's own cast serves the others."""
        return [p for p, (key, _) in self._identities.items() if self.config.rounds(key)]

    def _refresh(self) -> bool:
        """Make the plan anew if the optimizer has replaced main params. False: it has none yet."""
        mains = layout.main_params(self._optimizer)
        params = [p for p in self._rounded() if p in mains]
        planned = [(p, p.data_ptr(), mains[p], mains[p].data_ptr()) for p in params]
        same = len(planned) == len(self._planned) and all(
            new[0] is old[0] and new[1] == old[1] and new[2] is old[2] and new[3] == old[3]
            for new, old in zip(planned, self._planned)
        )
        if not same:
            self._plan = self._make_plan(params, [mains[p] for p in params])
            self._planned = planned
        return bool(planned)

    def _make_plan(self, params: list, mains: list):
        return RoundingPlan(
            [p.detach() for p in params],
            mains,
            [self._identities[p] for p in params],
            seed=self.config.seed,
            stream=self.config.stream,
            format=self.config.format,
        )


class RemainderRounding(FusedAdamRounding):
    """Rounding of one FusedAdam with 16-bit remainders.

    form  the noise step of the params' last stochastic rounding; None: they are in nearest form.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, identities: dict, config: ParamRounding):
        self.form: int | None = None
        self._unknown: set = set()  # params whose remainder was loaded without saying which form the param is in
        self._foreign = False  # the last state loaded was saved without param rounding
        super().__init__(optimizer, identities, config)
        if self.config.format != "bf16":
            raise ValueError(
                f"param rounding: 16-bit remainders complete BF16 params, not {self.config.format}; use format 'bf16', "
                "or pass store_param_remainders=False"
            )
        # Not torch's load hooks: Transformer Engine goes on with the caller's own dict, which is not ours to change.
        self._read, self._write, self._load = (
            optimizer.get_unscaled_state, optimizer.set_scaled_state, optimizer.load_state_dict,
        )  # fmt: skip
        optimizer.get_unscaled_state, optimizer.set_scaled_state = self.get_unscaled_state, self.set_scaled_state
        optimizer.load_state_dict = self.load_state_dict

    def before_step(self, closure=None, **kwargs) -> None:
        super().before_step()
        if closure is not None:
            raise ValueError(
                "param rounding: with 16-bit remainders the params are in another form during step(), so a closure would see "
                "other weights; evaluate the loss before the step, or pass store_param_remainders=False"
            )
        self.to_nearest()

    @torch.no_grad()
    def to_nearest(self) -> None:
        """Params in nearest form, as plain Transformer Engine reads and writes them; `recompute` goes back."""
        self._check_known()
        if self.form is not None and self._refresh():
            self._plan.to_nearest_(self.form)
        self.form = None

    @torch.no_grad()
    def recompute(self) -> None:
        """Params in stochastic form of the present step. At step 0 nothing has been rounded yet: they stay as they are."""
        target = self.noise_step if self.step else None
        if self.form == target:
            return
        self._check_known()
        if not self._refresh():
            return
        if target is None:
            self.to_nearest()
        else:
            self._plan.to_stochastic_(target, self.form)
            self.form = target

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """As Transformer Engine's; the main param of a BF16 param comes as FP32, a copy, whatever form the param is in."""
        if name != _MAIN or param not in self._identities:
            return self._read(param, name)
        self._check_known()
        copy, low = param.detach().clone(), self._optimizer.state[param][name].clone()
        if self._stochastic(param):
            self._make_plan([param], [low], [copy]).to_nearest_(self.form)
        return remainder.join(copy, low)

    def set_scaled_state(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        """As Transformer Engine's; an FP32 main param also writes its BF16 param, in the present form."""
        if name == _MAIN and param in self._identities:
            if value.dtype == torch.int16:
                self._unknown.add(param)  # a load with its main param, or from a nearest run, takes this back
            elif self._foreign:
                raise ValueError(
                    "param rounding: this checkpoint was saved without it, so what is loaded as main params may be 16-bit remainders; "
                    "load its weights alone (Megatron-LM: --finetune)"
                )
            else:
                main, value = value, torch.empty_like(param, dtype=torch.int16)
                self._split(param, value, main)
                self._unknown.discard(param)
        self._write(param, name, value)

    def load_state_dict(self, state_dict: dict) -> None:
        """As torch's: main params become params and remainders in the form of the saved step, as they were."""
        saved = checkpoint.find(state_dict["param_groups"])
        checkpoint.check_loadable(saved, self.config)
        self._foreign = saved is None  # a nearest run's: its remainders complete params in nearest form
        self.step = 0 if saved is None else saved["step"]
        self.form = self.noise_step if self.step else None
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        states, unknown = dict(state_dict["state"]), set()
        for number, param in zip(numbers, params):
            main = states.get(number, {}).get(_MAIN)
            if main is None or param not in self._identities:
                continue
            if main.dtype == torch.int16:
                if not self._foreign:  # Megatron loads placeholders first and sets the main params afterwards
                    unknown.add(param)
                continue
            low = torch.empty_like(param, dtype=torch.int16)
            self._split(param, low, main)
            states[number] = {**states[number], _MAIN: low}
        self._load({**state_dict, "state": states})
        self._unknown = unknown

    def _split(self, param: torch.Tensor, low: torch.Tensor, main: torch.Tensor) -> None:
        main = main.to(device=param.device, dtype=torch.float32).view_as(param).contiguous()
        remainder.split_(param.detach(), low, main)
        if self._stochastic(param):
            self._make_plan([param], [low]).to_stochastic_(self.form)

    def _stochastic(self, param: torch.Tensor) -> bool:
        return self.form is not None and self.config.rounds(self._identities[param][0])

    def _check_known(self) -> None:
        if self._unknown:
            raise RuntimeError(
                f"param rounding: 16-bit remainders of {len(self._unknown)} params were loaded without their main params, so it is "
                "unknown how the params were rounded; load a state that this optimizer's state_dict() made, or the weights alone"
            )

    def _make_plan(self, params: list, mains: list, places: list | None = None):
        """The plan of these params; `places` are tensors to work on in their stead."""
        return remainder.RemainderPlan(
            [p.detach() for p in places or params],
            mains,
            [self._identities[p] for p in params],
            seed=self.config.seed,
            stream=self.config.stream,
        )


def _identity(param: torch.Tensor, identities: dict) -> tuple:
    if param not in identities:
        raise ValueError(
            f"param rounding: a {str(param.dtype).removeprefix('torch.')} param of shape {tuple(param.shape)} has no identity; pass "
            "identities for every param of the optimizer"
        )
    return identities[param]
