"""MasterWeights in transformers.Trainer and what derives from it (TRL), without a callback or a subclass of Trainer.

Trainer(model, args, ..., optimizer_cls_and_kwargs=trainer_optimizer(model, torch.optim.AdamW, rounding=..., lr=1e-6))
"""

from __future__ import annotations

import torch

from megatron_sr.config import ParamRounding
from megatron_sr.fsdp.master_weights import MasterWeights


class TrainerMasterWeights(MasterWeights):
    """MasterWeights with the signature that Trainer calls: param groups first, everything else by keyword."""

    def __init__(self, params, *, optimizer_class, named_by, rounding, **options):
        super().__init__(optimizer_class, named_by, rounding=rounding, params=params, **options)


def trainer_optimizer(
    model: torch.nn.Module, optimizer_class: type[torch.optim.Optimizer], *, rounding: ParamRounding, **options
) -> tuple[type, dict]:
    """What transformers.Trainer takes as `optimizer_cls_and_kwargs`.

    model    the model that Trainer gets, with BF16 params (dtype=torch.bfloat16).
    options  of the optimizer class. Trainer makes the param groups, sets each one's weight_decay from its own arguments, and
             runs the scheduler; `lr` is the peak learning rate (TrainingArguments.learning_rate is not read).
    """
    return TrainerMasterWeights, dict(optimizer_class=optimizer_class, named_by=model, rounding=rounding, **options)
