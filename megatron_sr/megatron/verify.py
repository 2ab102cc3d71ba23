"""Recompute the model params of a Megatron checkpoint from its main params, seed and step, and compare. One process, no GPU, no model.

Any layout (TP, PP, VPP, EP, DP), both sharding types of the distributed optimizer and the Float16 optimizer, saved as
--ckpt-format torch_dist. A checkpoint without rounding state must hold the rounding to nearest.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import contextmanager
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `megatron-sr verify CHECKPOINT`."""
    parser.add_argument(
        "checkpoint", type=Path, nargs="?", help="folder of a checkpoint, or the one that --save wrote to (its newest)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar (there is none without a terminal)")


def main(args: argparse.Namespace) -> int:
    """Exit code 0: every bit is as recomputed, 1: some differ or the checkpoint is damaged, 2: bad input."""
    from megatron_sr.megatron.checkpoint_reader import DamagedCheckpoint

    try:
        result = verify(args.checkpoint, progress=sys.stderr.isatty() and not args.no_progress)
    except DamagedCheckpoint as error:
        return _fail(args, 1, f"damaged: {error}")
    except (ValueError, OSError) as error:
        return _fail(args, 2, str(error))
    print(json.dumps(result, indent=1) if args.json else _text(result))
    return 1 if result["mismatches"] else 0


def verify(path: Path, progress: bool = False) -> dict:
    """Compare a checkpoint with what is recomputed from it.

    Returns
        checkpoint    its folder
        rounding      the saved settings and step; None without
        model_params  whether it holds any
        tensors       that were compared
        elements      that were compared; of main params that were read, if there are no model params
        unmatched     model tensors without main params, not compared
        mismatches    [{tensor, differing, elements}]
    Raises ValueError or FileNotFoundError for what cannot be verified, DamagedCheckpoint for what cannot be read.
    """
    from megatron_sr import checkpoint
    from megatron_sr.config import ParamRounding
    from megatron_sr.megatron.checkpoint_pieces import Sources, read_state
    from megatron_sr.megatron.checkpoint_reader import CheckpointReader
    from megatron_sr.megatron.recompute import mismatches

    reader = CheckpointReader(path)
    reader.check_files()
    state = read_state(reader)
    sources = Sources(reader, state.composed)
    if not sources.main_params:
        raise ValueError(
            f"{reader.path}: no main params are stored (--no-save-optim?), so there is nothing to compare with"
        )
    config = checkpoint.saved_config(state.rounding) if state.rounding else ParamRounding(mode="nearest")
    seen: set[str] = set()
    elements = sources.elements if state.model_params else sources.main_params
    with _progress_bar(elements if progress else 0) as advance:

        def pieces():
            for piece in sources.pieces():
                yield piece
                seen.add(piece.key)
                advance(piece.model.numel())

        if state.model_params:
            wrong = mismatches(pieces(), config, state.rounding["step"] if state.rounding else 0)
        else:
            wrong = []
            for count in sources.read_main_params():
                advance(count)
    if state.model_params and not seen:
        raise ValueError(f"{reader.path}: no 16-bit model param in it has a main param, so there is nothing to compare")
    return {
        "checkpoint": str(reader.path),
        "rounding": state.rounding,
        "model_params": state.model_params,
        "tensors": len(seen),
        "elements": elements,
        "unmatched": sources.unmatched,
        "mismatches": [{"tensor": m.key, "differing": m.differing, "elements": m.numel} for m in wrong],
    }


@contextmanager
def _progress_bar(elements: int):
    """Yields a function that advances the bar by so many elements; without elements there is no bar."""
    if not elements:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("recomputing"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=elements)
        yield lambda count: bar.advance(task, count)


def _text(result: dict) -> str:
    saved = result["rounding"]
    how = (
        f"{saved['mode']}, seed {saved['seed']}, step {saved['step']}"
        if saved
        else "to nearest: saved without rounding state"
    )
    lines = [f"{result['checkpoint']} ({how})"]
    if not result["model_params"]:
        lines.append(
            "ok: holds no model params (--param-rounding-save-model none), which are recomputed on load; all "
            f"{result['elements']:,} elements of main params can be read"
        )
    elif result["mismatches"]:
        lines.append("MISMATCH: these model params are not the rounding of the main params:")
        lines += [f"  {m['tensor']}: {m['differing']:,} of {m['elements']:,} elements" for m in result["mismatches"]]
    else:
        lines.append(
            f"ok: {result['tensors']} tensors, {result['elements']:,} elements are the rounding of the main params"
        )
    if result["unmatched"]:
        lines.append(f"without main params, not compared: {', '.join(result['unmatched'])}")
    return "\n".join(lines)


def _fail(args: argparse.Namespace, code: int, message: str) -> int:
    if args.json:
        print(json.dumps({"checkpoint": str(args.checkpoint), "error": message}))
    print(f"megatron-sr verify: error: {message}", file=sys.stderr)
    return code
