"""One line in a Megatron-LM script adds `--param-rounding`:

    import megatron_sr.megatron.plugin

Importing wraps Megatron's argument parser and the `get_megatron_optimizer` of its training loop; nothing else changes, and with
`--param-rounding nearest` (the default) the optimizer is left as it is. On a Megatron whose source has our patch (see patches/)
importing does nothing: the calls are in its source already.
"""

from __future__ import annotations

import functools

from megatron_sr.megatron import arguments, metrics, source_patch, summary
from megatron_sr.megatron.optimizer import apply_param_rounding


def _install() -> None:
    from megatron.training import training

    if source_patch.is_applied():
        return
    arguments.install()
    training.get_megatron_optimizer = _with_param_rounding(training.get_megatron_optimizer)


def _with_param_rounding(original):
    @functools.wraps(original)
    def get_megatron_optimizer(config, model_chunks, *more, **named):
        optimizer = original(config, model_chunks, *more, **named)
        round_params(optimizer, model_chunks)
        return optimizer

    return get_megatron_optimizer


def round_params(optimizer, model_chunks) -> None:
    """Round the params of an optimizer that Megatron's training loop has just made, as the parsed arguments say; say so once."""
    from megatron.training import get_args
    from megatron.training.utils import print_rank_0

    controller = apply_param_rounding(optimizer, model_chunks, arguments.param_rounding(get_args()))
    controller.on_metrics(metrics.to_megatron)
    print_rank_0(summary.table(controller))


_install()
