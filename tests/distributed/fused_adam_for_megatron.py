"""Transformer Engine's FusedAdam for --use-precision-aware-optimizer, as a stand-in of its kernel on the CPU (no GPU here)."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from unittest import mock

import torch

from tests.backends.fused_adam_stand_in import TransformerEngineStandIn


class FusedAdam(TransformerEngineStandIn):
    """Megatron's arguments, and gradients in `decoupled_grad`, whose dtype differs from the param's."""

    def __init__(
        self,
        params,
        *,
        capturable=False,
        adam_w_mode=True,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        use_decoupled_grad=False,
        master_weights=True,
        master_weight_dtype=torch.float32,
        **options,
    ):
        super().__init__(params, master_weights=master_weights, master_weight_dtype=master_weight_dtype, **options)

    def _gradient(self, param):
        return param.decoupled_grad

    def initialize_state(self, param, store_param_remainders=False) -> None:
        self._initialize(param)


@contextlib.contextmanager
def precision_aware():
    """Let Megatron build an optimizer with FusedAdam's own main params; yields the options for `build`."""
    import megatron.core.optimizer as core_optimizer
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    package, pytorch, optimizers = (
        ModuleType("transformer_engine" + rest) for rest in ("", ".pytorch", ".pytorch.optimizers")
    )
    optimizers.FusedAdam = FusedAdam
    modules = {module.__name__: module for module in (package, pytorch, optimizers)}
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(optimizer_config, "is_te_min_version", return_value=True),
        mock.patch.object(core_optimizer, "is_te_min_version", return_value=True),
        mock.patch.object(core_optimizer, "Adam", FusedAdam),
        mock.patch.object(distrib_optimizer, "Adam", FusedAdam),
    ):
        yield dict(use_precision_aware_optimizer=True)
