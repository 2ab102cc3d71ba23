"""The command line: `megatron-sr run | demo`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_sr.version import __version__


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 bad input."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="megatron-sr", description="Stochastic rounding of model parameters for RL post-training on Megatron-Core."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    run = commands.add_parser(
        "run",
        help="run an unmodified Megatron-LM script with the --param-rounding flags",
        description="Run an unmodified Megatron-LM script: it takes --param-rounding {nearest,stochastic} and --param-rounding-seed N.",
    )
    run.add_argument("script", help="for example pretrain_gpt.py")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")

    from megatron_sr.study import demo

    demo.add_arguments(
        commands.add_parser(
            "demo",
            help="post-train a small model with both roundings and compare",
            description=demo.__doc__.splitlines()[0],
        )
    )
    args = parser.parse_args(argv)
    if args.command == "demo":
        return demo.main(args)
    if not Path(args.script).is_file():
        print(
            f"megatron-sr run: error: {args.script}: there is no such file; give the path of a Megatron-LM script",
            file=sys.stderr,
        )
        return 2
    from megatron_sr.megatron.launch import run_script

    run_script(args.script, args.arguments)
    return 0
