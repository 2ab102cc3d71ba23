"""Run an unmodified Megatron-LM script: it takes the --param-rounding flags beside its own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `megatron-sr run`."""
    parser.add_argument("script", help="for example pretrain_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")


def main(args: argparse.Namespace) -> int:
    """Returns 0, or 2 when there is no such script; what the script raises is not caught."""
    if not Path(args.script).is_file():
        print(
            f"megatron-sr run: error: {args.script}: there is no such file; give the path of a Megatron-LM script",
            file=sys.stderr,
        )
        return 2
    from megatron_sr.megatron.launch import run_script

    run_script(args.script, args.arguments)
    return 0
