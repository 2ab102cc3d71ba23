"""What a Megatron-LM source tree with our patch calls (patches/megatron-lm/): the third way in besides `megatron-sr run` and the plugin.

The patch imports this module into megatron.training.arguments and megatron.training.training and adds one call of each function
below; everything they do is the plugin's own code, so all ways in give the same bits. Nothing of Megatron is imported before a call.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--param-rounding*` flags to Megatron's parser. Called at the end of `add_megatron_arguments`."""
    from megatron_sr.config import add_flags

    add_flags(parser)
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for what is not supported (C6). Called at the start of `validate_args`, which rewrites flags."""
    from megatron_sr.megatron.arguments import param_rounding

    param_rounding(args)


def round_params(optimizer, model_chunks) -> None:
    """Called where the training loop has made its optimizer, before it loads a checkpoint."""
    from megatron_sr.megatron import plugin

    plugin.round_params(optimizer, model_chunks)


def is_applied() -> bool:
    """Whether the Megatron-LM in use has the patch in its source. Raises RuntimeError if only one of the two files has it."""
    from megatron.training import arguments, training

    patched = [module.__name__ for module in (arguments, training) if hasattr(module, "source_patch")]
    if len(patched) == 1:
        raise RuntimeError(
            f"of Megatron's source only {patched[0]} has the --param-rounding patch; "
            "run `python tools/patch.py check`, then revert or apply it as a whole"
        )
    return bool(patched)
