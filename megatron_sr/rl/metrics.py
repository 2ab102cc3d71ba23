"""The record of a run: one JSON object a line, and a progress line for people."""

from __future__ import annotations

import json
from pathlib import Path


class MetricsLog:
    """Appends records to a JSONL file (or nowhere, when `path` is None)."""

    def __init__(self, path: Path | None):
        self.path = path
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, record: dict) -> None:
        if self.path:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def read_metrics(path: Path) -> list[dict]:
    """The records of a metrics file, oldest first."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def progress_line(record: dict, iterations: int) -> str:
    """One line a person can follow; columns keep their places."""

    def number(key, form):
        return form.format(record[key]) if record.get(key) is not None else "-" * 6

    parts = [f"{record['rounding']:<10} {record['iteration']:>3}/{iterations}"]
    if "exact_reward" in record:
        parts.append("exact reward " + number("exact_reward", "{:.4f}"))
    parts.append("sampled " + number("sampled_reward", "{:.4f}"))
    parts.append("unchanged " + (f"{100 * record['unchanged']:6.2f} %" if "unchanged" in record else "-" * 6))
    parts.append("logprob gap " + number("logprob_gap_mean", "{:.4f}"))
    parts.append("sync " + number("sync_seconds", "{:.3f} s"))
    parts.append(number("seconds", "{:.2f} s/iteration"))
    return "  ".join(parts)
