"""Hand the trainer's bits to the rollout engines and make sure that they arrived."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megatron_sr.rollout.mxfp8_export import export_mxfp8
from megatron_sr.study.sticking import UnchangedCount, unchanged_fraction


class WeightSync:
    """Call it with a version after every round of optimizer steps; collective.

    engine: this rank's `RolloutEngine`; in_flight: what becomes of requests that run then; base: the weights that sticking is
    measured against. parity: counters over the whole job, also across a resume.
    """

    def __init__(self, engine, policy, rounding, base: dict[str, torch.Tensor], in_flight: str):
        self._engine, self._policy, self._rounding, self._base, self._in_flight = (
            engine,
            policy,
            rounding,
            base,
            in_flight,
        )
        self.parity = {"syncs": 0, "tensors": 0, "mismatched_tensors": 0}

    def __call__(self, version: int) -> dict:
        """Returns sync_seconds, parity, unchanged (share of weights that hold the base's bits), delta (see `DeltaEngine`).

        Raises RuntimeError when a tensor read back from an engine differs, or when the ranks' trainers disagree.
        """
        started = time.perf_counter()
        tensors, unchanged = self._policy.export(), None
        if self._rounding.mxfp8 is None:
            count = UnchangedCount(self._base)
            tensors = count.passing(tensors)
        else:
            unchanged = unchanged_fraction(tensors, self._base)
            tensors = export_mxfp8(self._policy.gpt, self._policy.hf_config, self._rounding.mxfp8)
        report = self._engine.update_weights(tensors, version=version, in_flight=self._in_flight)
        self._check(report)
        record = {
            "sync_seconds": time.perf_counter() - started,
            "parity": dict(self.parity),
            "unchanged": count.fraction if unchanged is None else unchanged,
        }
        last = getattr(self._engine, "last", None)
        return record | ({"delta": last} if last else {})

    def _check(self, report) -> None:
        reports: list = [None] * dist.get_world_size()
        dist.all_gather_object(reports, report)
        self.parity["syncs"] += 1
        self.parity["tensors"] += sum(r.tensors for r in reports)
        self.parity["mismatched_tensors"] += sum(len(r.mismatched) for r in reports)
        for rank, other in enumerate(reports):
            if other.mismatched:
                raise RuntimeError(
                    f"weights version {report.version}: {len(other.mismatched)} tensors of rank {rank}'s engine differ from the "
                    f"trainer's, first {other.mismatched[0]}; the engine refuses to generate"
                )
            if other.digest != report.digest:
                raise RuntimeError(
                    f"weights version {report.version}: the trainer's weights differ between ranks 0 and {rank}"
                )
