"""Which runs each experiment of the study is made of, in full and with --quick.

A `PanelPlan` is a picture: arms that differ in their settings, run on the same bases and seeds. Runs that several experiments share
(equal settings) are made once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from megatron_sr.study.miniature.settings import RunSettings

BASES = ("addition-0", "addition-1", "addition-2")
FULL, QUICK = 60, 44  # iterations at the paper's learning rate
GAIN = 0.003  # of exact reward: FP32 reaches it in about 15 iterations
SETTLED_LOSS_SCALE = 2.0**16


@dataclass(frozen=True)
class ArmPlan:
    """settings: what distinguishes the arm from RunSettings' defaults and the panel's `common`."""

    name: str
    label: str
    settings: dict


@dataclass(frozen=True)
class PanelPlan:
    """comparisons: (arm, against, metric) triples; common: settings of all arms; seeds: on each of the bases."""

    name: str
    label: str
    arms: tuple[ArmPlan, ...]
    comparisons: tuple[tuple[str, str, str], ...] = ()
    gain: float | None = GAIN
    bases: tuple[str, ...] = BASES
    seeds: tuple[int, ...] = (0, 1, 2)
    common: dict = field(default_factory=dict)

    def runs(self) -> Iterator[tuple[ArmPlan, RunSettings]]:
        """Every run, arm by arm."""
        for arm in self.arms:
            for base in self.bases:
                for seed in self.seeds:
                    yield arm, RunSettings(**{**self.common, **arm.settings, "base": base, "seed": seed})

    @property
    def iterations(self) -> int:
        """Of the longest arm."""
        return max(settings.iterations for _, settings in self.runs())


@dataclass(frozen=True)
class ExperimentPlan:
    """left_out: what --quick leaves out, or None."""

    name: str
    title: str
    question: str
    panels: tuple[PanelPlan, ...]
    left_out: str | None = None


NEAREST = ArmPlan("bf16-nearest", "BF16 nearest", {})
STOCHASTIC = ArmPlan("bf16-stochastic", "BF16 stochastic", {"rounding": "stochastic"})
FP16 = ArmPlan("fp16", "FP16, loss scale from 2^32", {"format": "fp16"})
FP16_SETTLED = ArmPlan(
    "fp16-settled", "FP16, loss scale from 2^16", {"format": "fp16", "initial_loss_scale": SETTLED_LOSS_SCALE}
)
FP32 = ArmPlan("fp32", "FP32", {"format": "fp32"})


def _against(names, against: str, metric: str = "iterations_to_target") -> tuple[tuple[str, str, str], ...]:
    return tuple((name, against, metric) for name in names if name != against)


def _schedule(quick: bool) -> dict:
    """Iterations at the paper's learning rate, and how often they are scored."""
    return {"iterations": QUICK, "evaluate_every": 4} if quick else {"iterations": FULL}


def convergence(quick: bool) -> ExperimentPlan:
    """The headline in miniature."""
    comparisons = (
        *_against(("bf16-nearest", "bf16-stochastic", "fp32"), "fp16"),
        *_against(("bf16-nearest", "bf16-stochastic", "fp32"), "fp16-settled"),
        *_against(("bf16-nearest", "fp32"), "bf16-stochastic"),
        *_against(("bf16-nearest",), "bf16-stochastic", "final_reward"),
        *_against(("bf16-nearest",), "bf16-stochastic", "main_params_reward"),
    )
    panel = PanelPlan(
        "convergence",
        "Exact reward, BF16, FP16 and FP32 weights, learning rate 1e-6",
        (NEAREST, STOCHASTIC, FP16, FP16_SETTLED, FP32),
        comparisons,
        common=_schedule(quick),
    )
    return ExperimentPlan(
        "convergence",
        "Convergence",
        "Does BF16 with stochastic rounding keep up with FP16, and does rounding to nearest fall behind?",
        (panel,),
        f"{QUICK} iterations instead of {FULL}, scored every 4 instead of every 2" if quick else None,
    )


