"""Results put together for tests: the schema's fields, made-up numbers with known relations."""

from megatron_sr.study import results, statistics


def run(base, seed, rewards, start=0.28, gain=0.003, response_length=None, every=2):
    """A `results.Run` whose exact reward at every `every`-th iteration is start + rewards[i]."""
    n = len(rewards)
    raw = {
        "base": base, "seed": seed, "start_reward": start, "iteration": [every * i for i in range(n)],
        "exact_reward": [start + r for r in rewards], "main_params_exact_reward": [start + max(rewards) * i / (n - 1) for i in range(n)],
        "sampled_reward": [None] + [0.3] * (n - 1), "drift_k3": [1e-6 * r * r for r in rewards], "unchanged": [99.0] * n,
        "response_length": [response_length] * n, "unchanged_after_steps": [99.4, 99.2, 98.9, 98.8], "optimizer_steps": 4 * n,
        "skipped_steps": 0, "final_loss_scale": None, "seconds": 1.0,
    }  # fmt: skip
    return statistics.finish(raw, gain)


def arm(name, label, slopes, settings, points=11, gain=0.003):
    """An arm with a run for each of `slopes` (gain an iteration), on bases of different start."""
    runs = [
        run(f"base-{i}", 0, [2 * slope * k for k in range(points)], start=0.2 + 0.1 * i, gain=gain)
        for i, slope in enumerate(slopes)
    ]
    return {"name": name, "label": label, "settings": settings, "runs": runs, "summary": statistics.summarise(runs)}


def panel(name, arms, comparisons, gain=0.003):
    named = {a["name"]: a for a in arms}
    made = [statistics.compare(named[a], named[b], metric) for a, b, metric in comparisons]
    return {
        "name": name, "label": f"Panel {name}, learning rate 1e-6", "gain": gain, "iterations": 20, "arms": arms,
        "comparisons": [c for c in made if c is not None],
    }  # fmt: skip


def convergence(nearest=(1e-4, 1.1e-4, 1.3e-4), stochastic=(3e-4, 3.1e-4, 3.2e-4)):
    """An experiment in which the nearest runs never reach the target (their gain after 20 iterations is below 0.003)."""
    arms = [
        arm("bf16-nearest", "BF16 nearest", nearest, {"format": "bf16", "rounding": "nearest", "lr": 1e-6}),
        arm("bf16-stochastic", "BF16 stochastic", stochastic, {"format": "bf16", "rounding": "stochastic", "lr": 1e-6}),
        arm("fp16", "FP16, loss scale from 2^32", (3.05e-4, 3.2e-4, 3.1e-4), {"format": "fp16", "rounding": "nearest", "lr": 1e-6}),
    ]  # fmt: skip
    wanted = [("bf16-nearest", "fp16"), ("bf16-stochastic", "fp16"), ("bf16-nearest", "bf16-stochastic")]
    triples = [(a, b, "iterations_to_target") for a, b in wanted]
    triples += [("bf16-nearest", "bf16-stochastic", metric) for metric in ("final_reward", "main_params_reward")]
    return {
        "title": "C",
        "question": "Does it?",
        "panels": [panel("convergence", arms, triples)],
        "notes": ["a < b & c"],
        "left_out": None,
    }


def whole(**experiments):
    """Results with these experiments, without Table 1."""
    made = {
        "version": results.VERSION, "quick": True, "seconds": 65.0, "failure": None, "table1": None, "experiments": experiments,
        "machine": {"processor": "P", "cores": 2, "memory_gb": 24.0, "python": "3.12", "torch": "2", "megatron_sr": "0"},
    }  # fmt: skip
    results.check(made)
    return made
