"""What a comparison of roundings comes to, as numbers: iterations to a target, sticking, parity."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


def iterations_to_target(records: list[dict], target: float) -> float | None:
    """The iteration at which `exact_reward` first reaches `target`, interpolated linearly; None if it never does."""
    points = [(r["iteration"], r["exact_reward"]) for r in records if "exact_reward" in r]
    if points and points[0][1] >= target:
        return float(points[0][0])
    for (before, low), (after, high) in itertools.pairwise(points):
        if high >= target > low:
            return before + (after - before) * (target - low) / (high - low)
    return None


@dataclass(frozen=True)
class ArmSummary:
    """One run. Rewards are probabilities; sticking is percent of weights unchanged after optimizer steps 1 to 4."""

    iterations_to_target: float | None
    final_reward: float
    final_reward_main_params: float
    start_reward: float
    sticking: list[float]
    iterations: int


def summarise(records: list[dict], target: float) -> ArmSummary:
    """The summary of one run's metrics records."""
    steps = [pair for r in records for pair in r.get("unchanged_after_steps", [])]
    scored = [r for r in records if r.get("exact_reward_main_params") is not None]
    return ArmSummary(
        iterations_to_target=iterations_to_target(records, target),
        final_reward=records[-1]["exact_reward"],
        final_reward_main_params=scored[-1]["exact_reward_main_params"],
        start_reward=records[0]["exact_reward"],
        sticking=[100 * fraction for _, fraction in steps],
        iterations=records[-1]["iteration"],
    )


def verdict(nearest: ArmSummary, stochastic: ArmSummary, target: float, mismatched: int, factor: float) -> str | None:
    """Why the comparison fails, or None: stochastic must need at most 1/factor of nearest's iterations, and no tensor may differ.

    A nearest run that never reaches the target counts as one that needs more than all its iterations.
    """
    if mismatched:
        return f"{mismatched} tensors read back from vLLM differ from the trainer's"
    if stochastic.iterations_to_target is None:
        return f"stochastic rounding did not reach the target {target:.4f} in {stochastic.iterations} iterations"
    reached = nearest.iterations_to_target
    limit = (nearest.iterations if reached is None else reached) / factor
    if stochastic.iterations_to_target > limit:
        return (
            f"stochastic rounding took {stochastic.iterations_to_target:.1f} iterations to the target {target:.4f}, "
            f"more than {limit:.1f} = 1/{factor} of nearest's"
        )
    return None
