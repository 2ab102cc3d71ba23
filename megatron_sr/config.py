"""What a user chooses about parameter rounding: `ParamRounding`, its validation and its command-line flags."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass

MODES = ("nearest", "stochastic")
FORMATS = ("bf16",)
NOISES = ("step", "fixed")
SEED_MAX = 2**64 - 1


@dataclass(frozen=True)
class ParamRounding:
    """How FP32 main params become model params after each optimizer step.

    mode    nearest: the framework's own cast, untouched. stochastic: one keyed draw per successful optimizer step.
    seed    0 .. 2**64 - 1. With the step and a tensor's key it determines every rounding decision.
    format  the number format of the model params.
    noise   step: a new draw each step (the paper's scheme). fixed: the same threshold per element at every step
            (sparse weight deltas; not the paper's scheme).
    stream  0 is the forward weights; other streams are independent noise for second roundings and studies.

    Raises ValueError for a value outside these ranges, naming the flag, the value and the way out.
    """

    mode: str = "stochastic"
    seed: int = 1234
    format: str = "bf16"
    noise: str = "step"
    stream: int = 0

    def __post_init__(self):
        _one_of("--param-rounding", self.mode, MODES)
        _one_of("format", self.format, FORMATS)
        _one_of("noise", self.noise, NOISES)
        _in_range("--param-rounding-seed", self.seed, 0, SEED_MAX)
        _in_range("stream", self.stream, 0, 2**32 - 1)

    def to_dict(self) -> dict:
        return asdict(self)


def _one_of(flag: str, value, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{flag}={value!r} is not known; choose one of: {', '.join(allowed)}")


def _in_range(flag: str, value, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{flag}={value!r} must be a whole number from {low} to {high}")
    if not low <= value <= high:
        raise ValueError(f"{flag}={value} is out of range; choose a whole number from {low} to {high}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the `--param-rounding*` flags, as every command of this project and Megatron's parser take them."""
    group = parser.add_argument_group("parameter rounding")
    group.add_argument(
        "--param-rounding",
        default="nearest",
        metavar="{nearest,stochastic}",
        help="how FP32 main params become BF16 model params after each optimizer step (default: nearest)",
    )
    group.add_argument(
        "--param-rounding-seed",
        type=int,
        default=None,
        metavar="N",
        help="seed of the rounding noise, 0 to 2**64-1 (default: the value of --seed)",
    )


def from_flags(args: argparse.Namespace) -> ParamRounding:
    """ParamRounding from parsed flags. Raises ValueError as ParamRounding does."""
    seed = args.param_rounding_seed
    if seed is None:
        seed = args.seed
        _in_range("--seed", seed, 0, SEED_MAX)  # named as what the user gave
    return ParamRounding(mode=args.param_rounding, seed=seed)
