"""Measure weight syncs on this machine's CPU: `python tools/bench_sync.py [--small] [--json FILE]`, `--names` for name lookup alone.

A trainer (Megatron-Core, one rank, a 200M-parameter Qwen3-MoE) and a vLLM engine in a child process. In turn, `--rounds` times:

    memcpy, digest       of all weights, one copy / one pass; what the rest is measured against
    export, pack         Megatron shards -> Hugging Face tensors; those into each transport
    sync                 whole update of `SubprocessEngine`: export, digest, pack, travel, check, load, read back
    reload               vLLM's own `reload_weights` of the same tensors, in its process: the load alone, unchecked
    per tensor           one gloo broadcast for each tensor, then `reload_weights`: what the frameworks do, unchecked

Figures are medians over the rounds, ratios medians of the ratios within a round; a GB is 1e9 bytes of weights. Extra memory is the
peak of the resident memory over what it was before a sync, of both processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SIZES = {
    "200M": dict(hidden_size=512, num_hidden_layers=8, num_experts=32, moe_intermediate_size=512, vocab_size=8192),
    "small": dict(hidden_size=128, num_hidden_layers=2, num_experts=8, moe_intermediate_size=128, vocab_size=512),
}
ENGINE = dict(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)


def config(sizes: dict):
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, intermediate_size=64, num_experts_per_tok=2,
        max_position_embeddings=256, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        tie_word_embeddings=False, eos_token_id=0, bos_token_id=None, **sizes,
    )  # fmt: skip


def save(directory: Path, hf_config) -> dict[str, torch.Tensor]:
    """A random BF16 checkpoint; its tensors."""
    from safetensors.torch import save_file

    from megatron_sr.rollout import names

    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator).mul_(0.02).bfloat16()
        for name, shape in names.expected_shapes(hf_config).items()
    }
    hf_config.architectures = ["Qwen3MoeForCausalLM"]
    hf_config.save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return weights


def trainer_model(hf_config, weights):
    """A Megatron GPTModel in this process, one rank."""
    from megatron_sr.megatron import host

    host.install()
    from megatron_sr.megatron.model import Layout, gpt_model, initialize_model_parallel, transformer_config
    from megatron_sr.rollout.export import load_hf

    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        initialize_model_parallel(Layout(), seed=1)
    model = gpt_model(hf_config, transformer_config(hf_config, Layout()))
    if weights is not None:
        load_hf(model, weights, hf_config)
    return model


def timed(function) -> float:
    at = time.perf_counter()
    function()
    return time.perf_counter() - at


class Memory:
    """Peak of a process's resident memory, in bytes, over what it was at `start`."""

    def __init__(self, pid: int):
        self._directory = Path(f"/proc/{pid}")

    def start(self) -> None:
        (self._directory / "clear_refs").write_text("5")  # the peak is now the present
        self._before = self._read("VmRSS")

    def extra(self) -> int:
        return max(0, self._read("VmHWM") - self._before)

    def _read(self, field: str) -> int:
        for line in (self._directory / "status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"{self._directory}/status has no {field}")


class Baseline:
    """A child that does what frameworks do: it takes each tensor from a gloo broadcast and gives them to `reload_weights`."""

    def __init__(self, directory: Path):
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._child = subprocess.Popen(
            [sys.executable, __file__, "--baseline-child", str(directory), str(port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        store = dist.TCPStore(
            "127.0.0.1", port, 2, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._group = _gloo(store, 0)

    def ask(self, what: str) -> float:
        """ "reload": seconds of `reload_weights`. "broadcast": the child takes part in one; seconds of its load."""
        self._child.stdin.write(what + "\n")
        self._child.stdin.flush()
        return json.loads(self._answer()) if what == "reload" else 0.0

    def _answer(self) -> str:
        for line in self._child.stdout:
            if line.startswith("answer "):
                return line.removeprefix("answer ")
        raise RuntimeError("the baseline's process ended")

    def per_tensor(self, tensors) -> float:
        """Seconds from the first broadcast until the child has loaded all."""
        self.ask("broadcast")
        at = time.perf_counter()
        for _, tensor in tensors:
            _broadcast(self._group, tensor.contiguous())
        self._answer()
        return time.perf_counter() - at

    def close(self) -> None:
        self._child.stdin.close()
        self._child.wait()


def _gloo(store, rank: int):
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=600)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(dist.PrefixStore("baseline", store), rank, 2, options)


def _broadcast(group, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor.view(torch.uint8)], options).wait()


def baseline_child(directory: str, port: str) -> None:
    """The other process of `Baseline`."""
    from safetensors.torch import load_file

    from megatron_sr.rollout import vllm_faults
    from megatron_sr.rollout.vllm import VLLMEngine

    torch.set_num_threads(1)
    group = _gloo(dist.TCPStore("127.0.0.1", int(port), 2, is_master=False), 1)
    engine = VLLMEngine(directory, **ENGINE)
    runner = engine._executor.driver_worker.worker.model_runner
    weights = load_file(Path(directory) / "model.safetensors")
    # In memory, not in the file's mapping, and in the order of the export.
    weights = {name: weights[name].clone() for name in engine._wanted}
    print("answer 0", flush=True)
    for line in sys.stdin:
        if line.strip() == "broadcast":
            for name, tensor in weights.items():
                weights[name] = torch.empty_like(tensor)
                _broadcast(group, weights[name])
        print("answer", timed(lambda: vllm_faults.reload_weights(runner, weights.items())), flush=True)


def measure(sizes: dict, rounds: int) -> dict:
    """All figures, in seconds, bytes and bytes a second."""
    from megatron_sr.rollout.export import export_hf
    from megatron_sr.rollout.manifest import Manifest
    from megatron_sr.rollout.subprocess_engine import SubprocessEngine
    from megatron_sr.rollout.transport import make_sender
    from megatron_sr.rollout.update_sender import Timing, send_update

    hf_config = config(sizes)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as shared:
        folder = Path(folder)
        weights = save(folder, hf_config)
        nbytes = sum(t.numel() * t.element_size() for t in weights.values())
        layer = sum(t.numel() * t.element_size() for n, t in weights.items() if n.startswith("model.layers.0."))
        engines = {
            stage: SubprocessEngine(
                folder,
                stage=stage,
                wait=False,
                bucket=min(64 << 20, layer // 4),
                environment={"OMP_NUM_THREADS": "1"},
                **ENGINE,
            )
            for stage in ("whole", "stream")
        }
        baseline = Baseline(folder)
        model = trainer_model(hf_config, weights)
        baseline._answer()
        for engine in engines.values():
            engine.wait_until_ready()
        tensors, copies = list(weights.items()), {n: torch.empty_like(t) for n, t in weights.items()}
        senders = {kind: make_sender(kind, directory=shared) for kind in ("shared_memory", "file", "http")}
        found: dict[str, list[float]] = {}
        details: dict[str, dict] = {}

        def note(name: str, seconds: float) -> float:
            found.setdefault(name, []).append(seconds)
            return seconds

        def copy() -> None:
            for name, tensor in tensors:
                copies[name].copy_(tensor)

        def pack(sender) -> None:
            for i in range(0, len(tensors), 128):
                sender.put(i, tensors[i : i + 128])

        for turn in range(rounds + 1):
            if turn == 1:
                found.clear()  # the first round maps memory and compiles nothing, but is not like the rest
            note("memcpy", timed(copy))
            for threads in (1, 2):
                torch.set_num_threads(threads)
                note(f"digest, {threads} thread{'s' * (threads > 1)}", timed(lambda: Manifest.of(tensors, 0)))
            torch.set_num_threads(1)  # as torchrun starts ranks; the engine needs the other core
            note("export", timed(lambda: [None for _ in export_hf(model, hf_config)]))
            for kind, sender in senders.items():
                note(f"pack into {kind}", timed(lambda sender=sender: pack(sender)))
                sender.end(True)
            note("reload", baseline.ask("reload"))
            note("per tensor", baseline.per_tensor(export_hf(model, hf_config)))
            version = turn + 1
            for stage, engine in engines.items():
                memory = {"trainer": Memory(os.getpid()), "engine": Memory(engine.pid)}
                for m in memory.values():
                    m.start()
                timing = Timing()
                (report,) = send_update(
                    [engine], engine.sender(), export_hf(model, hf_config), version, in_flight="drain", timing=timing
                )
                assert report.good, report.mismatched
                note(f"sync, {stage}", timing.whole)
                details[stage] = {
                    **vars(timing), "apply": report.seconds, "verify": report.verify_seconds,
                    "extra_memory": {who: m.extra() for who, m in memory.items()},
                }  # fmt: skip
            latest = ", ".join(f"{name} {values[-1]:.3f}" for name, values in found.items())
            print(f"round {turn} of {rounds}: {latest}", file=sys.stderr, flush=True)
        for engine in engines.values():
            engine.shutdown()
        baseline.close()

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(found[a], found[b]))

    return {
        "parameters": nbytes // 2,
        "bytes": nbytes,
        "layer_bytes": layer,
        "tensors": len(tensors),
        "seconds": {name: statistics.median(values) for name, values in found.items()},
        "gb_per_second": {name: nbytes / statistics.median(values) / 1e9 for name, values in found.items()},
        "details": details,
        "ratios": {
            "shared-memory speed / memcpy speed (target 0.7)": ratio("memcpy", "pack into shared_memory"),
            "whole sync / plain reload (target 1.5)": ratio("sync, whole", "reload"),
            "streamed sync / plain reload": ratio("sync, stream", "reload"),
            "whole sync / per-tensor broadcast + reload": ratio("sync, whole", "per tensor"),
            "digest GB/s on 2 threads (target 5)": nbytes / statistics.median(found["digest, 2 threads"]) / 1e9,
            "streamed extra memory / decoder layer (target 2)": sum(details["stream"]["extra_memory"].values()) / layer,
            "whole extra memory / decoder layer": sum(details["whole"]["extra_memory"].values()) / layer,
        },
    }


def names_only() -> dict:
    """Export of Qwen3-30B-A3B's names (48 layers, 128 experts), tiny shapes, from a real Megatron model."""
    from megatron_sr.rollout.export import export_hf

    hf_config = config(
        dict(hidden_size=64, num_hidden_layers=48, num_experts=128, moe_intermediate_size=32, vocab_size=64)
    )
    model = trainer_model(hf_config, None)
    times, count = [], 0
    for _ in range(3):
        at = time.perf_counter()
        count = sum(1 for _ in export_hf(model, hf_config))
        times.append(time.perf_counter() - at)
    return {"tensors": count, "seconds (target 5)": min(times)}


def table(result: dict) -> str:
    lines = [f"{result['parameters'] / 1e6:.0f}M parameters, {result['bytes'] / 1e6:.0f} MB, {result['tensors']} tensors, "
             f"a decoder layer is {result['layer_bytes'] / 1e6:.0f} MB", "", f"{'':28}{'s':>9}{'GB/s':>9}"]  # fmt: skip
    lines += [f"{name:28}{s:9.3f}{result['gb_per_second'][name]:9.2f}" for name, s in result["seconds"].items()]
    for stage, detail in result["details"].items():
        parts = ", ".join(
            f"{k} {detail[k]:.3f}" for k in ("export", "digest", "wait", "pack", "commit", "apply", "verify")
        )
        extra = ", ".join(f"{who} {b / 1e6:.0f} MB" for who, b in detail["extra_memory"].items())
        lines.append(f"\nlast sync, {stage}: {parts} s\n    extra memory: {extra}")
    return "\n".join([*lines, "", *(f"{name:52}{value:8.2f}" for name, value in result["ratios"].items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a model of 1M parameters, to see that it runs")
    parser.add_argument("--names", action="store_true", help="only the export of Qwen3-30B-A3B's names")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--baseline-child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.baseline_child:
        baseline_child(*args.baseline_child)
        return
    result = names_only() if args.names else measure(SIZES["small" if args.small else "200M"], args.rounds)
    result["machine"] = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    print(json.dumps(result, indent=2) if args.names else table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
