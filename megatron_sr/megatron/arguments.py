"""The `--param-rounding*` flags in Megatron-LM's parser, and their validation together with Megatron's own."""

from __future__ import annotations

import argparse
import functools

from megatron_sr.config import FLAGS, ParamRounding, add_flags, from_flags
from megatron_sr.megatron.support import check_supported


def install() -> None:
    """Wrap `add_megatron_arguments` and `validate_args` of megatron.training.arguments. Once per process.

    Megatron looks both up there whenever it parses, so a script's own `extra_args_provider` stays free.
    """
    from megatron.training import arguments

    arguments.add_megatron_arguments = _with_flags(arguments.add_megatron_arguments)
    arguments.validate_args = _with_validation(arguments.validate_args)


def param_rounding(args: argparse.Namespace) -> ParamRounding:
    """What Megatron's parsed `args` ask for. Raises ValueError as ParamRounding does, and for what is not supported (C6)."""
    if not hasattr(args, "param_rounding"):
        raise ValueError(
            "param_rounding is not among the arguments, as with a --yaml-cfg file: add `param_rounding: nearest` "
            "(or stochastic) and `param_rounding_seed:` to that file"
        )
    config = from_flags(args)
    if config.mode == "stochastic":
        check_supported(args, format=config.format)
        check_arguments(args, config)
    return config


def _with_flags(original):
    @functools.wraps(original)
    def add_megatron_arguments(parser):
        parser = original(parser)
        add_flags(parser)
        return parser

    return add_megatron_arguments


def _with_validation(original):
    """Ours first: Megatron's validation rewrites flags, and our messages should show what the user wrote."""

    @functools.wraps(original)
    def validate_args(args, *more, **defaults):
        param_rounding(args)
        return original(args, *more, **defaults)

    return validate_args


def check_arguments(args, config: ParamRounding) -> None:
    """Raise ValueError for flags of Megatron-LM under which a checkpoint without model params could not be loaded again."""
    if config.save_model != "none":
        return
    for wrong, flag, way_out in (
        (getattr(args, "no_save_optim", None), "--no-save-optim on", "model params are recomputed from main params: leave it out"),
        (getattr(args, "ckpt_format", "torch_dist") != "torch_dist", f"--ckpt-format {getattr(args, 'ckpt_format', None)}",
         "only --ckpt-format torch_dist says what a checkpoint holds"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(
                f"{FLAGS['save_model']} none does not work with {flag}: {way_out}, or use {FLAGS['save_model']} full"
            )
