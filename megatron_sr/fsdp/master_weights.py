"""`MasterWeights`: any torch optimizer on FP32 main params of a BF16 model, rounded stochastically after each step.

    forward, backward on BF16 params -> gradients -> the optimizer on FP32 main params -> round -> BF16 params

The params may be plain or DTensors (`fully_shard`, tensor parallelism, any mesh); main params and optimizer state are
sharded as they are. The bits depend on the whole tensor's name, the element, the seed and the step alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_sr import checkpoint
from megatron_sr.config import FLAGS, ParamRounding
from megatron_sr.fsdp.coordinates import is_dtensor, local, names_of, same_placement, segments_of
from megatron_sr.fsdp.fused import FusedAdamW, can_fuse
from megatron_sr.fsdp.pieces import Piece, Rounding

MAIN = "main_param"
_OURS = ("params", "param_names", checkpoint.KEY)  # entries of a param group that the inner optimizer does not get
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class MasterWeights(torch.optim.Optimizer):
    """A torch optimizer with FP32 main params and rounding to the model's BF16 (or FP16) params.

        opt = MasterWeights(torch.optim.AdamW, model, rounding=ParamRounding(seed=1234), lr=1e-6)

    optimizer_class  of torch.optim, or any other with torch's interface. torch.optim.AdamW steps and rounds in one launch
                     unless `foreach=` or `fused=` ask for one of torch's own implementations.
    model            the model whose parameters are trained; it names them. In DDP, torch.compile, fully_shard or bare.
    rounding         mode, seed, format, noise, include, exclude of ParamRounding; globs match names such as
                     "model.layers.0.mlp.up_proj.weight". mode "nearest" is the same optimizer without stochastic rounding.
    params           parameters or param groups to train; default: every parameter that requires a gradient.
    identities       {parameter: (key, [Segment, ...])} instead of names, for example `megatron_sr.megatron.identity.identify`
                     of a Megatron model, whose bits then are those of Megatron's own optimizer.
    options          of the optimizer class: lr, betas, ...

    Main params are made from the params at the first step, so weights may be loaded, broadcast and sharded after the
    optimizer has been created. FP32 params are trained as they are. `param_groups` hold the model params; schedulers change
    them as usual. state_dict() has the main params (`main_param`), the optimizer's own state and the rounding state.

    Raises ValueError for a setting that cannot be honoured, RuntimeError when params have been overwritten between steps.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        model: torch.nn.Module,
        *,
        rounding: ParamRounding,
        params=None,
        identities: dict | None = None,
        **options,
    ):
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, whose parameters have names, not {type(model).__name__}")
        if params is None:
            params = [p for p in model.parameters() if p.requires_grad]
        # The class fills in its defaults and refuses what it refuses; main params take the params' places later.
        template = optimizer_class(params, **options)
        groups = template.param_groups
        self.rounding, self.steps = _settled(rounding, groups), 0
        self._class, self._options, self._model, self._identities = optimizer_class, options, model, identities
        self._inner: torch.optim.Optimizer | None = None
        super().__init__(groups, template.defaults)
        self._check_names()
        self._store()

    # --- stepping

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """One optimizer step on the main params, then one draw. Returns the closure's loss.

        A closure is evaluated as by the inner optimizer, with gradients enabled; L-BFGS calls it several times and each time
        sees rounded params.
        """
        loss = None
        if self._inner is None:
            if closure is None and self._asks_for_state():
                self._make_state()
                return None
            self._build()
        self._refuse_overwritten()
        self._push()
        if self._fused:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._fused.step(self._pieces_of_groups, self.steps + 1)
            self._step_inner(None, [m for m in self._mains.values() if m.requires_grad])  # FP32 params
        else:
            loss = self._step_inner(closure, self._mains.values())
            self._rounding.run_(self.steps + 1)
        self._pull()
        self.steps += 1
        if self.steps == 1:
            self._share_state()
        self._store()
        return loss

    def _step_inner(self, closure: Callable | None, mains):
        mains, calls = set(mains), 0

        def evaluate():
            nonlocal calls
            if calls:  # the main params have moved within this step
                with torch.no_grad():
                    self._rounding.run_(self.steps + 1)
            calls += 1
            with torch.enable_grad():
                loss = closure()
            self._give_grads(mains)
            return loss

        try:
            if closure is not None:
                return self._inner.step(evaluate)
            if self._give_grads(mains):
                return self._inner.step()
        finally:
            for piece in self._rounding.pieces:
                piece.main.grad = None

    @torch.no_grad()
    def _give_grads(self, mains: set) -> bool:
        given = False
        for param, main in self._mains.items():
            if main in mains and param.grad is not None:
                given = True
                if main is not param:
                    main.grad = same_placement(param.grad, param).detach().to(main.dtype)
        return given

    def add_param_group(self, group: dict) -> None:
        """As torch's; the model must own the parameters. Main params and state of the others stay."""
        states = self.state_dict()["state"] if getattr(self, "_inner", None) is not None else None
        super().add_param_group(group)
        if states is not None:
            self._build()
            self._load_state(states)

    # --- main params

    @torch.no_grad()
    def _build(self) -> None:
        """Make main params of the params as they are now, and the inner optimizer on them."""
        keys, pieces, self._mains = self._keys(), [], {}
        for param in (p for group in self.param_groups for p in group["params"]):
            self._mains[param] = param
            if param in keys:
                key = keys[param]
                segments = segments_of(param, key) if self._identities is None else self._identities[param][1]
                if not local(param).is_contiguous():
                    raise ValueError(
                        f"parameter {key} is not contiguous (strides {local(param).stride()}); make it so: .contiguous()"
                    )
                self._mains[param] = param.detach().float()
                pieces.append(Piece(param, self._mains[param], key, segments))
        self._rounding = Rounding(pieces, self.rounding)
        by_param = {piece.param: piece for piece in pieces}
        self._pieces_of_groups = [
            [by_param[p] for p in group["params"] if p in by_param] for group in self.param_groups
        ]
        groups = [
            {**_without(group, *_OURS), "params": [self._mains[p] for p in group["params"]]}
            for group in self.param_groups
        ]
        self._inner = self._class(groups, **self._options)
        devices = {local(piece.param).device.type for piece in pieces}
        self._fused = (
            FusedAdamW(self._inner, self._rounding) if can_fuse(self._inner) and devices <= {"cpu", "cuda"} else None
        )
        self._share_state()

    def _keys(self) -> dict[torch.nn.Parameter, str]:
        """Parameter -> key of its whole tensor, for the low-precision ones."""
        params = [p for group in self.param_groups for p in group["params"] if p.dtype in _LOW_PRECISION]
        if self._identities is not None:
            return {p: self._identities[p][0] for p in params}
        names = names_of(self._model)
        for param in params:
            if param not in names:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not in the model, so it has no name; "
                    "pass the model that owns it"
                )
        return {p: names[p] for p in params}

    def _check_names(self) -> None:
        keys = list(self._keys().values())
        unmatched = self.rounding.unmatched(keys)
        if unmatched:
            raise ValueError(
                f"{FLAGS['include']}/{FLAGS['exclude']}: {', '.join(unmatched)} match no parameter; names are such as {keys[0]}"
            )

    @torch.no_grad()
    def recompute(self) -> None:
        """Round the params again from the main params at the present step: the same bits however often it is called."""
        if self._inner is not None and self.steps:
            self._rounding.run_(self.steps)

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Take the params as they are now for main params, after weights have been loaded into the model."""
        for param, main in self._mains.items() if self._inner is not None else ():
            if main is not param:
                main.copy_(param)
        if self._inner is not None:
            self._rounding.refresh()
            self._rounding.written()

    def main_params(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Param -> its FP32 main param (itself, if it is FP32), placed as the param is. Makes them if there are none yet."""
        if self._inner is None:
            self._build()
        return dict(self._mains)

    def _refuse_overwritten(self) -> None:
        if self._rounding.refresh():
            self._rounding.written()
            return
        names = self._rounding.overwritten(self.steps) if self.steps else []
        if names:
            raise RuntimeError(
                f"{len(names)} params, {names[0]} first, have been changed since the last step, but their main params have not: the "
                "step would undo the change. Call reload_model_params() to train on from the params, or recompute() to restore them"
            )

    # --- hyperparameters live in both optimizers

    def _push(self) -> None:
        for ours, inner in zip(self.param_groups, self._inner.param_groups):
            inner.update(_without(ours, *_OURS))

    def _pull(self) -> None:
        for ours, inner in zip(self.param_groups, self._inner.param_groups):
            ours.update(_without(inner, *_OURS))

    def _store(self) -> None:
        checkpoint.store(self, checkpoint.rounding_state(self.rounding, self.steps))

    # --- checkpoints

    def state_dict(self) -> dict:
        """As torch's; per parameter `main_param` and the state of the optimizer class."""
        self._share_state()
        return super().state_dict()

    def _share_state(self) -> None:
        """Show the inner optimizer's state in ours: torch.distributed.checkpoint looks into it for what there is."""
        for param, main in self._mains.items() if self._inner is not None else ():
            self.state[param] = {**({} if main is param else {MAIN: main}), **self._inner.state.get(main, {})}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Continue as the saved run: main params, optimizer state, step; the params become their rounding at that step.

        Raises ValueError for a state without main params (another optimizer's: load the model's weights alone), and when what
        decides the bits differs (`on_mismatch="recompute"` goes on with the new settings).
        """
        saved = checkpoint.find(state_dict["param_groups"])
        stochastic = saved is not None and saved["mode"] == "stochastic"
        checkpoint.check_loadable(saved if stochastic else None, self.rounding)
        if saved is None:
            raise ValueError(
                "this state was saved by another optimizer than MasterWeights: it has no main params. Load the model's weights alone "
                "and start the optimizer anew"
            )
        ours, theirs = self.param_groups, state_dict["param_groups"]
        if [len(group["params"]) for group in ours] != [len(group["params"]) for group in theirs]:
            raise ValueError(
                f"the saved state has param groups of {[len(g['params']) for g in theirs]} params, this optimizer of "
                f"{[len(g['params']) for g in ours]}; build it with the same params and groups"
            )
        for group, loaded in zip(ours, theirs):
            group.update(_without(loaded, *_OURS))
        if state_dict["state"]:
            self._build()
            numbers = [i for group in theirs for i in group["params"]]
            self._load_state({position: state_dict["state"].get(n, {}) for position, n in enumerate(numbers)})
        self.steps = saved["step"]
        self._store()
        self.recompute()

    def _load_state(self, states: dict[int, dict]) -> None:
        """Main params and inner state, by the position of their param. Positions without state keep what they have."""
        packed = self._inner.state_dict()
        params = [p for group in self.param_groups for p in group["params"]]
        for number, state in states.items():
            main = self._mains[params[number]]
            if main is not params[number] and state:
                if MAIN not in state:
                    raise ValueError(
                        f"the saved state of param {number} (of {len(params)}) has no {MAIN}: another optimizer's?"
                    )
                if is_dtensor(state[MAIN]) != is_dtensor(main) or state[MAIN].shape != main.shape:
                    raise ValueError(
                        f"the saved {MAIN} of param {number} has shape {tuple(state[MAIN].shape)}, sharded: {is_dtensor(state[MAIN])}; the "
                        f"main param has {tuple(main.shape)}, sharded: {is_dtensor(main)}. Use torch.distributed.checkpoint, which reshards"
                    )
                main.copy_(state[MAIN])
            if _without(state, MAIN):
                packed["state"][number] = _without(state, MAIN)
        self._inner.load_state_dict(packed)
        self._share_state()
        if self._fused:
            self._fused.forget()

    def _asks_for_state(self) -> bool:
        """Whether this step is torch.distributed.checkpoint's way to see what state there will be: zero lr, zero gradients."""
        params = [p for group in self.param_groups for p in group["params"]]
        return all(float(group.get("lr", 1)) == 0 for group in self.param_groups) and not any(
            p.grad is not None and local(p.grad).any() for p in params
        )

    def _make_state(self) -> None:
        """Main params and inner state as before the first step; nothing is rounded or counted."""
        self._build()
        self._step_inner(None, self._mains.values())
        for param, main in self._mains.items():
            if main is not param:
                main.copy_(param)
            state = self._inner.state.get(main, {})
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].zero_()
        for ours, inner in zip(self.param_groups, self._inner.param_groups):
            for key in inner.keys() - ours.keys():  # a step that is counted by group
                del inner[key]
        self._share_state()
        self._rounding.refresh()
        self._rounding.written()


def _settled(rounding: ParamRounding, groups: list[dict]) -> ParamRounding:
    """`rounding` with its format settled by the params' dtype. Raises ValueError for what MasterWeights does not do."""
    dtypes = {p.dtype for group in groups for p in group["params"]} & set(_LOW_PRECISION)
    if len(dtypes) != 1:
        raise ValueError(
            f"MasterWeights rounds BF16 or FP16 params of one dtype, but found {sorted(map(str, dtypes)) or 'none'}; "
            "convert the model: model.to(torch.bfloat16)"
        )
    if rounding.format == "mxfp8":
        raise ValueError("MasterWeights rounds to 16-bit formats; MXFP8 is Megatron's (docs/mxfp8.md)")
    for field, off in (("log_interval", 0), ("verify_interval", 0), ("save_model", "full")):
        if getattr(rounding, field) != off:
            raise ValueError(
                f"{FLAGS[field]} {getattr(rounding, field)} is not for MasterWeights, which neither writes your logs nor your "
                f"checkpoints; leave {field} at {off!r}"
            )
    return rounding.for_dtype(dtypes.pop())


def _without(mapping: dict, *keys) -> dict:
    return {key: value for key, value in mapping.items() if key not in keys}
