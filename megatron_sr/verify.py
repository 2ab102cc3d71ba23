"""Verify the bits that training left: those in a checkpoint, or those in a running rollout engine.

    megatron-sr verify CHECKPOINT          offline; see `megatron_sr.megatron.verify`
    megatron-sr verify --engine URL ...    a live engine; see `megatron_sr.rollout.verify_engine`

Exit code 0: every bit is as it should be. 1: some are not. 2: bad input.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `megatron-sr verify`."""
    from megatron_sr.megatron import verify

    verify.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Exit code 0: all bits as they should be, 1: some are not, 2: bad input."""
    from megatron_sr.megatron import verify

    return verify.main(args)
