"""results.json of `megatron-sr reproduce`: what its fields mean, how it is checked, read and written.

    results
      table1        weights unchanged after optimizer steps 1-4: the paper's, ours, real weights, the prediction; |w| histograms
      experiments   name -> Experiment -> panels -> arms -> runs: one run is one base, one seed, one setting

Rewards are probabilities (0 .. 1), drift is in nats a token, shares of weights in percent, times in seconds. A number that does not
exist (a target never reached, a metric a run does not have) is null, never a stand-in.

**Pairing.** Runs of two arms of one panel with equal `base` and `seed` saw the same prompts in the same order and the same uniform
random numbers for sampling. Comparisons are of such pairs.

**Censoring.** A run that never reaches its target has `iterations_to_target` null. In means it counts as its last iteration, which
makes the mean a lower bound: `censored` says how many runs did, and `bound` says which way a comparison errs.
"""

from __future__ import annotations

import json
import os
import re
import types
from pathlib import Path
from typing import Any, Literal, TypedDict, Union, get_args, get_origin, get_type_hints

VERSION = 1
EXPERIMENTS = ("convergence", "formats", "learning-rate", "variants", "drift", "staleness", "headline")
"""Keys of `experiments`, in reading order. An experiment that was not asked for is absent; one left out by --quick says so."""


class Machine(TypedDict):
    """Where the figures come from."""

    processor: str
    cores: int
    memory_gb: float
    python: str
    torch: str
    megatron_sr: str


class StickingRow(TypedDict):
    """One row of Table 1. `unchanged` and `sem`: after optimizer steps 1, 2, 3, 4; sem null where there is one value (the paper's)."""

    source: Literal["paper", "miniature", "minilm", "analytic", "megatron"]
    label: str  # for people: "MiniLM-L6 (real weights, simulated Adam)"
    format: str  # bf16 | fp16
    rounding: Literal["nearest", "stochastic"]
    unchanged: list[float]  # percent
    sem: list[float] | None  # percent, over bases and seeds
    runs: int


class Histogram(TypedDict):
    """log2 |w| of the weights that Table 1 counts, zeros left out."""

    source: Literal["miniature", "minilm"]
    label: str
    log2_edges: list[float]  # one more than counts
    counts: list[int]


class Table1(TypedDict):
    """Weight sticking. `threshold_log2`: format -> log2 of the magnitude below which one step of size lr reaches half an ulp."""

    lr: float
    rows: list[StickingRow]
    histograms: list[Histogram]
    threshold_log2: dict[str, float]
    notes: list[str]


class Run(TypedDict):
    """One run. The lists from `exact_reward` to `response_length` belong to `iteration`, which starts with 0, the base.

    sampled_reward, response_length   mean over the iterations since the entry before; null at 0.
    exact_reward               of the policy that generates: the rounded weights.
    main_params_exact_reward   the same, scored with the FP32 main params behind them ("shadow"); null where not scored.
    drift_k3                   KL(policy || base), k3 estimate, of the rollouts at that iteration; null where not measured.
    unchanged                  percent of rounded weights whose bits equal the base's.
    """

    base: str
    seed: int
    start_reward: (
        float  # exact, of the base's weights on the panel's grid: numbers that every arm of the panel can hold
    )
    target: float | None
    iteration: list[int]
    exact_reward: list[float]
    main_params_exact_reward: list[float | None]
    sampled_reward: list[float | None]
    drift_k3: list[float | None]
    unchanged: list[float | None]
    response_length: list[float | None]
    unchanged_after_steps: list[float]  # percent, after optimizer steps 1 .. 4
    optimizer_steps: int
    skipped_steps: int  # by the dynamic loss scale (FP16); else 0
    final_loss_scale: float | None  # FP16 only
    iterations_to_target: float | None  # linear between evaluations; null: never reached
    final_reward: float
    main_params_reward: float | None  # at the end
    auc: float  # mean exact reward over the iterations (trapezoid)
    drift_at_target: float | None  # drift_k3 where exact_reward first reaches the target
    seconds: float


class Statistic(TypedDict):
    """Mean and standard error over runs; sem null for a single run."""

    mean: float
    sem: float | None
    n: int
    censored: int  # runs that never reached the target, counted as their last iteration: then mean is a lower bound


class Summary(TypedDict):
    """Over an arm's runs; null where no run has the number."""

    iterations_to_target: Statistic | None
    final_reward: Statistic
    auc: Statistic
    main_params_reward: Statistic | None
    drift_at_target: Statistic | None
    skipped_steps: Statistic


class Arm(TypedDict):
    """One setting. `name` is unique in its panel; `settings` holds what defines it: task, format, rounding, scheme, lr, staleness."""

    name: str
    label: str
    settings: dict[str, Any]
    runs: list[Run]
    summary: Summary


class Comparison(TypedDict):
    """A paired comparison: values of `arm` minus, and over, those of `against` on equal base and seed.

    metric      a scalar of Run: iterations_to_target, final_reward, auc, drift_at_target, main_params_reward.
    ratio       mean(arm) / mean(against); null if the denominator is 0.
    difference  mean of the pairs' differences; sem its standard error.
    t, p        two-sided paired t-test; null with fewer than 2 pairs, or equal differences, or censored pairs (a bound has no test).
    bound       "lower": some pair's `arm` value is censored, so ratio and difference are lower bounds; "upper": `against`'s is;
                "none": neither. Where both could be censored there is no comparison.
    """

    arm: str
    against: str
    metric: str
    ratio: float | None
    difference: float
    sem: float | None
    t: float | None
    p: float | None
    n: int
    censored: int
    bound: Literal["none", "lower", "upper"]