def formats(quick: bool) -> ExperimentPlan:
    """More mantissa bits, at the paper's learning rate and scaled up."""
    real = PanelPlan(
        "mantissa-1e-6",
        "Nearest rounding with 7 to 10 mantissa bits, learning rate 1e-6",
        (NEAREST, *(_simulated(m) for m in (8, 9, 10)), FP16_SETTLED, STOCHASTIC, FP32),
        _against(("bf16-nearest", "e8m8", "e8m9", "e8m10", "fp16-settled", "bf16-stochastic"), "fp32"),
        seeds=(0,) if quick else (0, 1, 2),
        common=_schedule(quick),
    )
    coarse = PanelPlan(
        "mantissa-1e-5",
        "Nearest rounding with 4 to 7 mantissa bits, learning rate 1e-5: E8M4 sticks there as BF16 does at 1e-6",
        (
            *(_simulated(m) for m in (4, 5, 6, 7)),
            ArmPlan("e8m4-stochastic", "E8M4 stochastic", {"format": "e8m4", "rounding": "stochastic"}),
            FP32,
        ),
        _against(("e8m4", "e8m5", "e8m6", "e8m7", "e8m4-stochastic"), "fp32", "auc"),
        gain=0.03,
        seeds=(0, 1),
        common={"iterations": 80, "lr": 1e-5, "grid": "e8m4", "evaluate_every": 4, "score_main_params_every": 20},
    )
    return ExperimentPlan(
        "formats",
        "Simulated formats",
        "Is the missing precision what slows BF16 down: does every mantissa bit help?",
        (real,) if quick else (real, coarse),
        "one seed on each base instead of three; the coarse formats E8M4 to E8M7 at learning rate 1e-5"
        if quick
        else None,
    )


def _simulated(mantissa_bits: int) -> ArmPlan:
    return ArmPlan(f"e8m{mantissa_bits}", f"E8M{mantissa_bits} nearest", {"format": f"e8m{mantissa_bits}"})


def learning_rate(quick: bool) -> ExperimentPlan:
    """1e-6 to 8e-6."""
    panels = []
    for lr, iterations, every in ((1e-6, FULL, 2), (2e-6, 40, 2), (4e-6, 24, 1), (8e-6, 14, 1)):
        if quick and lr != 4e-6:
            continue
        panels.append(
            PanelPlan(
                f"lr-{lr:.0e}".replace("e-0", "e-"),
                f"Learning rate {lr:.0e}".replace("e-0", "e-"),
                (NEAREST, STOCHASTIC, FP16_SETTLED),
                _against(("bf16-nearest", "bf16-stochastic"), "fp16-settled"),
                gain=2 * GAIN,
                seeds=(0,) if quick else (0, 1, 2),
                common={"iterations": iterations, "lr": lr, "evaluate_every": every},
            )
        )
    return ExperimentPlan(
        "learning-rate",
        "Learning rate",
        "Is FP16 ahead of BF16 at every learning rate, and does stochastic rounding keep up at every one?",
        tuple(panels),
        "learning rates 1e-6, 2e-6 and 8e-6; one seed on each base instead of three" if quick else None,
    )


def variants(quick: bool) -> ExperimentPlan:
    """Other places and times for the noise, against the recommended one."""
    labels = {
        "fresh": "fresh noise for every forward pass",
        "fixed": "fixed noise",
        "backward": "stochastic backward weights",
        "gradients": "stochastic gradients",
        "rollout-only": "rollouts only",
        "trainer-only": "trainer only",
    }
    schemes = ("fresh", "rollout-only") if quick else tuple(labels)
    scheme = {n: ArmPlan(n, f"BF16 stochastic, {labels[n]}", {"rounding": "stochastic", "scheme": n}) for n in labels}
    bf16 = PanelPlan(
        "variants",
        "Variants of stochastic rounding, BF16, learning rate 1e-6",
        (
            replace(STOCHASTIC, label="BF16 stochastic, once a step (recommended)"),
            NEAREST,
            *(scheme[n] for n in schemes),
        ),
        _against((*schemes, "bf16-nearest"), "bf16-stochastic")
        + _against(schemes, "bf16-stochastic", "auc")
        + _against(schemes, "bf16-stochastic", "final_reward"),
        seeds=(0,) if quick else (0, 1),
        common=_schedule(quick),
    )
    coarse = {"format": "e8m2", "rounding": "stochastic"}
    low = PanelPlan(
        "variants-e8m2",
        "Where the noise is drawn, E8M2, learning rate 1e-5",
        (
            ArmPlan("once", "E8M2 stochastic, once a step (recommended)", coarse),
            ArmPlan("nearest", "E8M2 nearest", {"format": "e8m2"}),
            *(
                ArmPlan(n, f"E8M2 stochastic, {labels[n]}", {**coarse, "scheme": n})
                for n in ("rollout-only", "trainer-only", "fixed")
            ),
            FP32,
        ),
        _against(("nearest", "rollout-only", "trainer-only", "fixed", "fp32"), "once", "auc")
        + _against(("nearest", "rollout-only", "trainer-only", "fixed"), "once", "main_params_reward"),
        gain=None,
        common={"iterations": 80, "lr": 1e-5, "grid": "e8m2", "evaluate_every": 4, "score_main_params_every": 20},
    )
    return ExperimentPlan(
        "variants",
        "Variants",
        "Does it matter when and where the noise is drawn?",
        (bf16,) if quick else (bf16, low),
        "fixed noise, stochastic backward weights, stochastic gradients, trainer only; E8M2; one seed on each base instead of two"
        if quick
        else None,
    )


