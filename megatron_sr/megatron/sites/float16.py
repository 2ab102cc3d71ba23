"""Float16OptimizerWithFloat16Params: every rank rounds whole local params; data-parallel replicas agree without talking.

It serves jobs without --use-distributed-optimizer, and the layer-wise distributed optimizer (Muon and others), each of whose
ranks steps some whole params and then gathers those of the other ranks.
Source: megatron/core/optimizer/optimizer.py, core 0.19.
"""

from __future__ import annotations

from megatron_sr.config import ParamRounding
from megatron_sr.megatron.sites.base import Piece, Site, shard_identity


class Float16Site(Site):
    """One Float16OptimizerWithFloat16Params, over any torch optimizer."""

    kind = "Float16OptimizerWithFloat16Params"

    def __init__(self, optimizer, identities: dict, config: ParamRounding):
        self.optimizer = optimizer
        super().__init__(optimizer.optimizer, identities, config)
        optimizer._copy_main_params_to_model_params = self.round_

    def find(self):
        o = self.optimizer
        pieces = [
            Piece(param, param, main, shard_identity(self.identities, param, 0, param.numel()))
            for params, mains in zip(o.float16_groups, o.fp32_from_float16_groups, strict=True)
            for param, main in zip(params, mains, strict=True)
        ]
        return pieces, []  # FP32 model params are stepped in place