class Panel(TypedDict):
    """Arms that are compared with each other: one picture. `gain`: target = a run's start_reward + gain; null: no target."""

    name: str
    label: str
    gain: float | None
    iterations: int
    arms: list[Arm]
    comparisons: list[Comparison]


class Experiment(TypedDict):
    """`left_out` says what --quick or a missing piece left out, and why; null if nothing. `notes` are findings worth a sentence,
    made from the numbers of this run."""

    title: str
    question: str
    panels: list[Panel]
    notes: list[str]
    left_out: str | None


class Results(TypedDict):
    """The whole file. `failure`: why the headline failed, or null; also null where neither convergence nor headline was run."""

    version: int
    quick: bool
    machine: Machine
    seconds: float
    failure: str | None
    table1: Table1 | None
    experiments: dict[str, Experiment]


_LIST_OF_SCALARS = re.compile(r"\[\s+((?:(?:null|-?\d[^\s,\]]*),?\s+)+)\]")  # written on one line


def save(results: Results, path: Path) -> None:
    """Check and write; the file is complete or not there. Raises ValueError as `check` does."""
    check(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    text = json.dumps(results, indent=0, separators=(",", ":"), allow_nan=False)  # a full study is about 1 MB
    text = _LIST_OF_SCALARS.sub(lambda match: "[" + "".join(match[1].split()) + "]", text)
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)


def load(path: Path) -> Results:
    """Read and check. Raises FileNotFoundError, or ValueError for a file that is not a results file of this version."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); run megatron-sr reproduce again") from None
    try:
        check(results)
    except ValueError as error:
        raise ValueError(
            f"{path}: {error}; it was written by another version: run megatron-sr reproduce again"
        ) from None
    return results


def check(results: Any) -> None:
    """Raise ValueError, naming the field, unless `results` is a `Results` of this version that fits together."""
    if not isinstance(results, dict) or results.get("version") != VERSION:
        found = results.get("version") if isinstance(results, dict) else type(results).__name__
        raise ValueError(f"version is {found!r}, this program reads version {VERSION}")
    _check_type(results, Results, "results")
    for name, experiment in results["experiments"].items():
        if name not in EXPERIMENTS:
            raise ValueError(f"experiment {name!r} is not known; there are: {', '.join(EXPERIMENTS)}")
        for panel in experiment["panels"]:
            _check_panel(panel, f"{name}.{panel['name']}")


def _check_panel(panel: Panel, where: str) -> None:
    names = [arm["name"] for arm in panel["arms"]]
    if len(set(names)) < len(names):
        raise ValueError(f"{where}: arms share a name: {names}")
    for comparison in panel["comparisons"]:
        for arm in (comparison["arm"], comparison["against"]):
            if arm not in names:
                raise ValueError(f"{where}: a comparison names the arm {arm!r}, which is not there")
    for arm in panel["arms"]:
        for run in arm["runs"]:
            for series in SERIES:
                if len(run[series]) != len(run["iteration"]):
                    raise ValueError(
                        f"{where}.{arm['name']}: {series} has {len(run[series])} entries for {len(run['iteration'])} iterations"
                    )


SERIES = (
    "exact_reward",
    "main_params_exact_reward",
    "sampled_reward",
    "drift_k3",
    "unchanged",
    "response_length",
)
"""The lists of a Run that belong to `iteration`."""


def _check_type(value: Any, hint: Any, where: str) -> None:
    """Raise ValueError unless `value`, as JSON gives it, is what `hint` says."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return
        [hint] = [a for a in arguments if a is not type(None)]
        return _check_type(value, hint, where)
    if origin is Literal:
        ok, wanted = value in arguments, f"one of {arguments}"
    elif origin is list:
        ok, wanted = isinstance(value, list), "a list"
    elif origin is dict or hasattr(hint, "__total__"):
        ok, wanted = isinstance(value, dict), "an object"
    elif hint is float:
        ok, wanted = isinstance(value, float | int) and not isinstance(value, bool), "a number"
    elif hint is int:
        ok, wanted = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    else:
        ok, wanted = isinstance(value, hint), hint.__name__
    if not ok:
        raise ValueError(f"{where} is {value!r:.60}; it must be {wanted}")
    if origin is list:
        for i, item in enumerate(value):
            _check_type(item, arguments[0], f"{where}[{i}]")
    elif origin is dict:
        for key, item in value.items():
            _check_type(item, arguments[1], f"{where}.{key}")
    elif hasattr(hint, "__total__"):
        fields = _fields(hint)
        if value.keys() != fields.keys():
            missing, unknown = sorted(fields.keys() - value.keys()), sorted(value.keys() - fields.keys())
            raise ValueError(f"{where}: missing fields {missing}, unknown fields {unknown}")
        for key, field in fields.items():
            _check_type(value[key], field, f"{where}.{key}")


_FIELDS: dict[type, dict[str, Any]] = {}


def _fields(hint: type) -> dict[str, Any]:
    """The annotations of a TypedDict, resolved once."""
    if hint not in _FIELDS:
        _FIELDS[hint] = get_type_hints(hint)
    return _FIELDS[hint]
