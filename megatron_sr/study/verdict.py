"""Whether the headline holds: stochastic rounding keeps up with FP16, nearest does not."""

from __future__ import annotations

from megatron_sr.study.results import Arm, Panel

KEEPS_UP = 1.05  # stochastic / FP16, iterations to the target, paired means: at most
LAGS = 1.2  # nearest / FP16: at least


def verdict(panel: Panel) -> str | None:
    """Why the headline fails on this panel, or None.

    Arms: bf16-nearest, bf16-stochastic and every arm of format fp16. Stochastic is held against the fastest FP16 arm, nearest against
    the slowest: whether FP16 pays for finding its loss scale at the start must not decide. A nearest run that never reaches the
    target counts as its last iteration, in FP16's favour; a stochastic or FP16 run that does not is a failure.
    """
    arms = {arm["name"]: arm for arm in panel["arms"]}
    fp16 = [arm for arm in panel["arms"] if arm["settings"].get("format") == "fp16"]
    missing = [name for name in ("bf16-nearest", "bf16-stochastic") if name not in arms]
    if missing or not fp16:
        return f"the panel {panel['name']} lacks {', '.join(missing) or 'an FP16 arm'}: nothing shows the headline"
    for arm in (arms["bf16-stochastic"], *fp16):
        if failure := _unreached(arm):
            return f"{failure} in {panel['iterations']} iterations"
    stochastic, nearest = _paired(arms["bf16-stochastic"], fp16, max), _paired(arms["bf16-nearest"], fp16, min)
    if stochastic[0] > KEEPS_UP:
        return (
            f"stochastic rounding needs {stochastic[0]:.3f} x the iterations of {stochastic[1]}, more than {KEEPS_UP} x"
        )
    if nearest[0] < LAGS:
        return f"nearest rounding needs {nearest[0]:.3f} x the iterations of {nearest[1]}, less than {LAGS} x"
    return None


def verdict_without_fp16(panel: Panel) -> str | None:
    """As `verdict` where no FP16 arm ran: nearest must need at least LAGS x stochastic's iterations."""
    arms = {arm["name"]: arm for arm in panel["arms"]}
    if failure := _unreached(arms["bf16-stochastic"]):
        return f"{failure} in {panel['iterations']} iterations"
    ratio, _ = _paired(arms["bf16-nearest"], [arms["bf16-stochastic"]], min)
    if ratio < LAGS:
        return f"nearest rounding needs {ratio:.3f} x the iterations of stochastic rounding, less than {LAGS} x"
    return None


def _unreached(arm: Arm) -> str | None:
    count = sum(run["iterations_to_target"] is None for run in arm["runs"])
    return f"{count} of {len(arm['runs'])} runs of {arm['label']} did not reach the target" if count else None


def _paired(arm: Arm, against: list[Arm], worst) -> tuple[float, str]:
    """(ratio of paired means, label) against that of `against` for which the ratio is `worst` (max or min)."""
    return worst((_ratio(arm, other), other["label"]) for other in against)


def _ratio(arm: Arm, other: Arm) -> float:
    def value(run) -> float:
        reached = run["iterations_to_target"]
        return float(run["iteration"][-1]) if reached is None else reached

    mine = {(run["base"], run["seed"]): value(run) for run in arm["runs"]}
    theirs = {(run["base"], run["seed"]): value(run) for run in other["runs"]}
    keys = mine.keys() & theirs.keys()
    if not keys:
        raise ValueError(f"{arm['label']} and {other['label']} share no base and seed")
    return sum(mine[k] for k in keys) / sum(theirs[k] for k in keys)
