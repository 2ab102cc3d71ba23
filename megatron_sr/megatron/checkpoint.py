"""The rounding state in Megatron's optimizer checkpoints: what is saved, and what a load refuses.

The state (mode, seed, format, noise, stream, step) lies in every param group of the torch optimizer under
`param_rounding`, as Adam's `step` does. So it travels wherever the optimizer's state travels - `state_dict`,
`sharded_state_dict` in every sharding type, any framework's own saving - and torch's public load hooks see it come back;
no method of Megatron's is replaced.

To start a stochastic run from a checkpoint that has none (a base model, an SFT run), load its weights alone:
`--finetune`, or `--no-load-optim` to keep the iteration count. Main params then start as the BF16 weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_sr.config import ParamRounding

KEY = "param_rounding"
_WAY_OUT = "or start a new run from its weights alone, without the optimizer state (Megatron-LM: --finetune)"
_FLAGS = {
    "mode": "--param-rounding",
    "seed": "--param-rounding-seed",
    "format": "ParamRounding format",
    "noise": "ParamRounding noise",
    "stream": "ParamRounding stream",
}


def rounding_state(config: ParamRounding, step: int) -> dict:
    """What is saved. A new dict at each step: a checkpoint being written in the background keeps its own."""
    return {**config.to_dict(), "step": step}


def check_loadable(saved: dict | None, config: ParamRounding) -> None:
    """Raise ValueError unless a checkpoint with this rounding state (None: without one) continues bit for bit under `config`."""
    if saved is None:
        if config.mode != "nearest":
            raise ValueError(
                f"--param-rounding {config.mode}: the optimizer state in this checkpoint was saved without stochastic rounding "
                f"(it has no rounding state); go on with --param-rounding nearest, {_WAY_OUT}"
            )
        return
    for field, flag in _FLAGS.items():
        ours, theirs = getattr(config, field), saved[field]
        if ours != theirs:
            wanted = f"{flag} {theirs}" + (f" --param-rounding-seed {saved['seed']}" if field == "mode" else "")
            raise ValueError(
                f"{flag} {ours} differs from the checkpoint's {theirs}, so weights would not go on as in the saved run; "
                f"pass {wanted}, {_WAY_OUT}"
            )


def store(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Put the rounding state where the next checkpoint finds it."""
    for group in optimizer.param_groups:
        group[KEY] = state


def on_load(optimizer: torch.optim.Optimizer, config: ParamRounding, loaded: Callable[[dict | None], None]) -> None:
    """From now on check what `optimizer.load_state_dict` is given before anything is loaded, and call `loaded` afterwards."""
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state_dict: check_loadable(_find(state_dict["param_groups"]), config)
    )
    optimizer.register_load_state_dict_post_hook(lambda optimizer: loaded(_find(optimizer.param_groups)))


def _find(param_groups: list[dict]) -> dict | None:
    return next((group[KEY] for group in param_groups if KEY in group), None)
