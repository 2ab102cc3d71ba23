"""Hand the trainer's weights to an engine, and recover by itself: say what went wrong, start the engine anew if it died, send it all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from megatron_sr.rollout.engine import (
    DEAD,
    DRAIN,
    REFUSING,
    EngineDead,
    RolloutEngine,
    UpdateFailed,
    UpdateRefused,
    UpdateReport,
)

logger = logging.getLogger(__name__)

_FAULTS = (UpdateFailed, UpdateRefused, EngineDead)


@dataclass
class SyncReport:
    """update: the engine's report of the attempt that held. events: what went wrong before, in words, oldest first."""

    update: UpdateReport
    events: list[str] = field(default_factory=list)

    @property
    def attempts(self) -> int:
        return len(self.events) + 1


class WeightSync:
    """Whole-weights syncs of one engine that do not give up at the first fault.

    engine    this rank's
    export    gives all weights anew at each call, (Hugging Face name, tensor) pairs; collective over the trainer's ranks
    attempts  of one sync, before it raises
    agree     whether all ranks say True: `export` is collective, so all repeat it when one must. One rank alone: the default
    announce  gets each event as a line; the default logs a warning
    """

    def __init__(
        self,
        engine: RolloutEngine,
        export: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        *,
        attempts: int = 3,
        agree: Callable[[bool], bool] = lambda good: good,
        announce: Callable[[str], None] = logger.warning,
    ):
        if attempts < 1:
            raise ValueError(f"attempts={attempts} must be at least 1")
        self._engine, self._export, self._attempts = engine, export, attempts
        self._agree, self._announce = agree, announce

    def sync(self, version: int, *, in_flight: str = DRAIN) -> SyncReport:
        """Make the engine serve `version`. Collective like `export`.

        Raises the last fault (UpdateFailed, UpdateRefused, EngineDead) when no attempt held; the engine then serves the old version or
        refuses to generate (`health`).
        """
        events, report = [], None
        for attempt in range(1, self._attempts + 1):
            fault = None
            if report is None:
                report, fault = self._try(version, in_flight)
                if fault is not None:
                    events.append(self._event(version, attempt, fault))
                    self._announce(events[-1])
            else:  # another rank's engine needs it again
                for _ in self._export():
                    pass
            if self._agree(fault is None):
                return SyncReport(report, events)
            last = fault or UpdateFailed(f"weights version {version} did not reach the engine of another rank")
        raise last

    def _try(self, version: int, in_flight: str) -> tuple[UpdateReport | None, Exception | None]:
        tensors = iter(self._export())
        try:
            self._revive()
            report = self._engine.update_weights(tensors, version, in_flight=in_flight)
        except Exception as error:
            if not isinstance(error, _FAULTS) and self._engine.health().state not in (REFUSING, DEAD):
                raise  # the export's own, or a caller's mistake: sending again would not help
            for _ in tensors:  # the other ranks are in the same export
                pass
            return None, error
        if not report.good:
            return None, UpdateFailed(
                f"{len(report.mismatched)} tensors read back from the engine are not the trainer's, first {report.mismatched[0]}"
            )
        return report, None

    def _revive(self) -> None:
        """Start a dead engine again, where it can be."""
        restart = getattr(self._engine, "restart", None)
        if restart is not None and self._engine.health().state == DEAD:
            restart()

    def _event(self, version: int, attempt: int, fault: Exception) -> str:
        health = self._engine.health()
        state = f"still serves version {health.version}" if health.state == "serving" else f"is {health.state}"
        then = "sending all weights again" if attempt < self._attempts else "giving up"
        return f"sync of weights version {version}, attempt {attempt}: {fault}. The engine {state}; {then}"
