"""The rounding state in an optimizer's checkpoints, of any backend: what is saved, and what a load accepts.

The state (the configuration and the step) lies in every param group of the torch optimizer under `param_rounding`, as Adam's
`step` does. So it travels wherever the optimizer's state travels - `state_dict`, `sharded_state_dict` in every sharding type, any
framework's own saving - and torch's public load hooks see it come back.

    run        checkpoint of a    the load
    nearest    nearest run        is Megatron's own
    nearest    stochastic run     turns rounding off, and says so
    stochastic nearest run        turns rounding on at the optimizer's own step, and says so
    stochastic stochastic run     goes on bit for bit; a difference in what decides the bits is an error, or with
                                  --param-rounding-on-mismatch recompute is announced, and the model params are rounded anew

What happens to the model params is the backends' (Megatron: megatron/checkpoint_model.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_sr.config import BIT_FIELDS, FLAGS, ParamRounding

KEY = "param_rounding"


def rounding_state(config: ParamRounding, step: int) -> dict:
    """What is saved. A new dict at each step: a checkpoint being written in the background keeps its own."""
    return {**config.to_dict(), "step": step}


def saved_config(saved: dict) -> ParamRounding:
    """The configuration in a saved rounding state. Fields that an older version did not save have their defaults.

    Raises ValueError when the state is damaged or from a version with settings that this one does not know.
    """
    fields = {name: value for name, value in saved.items() if name != "step"}
    try:
        return ParamRounding(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the checkpoint's rounding state cannot be read ({error}): it is damaged, or was saved by a later version"
        ) from None


def differences(saved: ParamRounding, ours: ParamRounding) -> dict[str, tuple]:
    """The fields that decide the bits and differ: name -> (saved, ours)."""
    pairs = {name: (getattr(saved, name), getattr(ours, name)) for name in BIT_FIELDS}
    # Before a format is settled by the params' dtype it is None: then it is the same as whatever it became.
    return {n: (a, b) for n, (a, b) in pairs.items() if a != b and not (n == "format" and None in (a, b))}


def check_loadable(saved: dict | None, config: ParamRounding) -> None:
    """Raise ValueError unless a checkpoint with this rounding state (None: without one) may be loaded under `config`."""
    if saved is None or config.mode == "nearest":
        return
    theirs = saved_config(saved)
    changed = differences(theirs, config)
    if changed and config.on_mismatch == "error":
        field, (old, new) = next(iter(changed.items()))
        raise ValueError(
            f"{_flag(field, new)} differs from the checkpoint's {_shown(old)}, so weights would not go on as in the saved run; "
            f"pass {_flag(field, old)}, or go on with new noise from here: {FLAGS['on_mismatch']} recompute"
        )


def _flag(field: str, value) -> str:
    return f"{FLAGS[field]} {_shown(value)}"


def _shown(value) -> str:
    return (" ".join(value) or "(none)") if isinstance(value, tuple) else str(value)


def store(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Put the rounding state where the next checkpoint finds it."""
    for group in optimizer.param_groups:
        group[KEY] = state


def on_load(
    optimizer: torch.optim.Optimizer, config: ParamRounding, loaded: Callable[[dict], None], announce: bool = True
) -> None:
    """From now on check what `optimizer.load_state_dict` is given before anything is loaded, and call `loaded(state)` afterwards.

    state["step"] is the step to go on from: the saved one, or the optimizer's own count when the checkpoint has no rounding state.
    announce: print what changes; of chained optimizers, which load one after another, only the first one does.
    """

    def before(optimizer, state_dict):
        saved = find(state_dict["param_groups"])
        check_loadable(saved, config)
        if saved is None or config.mode != "nearest":
            return None
        if saved["mode"] != "nearest" and announce:
            say(
                f"{FLAGS['mode']} nearest: rounding was {saved['mode']} (seed {saved['seed']}) up to step {saved['step']} of this "
                "checkpoint; from the next step on it is to nearest"
            )
        groups = [{k: v for k, v in group.items() if k != KEY} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}  # or the next checkpoint would bear a stale state

    def after(optimizer):
        loaded(find(optimizer.param_groups) or {"step": optimizer_step(optimizer)})

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)


def find(param_groups: list[dict]) -> dict | None:
    """The rounding state in param groups; None without one."""
    return next((group[KEY] for group in param_groups if group.get(KEY) is not None), None)


def optimizer_step(optimizer: torch.optim.Optimizer) -> int:
    """The successful steps that an optimizer has counted itself, 0 if it counts none. FusedAdam counts by group, torch by param."""
    counts = [group["step"] for group in optimizer.param_groups if group.get("step") is not None]
    counts += [state["step"] for state in optimizer.state.values() if isinstance(state, dict) and "step" in state]
    return max((int(count) for count in counts), default=0)


def say(message: str, speaks: bool | None = None) -> None:
    """Print a line, on rank 0 or where `speaks`."""
    if speaks is None:
        speaks = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if speaks:
        print(f"megatron-sr: {message}", flush=True)
