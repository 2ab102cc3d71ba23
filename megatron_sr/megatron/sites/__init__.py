"""Where Megatron-Core turns FP32 main params into model params, one small class per cast site.

base.py         what all sites share: the step, the fused launch, the check against main params
distributed.py  DistributedOptimizer
float16.py      Float16OptimizerWithFloat16Params, also inside the layer-wise distributed optimizer
"""

from __future__ import annotations

from megatron_sr.config import ParamRounding
from megatron_sr.megatron.sites.base import Piece, Site

__all__ = ["Piece", "Site", "make_sites", "parts"]


def parts(optimizer) -> list:
    """The Megatron optimizers that step parameters: chained ones (also layer-wise) taken apart, whatever the depth."""
    if hasattr(optimizer, "chained_optimizers"):
        return [part for chained in optimizer.chained_optimizers for part in parts(chained)]
    return [optimizer]


def make_sites(optimizer, identities: dict, config: ParamRounding) -> list[Site]:
    """Replace the cast of every part of `optimizer` that holds parameters on this rank.

    Raises ValueError (C6) for an optimizer that is not known, and for one whose cast is already replaced.
    """
    holding = [part for part in parts(optimizer) if not getattr(part, "is_stub_optimizer", False)]
    kinds = [_kind(part) for part in holding]  # all are known before the first one is touched
    for part in holding:
        if "_copy_main_params_to_model_params" in vars(part):
            raise ValueError(
                "the optimizer's copy of main params is already replaced; call apply_param_rounding only once"
            )
    return [kind(part, identities, config) for kind, part in zip(kinds, holding)]


def _kind(part) -> type[Site]:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    from megatron_sr.megatron.sites.distributed import DistributedSite
    from megatron_sr.megatron.sites.float16 import Float16Site
    from megatron_sr.megatron.sites.offload import OffloadSite
    from megatron_sr.megatron.sites.precision_aware import PrecisionAwareSite

    inner = getattr(part, "optimizer", None)
    if type(part) is DistributedOptimizer:
        if isinstance(inner, HybridDeviceOptimizer):
            return OffloadSite
        return PrecisionAwareSite if part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else DistributedSite
    if type(part) is Float16OptimizerWithFloat16Params:
        return Float16Site
    raise ValueError(
        f"--param-rounding stochastic does not know {type(part).__module__}.{type(part).__name__}; use Megatron's "
        "DistributedOptimizer or Float16OptimizerWithFloat16Params, or --param-rounding nearest"
    )
