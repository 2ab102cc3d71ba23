"""Compile every Triton kernel for GPUs that are not here, and report what the machine code needs.

    python tools/compile_gpu.py                            # all kernels for sm_80, sm_90, sm_100, sm_103: a table
    python tools/compile_gpu.py --targets 90 --json out.json --kernels "round bf16"

Kernels are compiled through the very call that launches them, with a stand-in for the GPU driver, so signatures and
options are those of a run. Registers and spills come from the cubin's resource usage (cuobjdump), instructions and
bytes from its loop over whole chunks (nvdisasm); all tools ship with Triton. Nothing is executed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

TARGETS = (80, 90, 100, 103)
WARP = 32


class Kernel(NamedTuple):
    """One compiled form of a kernel.

    function  the Triton function, and the arguments that it is launched with.
    elements  that a thread handles in one turn of the loop over a whole chunk; 0 if it has no such loop.
    bytes     that it must move per element.
    targets   compute capabilities that can run it.
    """

    function: Callable
    arguments: dict
    elements: int
    bytes: int
    targets: tuple[int, ...] = TARGETS


def kernels() -> dict[str, Kernel]:
    """Every kernel in every form that differs in its code, by name."""
    from megatron_sr import formats

    table = {}
    for format in formats.FORMATS.values():
        if format.block_size > 1:
            continue
        dtype = format.storage[0]
        table[f"round {format.name}"] = _rounding(format, dtype)
        if len(format.storage) > 1 and format.storage[1] == torch.float32:
            table[f"round {format.name} in float32"] = _rounding(format, torch.float32)
    bf16 = formats.BF16
    table["round bf16 nearest"] = _rounding(bf16, torch.bfloat16, stochastic=False)
    table["round bf16 scattered"] = _rounding(bf16, torch.bfloat16, scattered=True)
    table["round e4m3 scattered"] = _rounding(formats.E4M3, torch.uint8, scattered=True)
    table["round bf16 cvt.rs"] = _rounding(bf16, torch.bfloat16, cvt_rs=True)._replace(targets=(100, 103))
    table["adamw"] = _adamw()
    table["adamw nearest"] = _adamw(stochastic=False)
    table["adamw bf16 grad"] = _adamw(grad=torch.bfloat16)
    table["adamw scattered"] = _adamw(scattered=True)
    table["adamw remainders"] = _adamw(remainders=True, last_step=0)
    table["adamw remainders nearest"] = _adamw(remainders=True, stochastic=False)
    table["recode to nearest"] = _adamw(grad=None, remainders=True, last_step=0, stochastic=False)
    table["recode to stochastic"] = _adamw(grad=None, remainders=True)
    return table


def _rounding(format, dtype, stochastic=True, scattered=False, cvt_rs=False) -> Kernel:
    from megatron_sr.kernels import triton_device as device
    from megatron_sr.kernels import triton_rounding

    constants = device.rounding(format, dtype, stochastic, cvt_rs)
    arguments = triton_rounding.arguments(*_tables(), 0, constants, dtype, scattered)
    return Kernel(triton_rounding.round_chunks, arguments, 0 if scattered else _elements(format), 4 + dtype.itemsize)


def _adamw(grad=torch.float32, stochastic=True, scattered=False, remainders=False, last_step=None) -> Kernel:
    from megatron_sr import formats
    from megatron_sr.kernels import adamw, triton_adamw
    from megatron_sr.kernels import triton_device as device

    format, dtype = formats.BF16, torch.bfloat16
    constants = device.rounding(format, dtype, stochastic)
    update = adamw.make_update(1, 1e-3, (0.9, 0.999), 1e-8, 0.01)
    arguments = triton_adamw.arguments(*_tables(), 0, last_step, update, constants, dtype, grad, remainders, scattered)
    moved = (0 if grad is None else grad.itemsize + 16) + (8 if remainders else 10)
    return Kernel(triton_adamw.adamw_chunks, arguments, 0 if scattered else _elements(format), moved)


def _tables():
    """Stand-ins of the tables on the device."""
    from triton.runtime.jit import MockTensor

    return MockTensor(torch.int64), MockTensor(torch.int32)


def _elements(format) -> int:
    """Elements that a thread handles at a time."""
    from megatron_sr.kernels import triton_device as device

    return device.BLOCK * (128 // format.random_bits) // (device.NUM_WARPS * WARP)


@contextlib.contextmanager
def stand_in_gpu(capability: int) -> Iterator[None]:
    """Makes Triton compile for this compute capability (90 for sm_90), as if such a GPU were there."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", capability, WARP)

        def get_current_device(self):
            return capability  # compiled kernels are kept by device number

        def get_current_stream(self, device):
            return 0

    before = driver._active
    driver.set_active(Driver())
    try:
        yield
    finally:
        driver._active = before


