"""Pictures of RL jobs with their captions and descriptions, for the reports."""

from __future__ import annotations

from functools import partial

from megatron_sr.study import figures
from megatron_sr.study.report import Picture


def syncs(jobs: figures.Arms) -> Picture:
    """Time and bytes of the syncs, with what they come to in words."""
    words = []
    for name, runs in jobs.items():
        seconds, size = figures.curve(runs, "sync_seconds")[1], figures.curve(runs, "sync_bytes")[1]
        bytes_text = f", {sum(size) / len(size) / 1e6:.2f} MB" if size else ""
        words.append(f"{name}: {1000 * sorted(seconds)[len(seconds) // 2]:.0f} ms{bytes_text}")
    return Picture(
        "syncs",
        partial(figures.syncs, jobs),
        "Export, transport, loading and the read-back of every tensor; bytes are those that a rank hands to its engine. "
        "Rounding does not change what a full sync sends.",
        f"Line charts of time and bytes of every weight sync. Median time and mean size: {'; '.join(words)}.",
    )


def response_length(jobs: figures.Arms) -> Picture:
    """Tokens a completion; a task whose answers have one length says so."""
    means = {name: figures.curve(runs, "completion_tokens")[1] for name, runs in jobs.items()}
    flat = {value for values in means.values() for value in values}
    words = "; ".join(f"{name} from {values[0]:.1f} to {values[-1]:.1f}" for name, values in means.items() if values)
    fixed = (
        f"This task's answers all have {flat.pop():g} tokens, so there is nothing to see here; other tasks show it."
        if len(flat) == 1
        else "Line: mean over the completions of an iteration. Band: from the 10th to the 90th percentile."
    )
    return Picture(
        "response-length", partial(figures.response_length, jobs), fixed, f"Line chart of tokens a completion: {words}."
    )
