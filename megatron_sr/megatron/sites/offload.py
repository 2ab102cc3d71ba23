"""--optimizer-cpu-offload: main params live in a HybridDeviceOptimizer, a part of them in the memory of the host.

Its hooks copy main params to the model params with a plain cast. Afterwards, where Megatron would do nothing more, the same
params are written once more, rounded: on the device where the main param is there, otherwise on the host, by the CPU kernel, into
2 bytes per element of (pinned) staging memory that are then copied up.
Source: megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, core 0.19.
"""

from __future__ import annotations

import torch

from megatron_sr.config import ParamRounding
from megatron_sr.megatron.sites.base import Piece, Site, shard_identity


class OffloadSite(Site):
    """One DistributedOptimizer over a HybridDeviceOptimizer."""

    kind = "DistributedOptimizer, HybridDeviceOptimizer"

    def __init__(self, optimizer, identities: dict, config: ParamRounding):
        self.optimizer = optimizer
        super().__init__(optimizer.optimizer, identities, config)
        optimizer._copy_main_params_to_model_params = self.round_

    def find(self):
        o, pieces = self.optimizer, []
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        for params, shards in zip(o.model_float16_groups, o.shard_float16_groups, strict=True):
            for param, shard in zip(params, shards, strict=True):
                where = o._get_model_param_range_map(param)["param"]
                main, place = self.inner.param_to_inner_param[shard], shard.detach()
                if main.device != place.device:
                    staging = torch.empty(place.shape, dtype=place.dtype, pin_memory=torch.cuda.is_available())
                    self._staged.append((staging, place))
                    place = staging.copy_(place)
                identity = shard_identity(self.identities, param, where.start, where.end)
                pieces.append(Piece(param, place, main.detach(), identity))
        return pieces, []  # the HybridDeviceOptimizer copies FP32 params itself

    @torch.no_grad()
    def round_(self) -> None:
        super().round_()
        for staging, place in self._staged:
            place.copy_(staging, non_blocking=True)

    def mismatches(self) -> list[str]:
        for staging, place in self._staged:
            staging.copy_(place)
        return super().mismatches()

    def _loaded(self, state: dict) -> None:
        self.rebuild()  # loading makes new main params
        super()._loaded(state)
