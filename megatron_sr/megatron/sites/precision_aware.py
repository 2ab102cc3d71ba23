"""--use-precision-aware-optimizer: main params live inside Transformer Engine's FusedAdam, which casts them in its own kernel.

Rounding happens in hooks around FusedAdam's step (megatron_sr/fused_adam/hooks.py), for FP32 main params and for BF16 params with
16-bit remainders. Source: megatron/core/optimizer/distrib_optimizer.py, core 0.19, `shard_float16_groups`.
"""

from __future__ import annotations

import torch

from megatron_sr.config import FLAGS, ParamRounding
from megatron_sr.fused_adam.hooks import round_fused_adam
from megatron_sr.megatron.sites.base import shard_identity


class PrecisionAwareSite:
    """One DistributedOptimizer whose main params are FusedAdam's. The interface of `Site`, without pieces to look at."""

    kind = "DistributedOptimizer, precision-aware FusedAdam"
    pieces = copies = ()

    def __init__(self, optimizer, identities: dict, config: ParamRounding):
        for field, off in (("log_interval", 0), ("save_model", "full")):
            if getattr(config, field) != off:
                raise ValueError(
                    f"{FLAGS[field]} {getattr(config, field)} does not work with --use-precision-aware-optimizer, whose main params "
                    "are out of reach in Transformer Engine's FusedAdam; leave one of the two out"
                )
        if config.mode == "nearest":
            raise ValueError(
                f"{FLAGS['mode']} nearest {FLAGS['format']} {config.format} does not work with --use-precision-aware-optimizer, whose "
                "kernel casts to the model's own format; leave one of the two out"
            )
        self.optimizer, self.inner, self.config = optimizer, optimizer.optimizer, config
        own = {}
        for params, shards in zip(optimizer.model_float16_groups, optimizer.shard_float16_groups, strict=True):
            for param, shard in zip(params, shards, strict=True):
                where = optimizer._get_model_param_range_map(param)["param"]
                own[shard] = shard_identity(identities, param, where.start, where.end)
        self._own = own
        self._rounding = round_fused_adam(self.inner, own, config)

    @property
    def step(self) -> int:
        return self._rounding.step

    def set_step(self, step: int) -> None:
        self._rounding.set_step(step)

    def round_(self) -> None:
        self._rounding.recompute()

    @torch.no_grad()
    def mismatches(self) -> list[str]:
        """As `Site.mismatches`. Memory: 2 bytes for each element of this rank's shards; they hold the right bits afterwards."""
        before = {shard: shard.detach().clone() for shard in self._own}
        self.round_()
        return [
            self._own[shard].key
            for shard, old in before.items()
            if not torch.equal(old.view(torch.int16), shard.detach().view(torch.int16))
        ]
