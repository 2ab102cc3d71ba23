"""Verify the bits that training left: those in a checkpoint, or those in a running rollout engine.

    megatron-sr verify CHECKPOINT                          offline; see `megatron_sr.megatron.verify`
    megatron-sr verify --engine URL --checkpoint DIR       a live engine; see `megatron_sr.rollout.verify_engine`

Exit code 0: every bit is as it should be. 1: some are not. 2: bad input.
"""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `megatron-sr verify`."""
    from megatron_sr.megatron import verify
    from megatron_sr.rollout import verify_engine

    verify.add_arguments(parser)
    verify_engine.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    from megatron_sr.megatron import verify
    from megatron_sr.rollout import verify_engine

    if args.engine is None and args.checkpoint is None:
        print(
            "megatron-sr verify: error: give the folder of a checkpoint, or --engine URL --checkpoint DIR",
            file=sys.stderr,
        )
        return 2
    return verify.main(args) if args.engine is None else verify_engine.main(args)
