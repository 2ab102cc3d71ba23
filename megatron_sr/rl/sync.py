"""Hand the job's weights to the ranks' rollout engines, and make sure that all of them hold the same bits."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megatron_sr.rl.mxfp8 import counted
from megatron_sr.rollout.mxfp8_export import export_mxfp8
from megatron_sr.rollout.sync import WeightSync
from megatron_sr.study.sticking import UnchangedCount, unchanged_fraction


class JobSync:
    """Call it with a version after every round of optimizer steps; collective. An update that breaks off is repeated (`WeightSync`).

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
        self._unchanged: UnchangedCount | None = None
        self._bytes = 0
        self._sync = WeightSync(engine, self._export, agree=_all_ranks, announce=_announce)

    def __call__(self, version: int) -> dict:
        """Returns sync_seconds, sync_bytes (of weights that this rank hands its engine: all of them, or the delta's), parity, unchanged
        (share of weights that hold the base's bits; see `mxfp8.counted`), delta (see `DeltaEngine`).

        Raises RuntimeError when an update did not get through, or when the ranks' trainers disagree.
        """
        started = time.perf_counter()
        done = self._sync.sync(version, in_flight=self._in_flight)
        self._check(done)
        record = {"sync_seconds": time.perf_counter() - started, "parity": dict(self.parity)}
        if self._rounding.mxfp8 is None:
            record["unchanged"] = self._unchanged.fraction  # counted on the way to the engine
        else:
            record["unchanged"] = unchanged_fraction(counted(self._policy.export(), self._rounding.mxfp8), self._base)
        delta = getattr(self._engine, "last", None)
        record["sync_bytes"] = delta["bytes"] if delta else self._bytes
        return record | ({"delta": delta} if delta else {})

    def _export(self):
        if self._rounding.mxfp8 is not None:
            return self._weighed(export_mxfp8(self._policy.gpt, self._policy.hf_config, self._rounding.mxfp8))
        self._unchanged = UnchangedCount(self._base)
        return self._weighed(self._unchanged.passing(self._policy.export()))

    def _weighed(self, tensors):
        self._bytes = 0
        for name, tensor in tensors:
            self._bytes += tensor.numel() * tensor.element_size()
            yield name, tensor

    def _check(self, done) -> None:
        mine = done.update.tensors, done.update.digest, len(done.events)
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        self.parity["syncs"] += 1
        self.parity["tensors"] += sum(tensors for tensors, _, _ in everyone)
        repeated = sum(events for _, _, events in everyone)
        if repeated:
            self.parity["repeated"] = self.parity.get("repeated", 0) + repeated
        for rank, (_, digest, _) in enumerate(everyone):
            if digest != done.update.digest:
                raise RuntimeError(
                    f"weights version {done.update.version}: the trainer's weights differ between ranks {dist.get_rank()} and {rank}"
                )


def _all_ranks(good: bool) -> bool:
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, good)
    return all(everyone)


def _announce(event: str) -> None:
    print(f"megatron-sr: rank {dist.get_rank()}: {event}", flush=True)
