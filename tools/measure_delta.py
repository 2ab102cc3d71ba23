"""How large weight deltas are, and what they cost: the main job with fresh and with fixed rounding noise, every sync a delta.

    python tools/measure_delta.py --out runs/delta.json

Runs the post-training job (3-digit addition, 410k parameters, LR 1e-6) once per noise and number of optimizer steps a sync, and once
rounded to nearest, over `--iterations` syncs; writes JSON and prints the table that docs/rollout.md shows. Times are of a tiny model
on the machine at hand: sizes and densities carry over, times do not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "examples" / "rlvr_arithmetic" / "base"
ARMS = {
    "nearest": ["--param-rounding", "nearest"],
    "stochastic, noise fixed": ["--param-rounding", "stochastic", "--param-rounding-noise", "fixed"],
    "stochastic, noise step": ["--param-rounding", "stochastic", "--param-rounding-noise", "step"],
}


def run(arm: str, steps: int, args) -> dict:
    """One job; what its deltas came to. The first sync, which is whole, does not count."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        flags = [
            "--model",
            args.model,
            "--iterations",
            args.iterations,
            "--mini-batches",
            steps,
            "--prompts",
            args.prompts,
        ]
        flags += [
            "--metrics",
            metrics,
            "--weight-sync",
            "delta",
            "--quiet",
            "--eval-prompts",
            16,
            "--main-params-interval",
            0,
            *ARMS[arm],
        ]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=1",
            "-m",
            "megatron_sr.rl.train",
        ]
        command += [*map(str, flags), "--delta-zstd"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{arm}: the job failed\n{done.stdout[-4000:]}")
        deltas = [json.loads(line)["delta"] for line in metrics.read_text().splitlines() if '"delta"' in line]
    deltas = [d for d in deltas if not d["whole"]]

    def mean(of, which=deltas):
        return sum(of(d) for d in which) / len(which)

    tenth = max(1, len(deltas) // 10)
    return {
        "arm": arm,
        "steps_per_sync": steps,
        "syncs": len(deltas),
        "whole_bytes": deltas[0]["whole_bytes"],
        "bytes": mean(lambda d: d["plain_bytes"]),
        "bytes_zstd": mean(lambda d: d["bytes"]),
        "density": mean(lambda d: d["changed"] / d["elements"]),
        "density_first": mean(lambda d: d["changed"] / d["elements"], deltas[:tenth]),
        "density_last": mean(lambda d: d["changed"] / d["elements"], deltas[-tenth:]),
        "positions": {
            k: sum(d["positions"].get(k, 0) for d in deltas) for k in ("none", "gaps", "runs", "bitmap", "all")
        },
        "encode_ms": 1000 * mean(lambda d: d["encode_seconds"]),
        "apply_ms": 1000 * mean(lambda d: d["apply_seconds"] - d["update_seconds"]),
        "update_ms": 1000 * mean(lambda d: d["update_seconds"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=BASE)
    parser.add_argument("--iterations", type=int, default=50, help="syncs of each job")
    parser.add_argument("--prompts", type=int, default=16, help="prompts an iteration; a multiple of the steps a sync")
    parser.add_argument("--steps", type=int, nargs="+", default=[1], help="optimizer steps a sync")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the results")
    args = parser.parse_args()
    columns = ["rounding", "steps a sync", "bytes a sync", "of whole", "with zstd", "changed: mean (first, last tenth)"]
    columns += ["encode", "decode, check", "engine"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)
    results = []
    for steps in args.steps:
        for arm in ARMS:
            r = run(arm, steps, args)
            results.append(r)
            of_whole, zstd = (100 * r[key] / r["whole_bytes"] for key in ("bytes", "bytes_zstd"))
            density = f"{100 * r['density']:.2f} % ({100 * r['density_first']:.2f}, {100 * r['density_last']:.2f})"
            print(
                f"| {arm} | {steps} | {r['bytes']:,.0f} | {of_whole:.1f} % | {zstd:.1f} % | {density} "
                f"| {r['encode_ms']:.1f} ms | {r['apply_ms']:.1f} ms | {r['update_ms']:.1f} ms |",
                flush=True,
            )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"iterations": args.iterations, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