def compile_kernel(kernel: Kernel, capability: int) -> dict:
    """Compile for one GPU and read the machine code.

    Returns registers, spill_bytes and shared_bytes; for kernels with a loop over whole chunks also instructions and
    bytes per element in it and the widest access in bytes; fused_multiply_adds, flush_to_zero and cvt_rs count
    instructions of PTX that must be there, or must not, for equality with the CPU; fusion says whether the assembler may
    fuse further multiplications and additions.
    """
    with stand_in_gpu(capability):
        compiled = kernel.function.warmup(**kernel.arguments, grid=(1,))
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", cubin)
        sass = _tool("nvdisasm", "-c", cubin)
    number = {name: int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL", "SHARED")}
    ptx = compiled.asm["ptx"]
    report = dict(
        registers=number["REG"],
        spill_bytes=number["STACK"] + number["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        fused_multiply_adds=len(re.findall(r"\bfma\.rn\.f32", ptx)),
        flush_to_zero=len(re.findall(r"\.ftz\b", ptx)),
        fusion=compiled.metadata.enable_fp_fusion,
        cvt_rs=len(re.findall(r"\bcvt\.rs\b", ptx)),
    )
    if kernel.elements:
        loop = whole_chunk_loop(sass)
        report |= dict(
            instructions_per_element=len(loop) / kernel.elements,
            bytes_per_element=sum(map(access_bytes, loop)) / kernel.elements,
            widest_access=max(map(access_bytes, loop)),
        )
    return report


def whole_chunk_loop(sass: str) -> list[str]:
    """The instructions of the loop over a whole chunk: the one whose loads have no predicate.

    Raises RuntimeError if there is not exactly one.
    """
    lines = [line.strip() for line in sass.splitlines()]
    label_at = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line)}
    loops = []
    for i, line in enumerate(lines):
        jump = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
        if jump and label_at[jump[1]] < i:
            body = [x.split("*/", 1)[1].strip() for x in lines[label_at[jump[1]] : i + 1] if x.startswith("/*")]
            loads = [x for x in body if re.search(r"\bLDG\b", x)]
            if loads and not any(x.startswith("@") for x in loads):
                loops.append(body)
    if len(loops) != 1:
        raise RuntimeError(f"found {len(loops)} loops over whole chunks in the machine code, expected 1")
    return loops[0]


def access_bytes(instruction: str) -> int:
    """Bytes per thread of a global load or store; 0 for another instruction."""
    access = re.match(r"(LDG|STG)\.E(\S*)", instruction)
    if not access:
        return 0
    width = re.search(r"\.(?:[US])?(8|16|64|128)\b", access[2])
    return int(width[1]) // 8 if width else 4


def _tool(name: str, *args) -> str:
    import triton.backends.nvidia

    program = Path(triton.backends.nvidia.__path__[0], "bin", name)
    return subprocess.run([program, *args], check=True, capture_output=True, text=True).stdout


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--targets", type=int, nargs="+", default=TARGETS, choices=TARGETS, metavar="CC")
    parser.add_argument("--kernels", nargs="+", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there as well")
    args = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("TRITON_INTERPRET is set: Triton then interprets kernels and compiles none; unset it")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        table = kernels()
        names = args.kernels or list(table)
        unknown = sorted(set(names) - set(table))
        if unknown:
            parser.error(f"no kernel is called {', '.join(unknown)}; there are: {', '.join(table)}")
        report = {}
        print(f"{'kernel':26} {'target':7} {'regs':>5} {'spill B':>8} {'instr/el':>9} {'B/el':>5} {'access B':>9}")
        for name in names:
            for target in sorted(set(args.targets) & set(table[name].targets)):
                row = report.setdefault(name, {})[f"sm_{target}"] = compile_kernel(table[name], target)
                per_element = [
                    format(row[key], spec) if key in row else "-"
                    for key, spec in (
                        ("instructions_per_element", ".1f"),
                        ("bytes_per_element", ".0f"),
                        ("widest_access", ""),
                    )
                ]
                print(
                    f"{name:26} sm_{target:<4} {row['registers']:5} {row['spill_bytes']:8} "
                    "{:>9} {:>5} {:>9}".format(*per_element),
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
