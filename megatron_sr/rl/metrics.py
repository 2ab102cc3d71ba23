"""The record of a run: one JSON object a line, and a progress line for people."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_sr.rl.trackers import open_trackers


class MetricsLog:
    """Appends records to a JSONL file (or nowhere, when `path` is None) and hands them to `trackers` (see trackers.py)."""

    def __init__(self, path: Path | None, trackers: Sequence = ()):
        self.path, self.trackers = path, trackers
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, record: dict) -> None:
        if self.path:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        for tracker in self.trackers:
            tracker.write(record)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()

    def rewind(self, iteration: int, **run) -> int:
        """Take out the records beyond `iteration` of the run with these values (rounding, seed): a resumed job makes them anew.

        Other runs' records stay. Returns how many were taken out.
        """
        for tracker in self.trackers:
            tracker.rewind(iteration)
        if not self.path or not self.path.exists():
            return 0
        records = read_metrics(self.path)
        kept = [r for r in records if r["iteration"] <= iteration or any(r.get(key) != run[key] for key in run)]
        text = self.path.read_text(encoding="utf-8")
        if len(kept) < len(records) or not text.endswith("\n"):
            partial = self.path.with_name(self.path.name + ".partial")
            partial.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
            os.replace(partial, self.path)
        return len(records) - len(kept)


def open_log(args: argparse.Namespace, run: str) -> MetricsLog:
    """The log that the job's flags ask for; `run` names it in TensorBoard and W&B."""
    return MetricsLog(args.metrics, open_trackers(args, run))


def read_metrics(path: Path) -> list[dict]:
    """The records of a metrics file, oldest first. A last line that a kill cut off is left out."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line]
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise
    return records


def progress_line(record: dict, iterations: int) -> str:
    """One line a person can follow; columns keep their places."""

    def number(key, form):
        return form.format(record[key]) if record.get(key) is not None else "-" * 6

    parts = [f"{record['rounding']:<10} {record['iteration']:>3}/{iterations}"]
    if "exact_reward" in record:
        parts.append("exact reward " + number("exact_reward", "{:.4f}"))
    parts.append("sampled " + number("sampled_reward", "{:.4f}"))
    for name in record.get("evaluation", ()):
        if name.startswith("mean@"):
            parts.append(f"{name} {record['evaluation'][name]:.4f}")
    parts.append("unchanged " + (f"{100 * record['unchanged']:6.2f} %" if "unchanged" in record else "-" * 6))
    parts.append("logprob gap " + number("logprob_gap_mean", "{:.4f}"))
    if "staleness" in record:
        parts.append("staleness " + ",".join(f"{age}:{count}" for age, count in record["staleness"].items()))
    parts.append("sync " + number("sync_seconds", "{:.3f} s"))
    parts.append(number("seconds", "{:.2f} s/iteration"))
    return "  ".join(parts)
