"""The job's metrics as curves to watch: TensorBoard event files and, if asked for, Weights & Biases.

Every number of a record becomes a scalar at its iteration, nested ones with a path: {"parity": {"syncs": 3}} -> sync/parity/syncs.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from pathlib import Path

GROUPS = {
    "exact_reward": "reward/exact",
    "exact_reward_main_params": "reward/exact_main_params",
    "sampled_reward": "reward/sampled",
    "completion_tokens": "rollouts/completion_tokens",
    "response_length": "rollouts/response_length",
    "reward_failures": "reward/failures",
    "evaluation": "evaluation",
    "rollout_version": "rollouts/version",
    "rollouts_asked_again": "rollouts/asked_again",
    "staleness": "rollouts/staleness",
    "loss": "optimizer/loss",
    "grad_norm": "optimizer/grad_norm",
    "loss_scale": "optimizer/loss_scale",
    "skipped_steps": "optimizer/skipped_steps",
    "unchanged": "weights/unchanged",
    "unchanged_after_steps": "weights/unchanged_after_step",
    "drift_k3": "policy/drift_k3",
    "logprob_gap_mean": "policy/logprob_gap_mean",
    "logprob_gap_max": "policy/logprob_gap_max",
    "logprob_bit_exact": "policy/logprob_bit_exact",
    "sync_seconds": "sync/seconds",
    "sync_bytes": "sync/bytes",
    "delta": "sync/delta",
    "parity": "sync/parity",
    "seconds": "time/iteration_seconds",
}
"""Record key -> tag. A key that is not listed goes under other/."""
IDENTITY = ("rounding", "seed", "iteration")  # say which run and where, are no curves


def scalars(record: dict) -> Iterator[tuple[str, float]]:
    """(tag, value) of every number in a metrics record ; null, text and other lists have none."""
    for key, value in record.items():
        if key == "unchanged_after_steps":
            value = {str(step): share for step, share in value}
        if key not in IDENTITY:
            yield from _flatten(GROUPS.get(key, f"other/{key}"), value)


def _flatten(tag: str, value) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(f"{tag}/{key}", item)
    elif isinstance(value, int | float):
        yield tag, float(value)


class TensorBoard:
    """Event files in `folder`/<run>: `tensorboard --logdir folder` shows the runs side by side."""

    def __init__(self, folder: Path, run: str):
        self._folder = folder / run
        self._writer = self._open(None)

    def _open(self, purge_step: int | None):
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=purge_step)

    def write(self, record: dict) -> None:
        for tag, value in scalars(record):
            self._writer.add_scalar(tag, value, record["iteration"])
        self._writer.flush()  # whoever watches, or a crash, finds the last iteration

    def rewind(self, iteration: int) -> None:
        """A resumed job makes what lies beyond `iteration` anew: TensorBoard hides the old events from there on."""
        self._writer.close()
        self._writer = self._open(iteration + 1)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of a W&B project; the iteration is the x axis. WANDB_MODE=offline writes to disk only."""

    def __init__(self, project: str, run: str, config: dict):
        import wandb

        self._run = wandb.init(project=project, name=run, config=config)
        self._run.define_metric("*", step_metric="iteration")

    def write(self, record: dict) -> None:
        self._run.log({"iteration": record["iteration"], **dict(scalars(record))})

    def rewind(self, iteration: int) -> None:
        """Nothing to take back: a resumed job is a run of its own there, and its curves start at `iteration` + 1."""

    def close(self) -> None:
        self._run.finish()


def check(args: argparse.Namespace) -> None:
    """Raise ImportError, with the way out, when what --tensorboard-dir or --wandb-project needs is not installed."""
    if args.tensorboard_dir and importlib.util.find_spec("tensorboard") is None:
        raise ImportError("--tensorboard-dir needs the package tensorboard: pip install tensorboard, or drop the flag")
    if args.wandb_project and importlib.util.find_spec("wandb") is None:
        raise ImportError("--wandb-project needs the package wandb: pip install wandb, or drop the flag")


def open_trackers(args: argparse.Namespace, run: str) -> list:
    """Those that the flags ask for."""
    trackers = []
    if args.tensorboard_dir:
        trackers.append(TensorBoard(args.tensorboard_dir, run))
    if args.wandb_project:
        trackers.append(WeightsAndBiases(args.wandb_project, run, _plain(vars(args))))
    return trackers


def _plain(settings: dict) -> dict:
    return {
        key: value if isinstance(value, int | float | str | None) else str(value) for key, value in settings.items()
    }
