"""Save and load the job: Megatron distributed checkpoints of model and optimizer, which load into any layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch.distributed as dist

from megatron_sr.config import ParamRounding
from megatron_sr.megatron.checkpoint_model import SAVE_MODEL
from megatron_sr.megatron.main_params import full_main_params
from megatron_sr.rollout.manifest import Manifest

LATEST = "latest_checkpointed_iteration.txt"  # Megatron's own name for it
STATE = "loop_state.json"
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def _directory(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def _sharded_state_dict(policy, is_loading: bool, metadata: dict) -> dict:
    """metadata: of the checkpoint's content, read and written by the optimizer (whether model params are stored, for one)."""
    state = {"model": policy.gpt.sharded_state_dict()}
    state["optimizer"] = policy.optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=metadata)
    return state


def save(root: Path, policy, loop_state: dict) -> Path:
    """Save after `loop_state["iteration"]` iterations; collective. The tracker file moves last, so a kill leaves the old one."""
    from megatron.core import dist_checkpointing

    iteration = loop_state["iteration"]
    directory, partial = _directory(root, iteration), root / f"partial_{iteration:07d}"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    metadata = dict(SHARDING)
    state = _sharded_state_dict(policy, is_loading=False, metadata=metadata)
    dist_checkpointing.save(state, str(partial), content_metadata=metadata)
    loop_state = {
        **loop_state,
        "digests": {"weights": _weights_digest(policy), "main params": _main_params_digest(policy)},
    }
    dist.barrier()
    if dist.get_rank() == 0:
        (partial / STATE).write_text(json.dumps(loop_state, indent=1))
        if directory.exists():  # moved aside first: a kill in between must not leave neither
            directory.rename(root / f"old_{iteration:07d}")
        partial.rename(directory)
        shutil.rmtree(root / f"old_{iteration:07d}", ignore_errors=True)
        pointer = root / f".{LATEST}"
        pointer.write_text(str(iteration))
        pointer.rename(root / LATEST)
    dist.barrier()
    return directory


def read_loop_state(root: Path) -> dict:
    """The loop's state in the newest checkpoint. Raises FileNotFoundError with the way out when there is none."""
    if not (root / LATEST).is_file():
        raise FileNotFoundError(
            f"--load {root}: no checkpoint there ({LATEST} is missing); give the folder that --save wrote to"
        )
    try:
        state = json.loads((_directory(root, int((root / LATEST).read_text())) / STATE).read_text())
        missing = {"iteration", "seed", "task", "settings", "parity", "digests"} - state.keys()
    except (ValueError, AttributeError, OSError) as error:
        raise ValueError(
            f"--load {root}: {LATEST} or the {STATE} that it leads to is damaged ({error}); use an older checkpoint"
        ) from None
    if missing:
        raise ValueError(
            f"--load {root}: {STATE} lacks {', '.join(sorted(missing))}; it was not written by this version's --save"
        )
    return state


def load(root: Path, policy, rounding: ParamRounding) -> None:
    """Load the newest checkpoint into `policy`; collective. rounding: the job's settings.

    Raises ValueError when the weights or main params that came back are not those that were saved (a damaged file), naming the
    tensors if the weights are not the rounding of the main params. Damaged weights are recomputed if on_mismatch says so.
    """
    from megatron.core import dist_checkpointing

    directory = _directory(root, int((root / LATEST).read_text()))
    metadata = dist_checkpointing.load_content_metadata(str(directory)) or dict(SHARDING)
    state = dist_checkpointing.load(_sharded_state_dict(policy, is_loading=True, metadata=metadata), str(directory))
    policy.gpt.load_state_dict(state["model"])
    # The weights as they were stored: loading the optimizer may round them anew.
    found = {"weights": _weights_digest(policy)} if metadata.get(SAVE_MODEL) != "none" else {}
    policy.optimizer.load_state_dict(state["optimizer"])
    found["main params"] = _main_params_digest(policy)
    found.setdefault("weights", _weights_digest(policy))
    checked = ["main params"] + (["weights"] if rounding.on_mismatch == "error" else [])
    saved = read_loop_state(root)["digests"]
    damaged = [name for name in checked if saved[name] != found[name]]
    if damaged:
        raise ValueError(
            f"--load {root}: the {' and '.join(damaged)} in {directory.name} are not those that were saved (a damaged file?); "
            f"write the number of an older iteration to {LATEST}, or copy the checkpoint again"
        )


def _weights_digest(policy) -> str:
    """Digest of the whole model's weights, equal in every layout; collective."""
    return Manifest.of(policy.export(), version=0).digest


def _main_params_digest(policy) -> str:
    """Digest of the whole FP32 main params, equal in every layout; collective."""
    return Manifest.of(policy.export(full_main_params(policy.optimizer)), version=0).digest
