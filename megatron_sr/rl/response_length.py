"""How long responses are, for the metrics: a policy that learns to ramble, or to be cut off, shows here first."""

from __future__ import annotations

import torch

PERCENTILES = (10, 50, 90, 99)


def response_lengths(lengths: torch.Tensor, truncated: torch.Tensor | None = None) -> dict[str, float]:
    """mean, max, p10, p50, p90, p99 of response lengths in tokens, and `truncated`, the share that was cut off.

    lengths    any shape, of whole numbers: sampled tokens of each response, the end-of-text token included
    truncated  the same shape, bool; None where responses have a fixed length, which leaves the share out

    Percentiles are nearest-rank: the smallest length that at least so many percent of responses do not exceed, a length that occurs.
    """
    ordered = lengths.flatten().sort().values
    count = len(ordered)
    statistics = {"mean": ordered.double().mean().item(), "max": ordered[-1].item()}
    for percent in PERCENTILES:
        statistics[f"p{percent}"] = ordered[max(0, -(-percent * count // 100) - 1)].item()
    if truncated is not None:
        statistics["truncated"] = truncated.double().mean().item()
    return statistics
