"""The command line, `megatron-sr COMMAND ...`: finds the module of a command and runs it.

A command is a module with `add_arguments(parser)` and `main(args) -> exit code`; its docstring's first line describes it. Only the
chosen command's module is imported, so that `--version` and `--help` answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from megatron_sr.version import __version__

COMMANDS = {
    "run": ("megatron_sr.megatron.run", "run an unmodified Megatron-LM script with the --param-rounding flags"),
    "demo": ("megatron_sr.study.demo", "post-train a small model with both roundings and compare"),
    "reproduce": ("megatron_sr.study.reproduce", "reproduce the paper's study and write the report"),
    "doctor": ("megatron_sr.doctor", "what this machine has, which kernels run, what is unsupported and why"),
    "serve": ("megatron_sr.rollout.serve", "serve a rollout engine (vLLM) over HTTP, for trainers in other processes"),
    "verify": ("megatron_sr.verify", "recompute the model params of a checkpoint from its main params and compare"),
}
"""Command -> (module, one line of help)."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 bad input."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="megatron-sr", description="Stochastic rounding of model parameters for RL post-training on Megatron-Core."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, (module, help) in COMMANDS.items():
        command = commands.add_parser(name, help=help)
        if name == chosen:
            module = importlib.import_module(module)
            command.description = module.__doc__.splitlines()[0]
            module.add_arguments(command)
    args = parser.parse_args(argv)
    return importlib.import_module(COMMANDS[args.command][0]).main(args)