DRIFT_TASKS = {
    "addition-0": "Addition: a unique answer",
    "addition-then-free-0": "Addition, then 8 ungraded tokens",
    "scratch-then-addition-0": "2 ungraded tokens, then addition",
    "split-0": "Two numbers of a given sum: up to 100 right answers",
}


def drift(quick: bool) -> ExperimentPlan:
    """What a gain in reward costs in drift, at several learning rates."""
    raised = ((2e-6, 60, 2), (4e-6, 36, 1), (8e-6, 24, 1))
    common = {"prompts": 16, "score_main_params_every": 1000}
    slow = {"iterations": 100, "evaluate_every": 4}
    arms = [replace(STOCHASTIC, label="BF16 stochastic, 1e-6", settings={**STOCHASTIC.settings, **slow})]
    arms.append(ArmPlan("fp32", "FP32, 1e-6", {"format": "fp32", **slow}))
    for lr, iterations, every in raised:
        text = f"{lr:.0e}".replace("e-0", "e-")
        settings = {"lr": lr, "iterations": iterations, "evaluate_every": every}
        arms.append(ArmPlan(f"bf16-nearest-{text}", f"BF16 nearest, {text}", settings))
    names = [arm.name for arm in arms if arm.name not in ("bf16-stochastic",)]
    panels = tuple(
        PanelPlan(
            base.removesuffix("-0"),
            label,
            tuple(arms),
            _against(names, "bf16-stochastic", "drift_at_target") + _against(names[1:], "fp32", "drift_at_target"),
            gain=0.01,
            bases=(base,),
            common=common,
        )
        for base, label in DRIFT_TASKS.items()
    )
    return ExperimentPlan(
        "drift",
        "Drift",
        "Raising the learning rate also speeds nearest rounding up. Does it cost drift (k3) at equal reward?",
        () if quick else panels,
        "everything" if quick else None,
    )


def staleness(quick: bool) -> ExperimentPlan:
    """Rollouts from weights 0 to 4 iterations old."""
    ages = (0, 4) if quick else (0, 1, 2, 3, 4)

    def arms(format: str, extra: dict) -> tuple[ArmPlan, ...]:
        return tuple(
            ArmPlan(
                f"{rounding}-{age}",
                f"{format.upper()} {rounding}, {age} iteration{'s' * (age != 1)} old",
                {**extra, "rounding": rounding, "staleness": age},
            )
            for rounding in ("nearest", "stochastic")
            for age in ages
        )

    pairs = tuple((f"nearest-{age}", f"stochastic-{age}", "final_reward") for age in ages)
    reached = tuple((f"nearest-{age}", f"stochastic-{age}", "iterations_to_target") for age in ages)
    older = tuple((f"stochastic-{age}", "stochastic-0", "final_reward") for age in ages[1:])
    bf16 = PanelPlan(
        "staleness-bf16",
        "BF16, learning rate 1e-6",
        arms("bf16", {}),
        pairs + reached + older,
        seeds=(0,),
        common=_schedule(quick),
    )
    mxfp8 = PanelPlan(
        "staleness-mxfp8",
        "MXFP8 linear layers, learning rate 1e-6",
        arms("mxfp8", {"format": "mxfp8", "grid": "mxfp8"}),
        pairs + older,
        seeds=(0,),
        common={"iterations": FULL, "evaluate_every": 4},
    )
    return ExperimentPlan(
        "staleness",
        "Staleness",
        "Does stochastic rounding keep its advantage when rollouts come from older weights?",
        (bf16,) if quick else (bf16, mxfp8),
        "staleness 1 to 3; MXFP8" if quick else None,
    )


PLANS = {
    "convergence": convergence,
    "formats": formats,
    "learning-rate": learning_rate,
    "variants": variants,
    "drift": drift,
    "staleness": staleness,
}
"""Name -> the plan, of quick or not. The headline on Megatron-Core and vLLM has its own module."""


def table1_runs() -> list[RunSettings]:
    """The miniature's own sticking: one iteration, four optimizer steps, on every base and seed."""
    arms = (NEAREST, FP16_SETTLED, STOCHASTIC)
    panel = PanelPlan("table1", "", arms, common={"iterations": 1, "score_main_params_every": 1000})
    return [settings for _, settings in panel.runs()]
