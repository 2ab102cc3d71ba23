"""MXFP8 model params in Megatron: the second rounding, after the parameter all-gather.

    FP32 main shard -SR, stream 0-> BF16 param buffer -> all-gather -> every rank: scales from amax, SR, stream 1 -> MXFP8

The first rounding is that of any BF16 model. A block's scale needs its largest magnitude, and ZeRO shards cut blocks, so the
second one works on the gathered tensor; its noise is keyed by coordinates, so all ranks get the same codes without
communication. On machines without MXFP8 GEMMs (CPU, Hopper) the BF16 params then hold exactly the dequantized values
(`MXFP8Weights`); with Transformer Engine's `MXFP8Tensor`s the same codes and scales go into these (`mxfp8_te`).

`attach` hooks into `_post_param_sync`, which ends every all-gather of a bucket group, overlapped with the forward pass or not.
Source: megatron/core/distributed/param_and_grad_buffer.py, core 0.19.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from megatron_sr import mxfp8
from megatron_sr.config import FLAGS, ParamRounding
from megatron_sr.megatron import mxfp8_te
from megatron_sr.megatron.identity import Identity
from megatron_sr.megatron.mxfp8_layers import bf16_layers, check_blocks, mxfp8_parameters
from megatron_sr.megatron.mxfp8_rounding import SecondRounding

if TYPE_CHECKING:
    from megatron_sr.megatron.sites.distributed import DistributedSite


class MXFP8Weights:
    """The BF16 params of a model that hold dequantized MXFP8 values, and the scales under which they do.

    names        the parameter -> its name in the model, for every one that is quantized.
    bf16_layers  decoder layers, from 0, that stay BF16.

    Main params must exist already: from now on the params hold MXFP8 values, those of step 0 at first. Scales take 1/32 byte
    a param; codes are not kept, `mxfp8.encode` gives them back exactly. Raises ValueError for shards that cut blocks, and
    for layers of which it is not known whether Transformer Engine quantizes them.
    """

    def __init__(self, model, identities: Mapping[torch.nn.Parameter, Identity], config: ParamRounding):
        self.names, self.bf16_layers = mxfp8_parameters(model), bf16_layers(model)
        self._identities = identities
        self._rounding = SecondRounding(config)
        for parameter, name in self.names.items():
            check_blocks(parameter, name, identities[parameter], config.mxfp8_scaling == "2d")
        if not self.names:
            raise ValueError(
                "--param-rounding-format mxfp8: this model has no layer that MXFP8 quantizes (first_last_layers_bf16 keeps all in "
                "BF16?); leave the format out"
            )
        self._scales: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._stale: dict[torch.nn.Parameter, int] = {}
        self.stale(self.names, 0)
        self.refresh(self.names)

    def stale(self, parameters: Iterable[torch.nn.Parameter], step: int) -> None:
        """Those of `parameters` that are quantized hold BF16 values again, of the first rounding after `step` steps."""
        self._stale |= dict.fromkeys((p for p in parameters if p in self.names), step)

    @torch.no_grad()
    def refresh(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Round those of `parameters` that are stale, whole and gathered, to MXFP8 in place.

        The others stay as they are: quantized once more they would keep their values, but not their scales.
        """
        for parameter in parameters:
            step = self._stale.pop(parameter, None)
            if step is not None:
                blocks = self._rounding.quantize(parameter.data, self._identities[parameter], step)
                parameter.data.copy_(blocks.dequantize(parameter.dtype))
                self._scales[parameter] = blocks.scale

    def scales(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Parameter -> uint8 scales [out, in / 32] of its row-wise blocks. Raises RuntimeError while any is stale."""
        if self._stale:
            waiting = sorted(self.names[parameter] for parameter in self._stale)
            raise RuntimeError(
                f"{len(waiting)} weights are not quantized yet ({', '.join(waiting[:4])}): their all-gather has not finished; with "
                "--overlap-param-gather call model_chunk.start_param_sync(force_sync=True) first"
            )
        return dict(self._scales)

    def codes(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Parameter -> its row-wise E4M3 codes (float8_e4m3fn, of its shape). Memory: 1 byte a param.

        Raises RuntimeError, naming it, when a param no longer holds values of its scales (it was written to behind our back).
        """
        codes = {}
        for parameter, scale in self.scales().items():
            try:
                codes[parameter] = mxfp8.encode(parameter.detach(), scale).view(torch.float8_e4m3fn)
            except ValueError as error:
                raise RuntimeError(
                    f"{self.names[parameter]} does not hold the MXFP8 values of the last rounding ({error}); was it written to after "
                    "the step? Copy main params to model params and gather again"
                ) from None
        return codes


Weights = MXFP8Weights | mxfp8_te.TEWeights
"""What holds the model's MXFP8 weights: `codes()` and `scales()` by parameter, `names`, `bf16_layers`."""


def attach(optimizer, model, sites: list[DistributedSite], identities: dict, config: ParamRounding) -> Weights:
    """Round to MXFP8 whatever the cast sites of `optimizer` have rounded to BF16, once it is gathered. Once, before the first step.

    model: DistributedDataParallel, or the list of its chunks. Raises ValueError, with the way out, for sites other than the
    DistributedOptimizer's own, and as `MXFP8Weights` and `mxfp8_te.TEWeights` do.
    """
    from megatron.core.distributed import DistributedDataParallel

    from megatron_sr.megatron.sites.distributed import DistributedSite

    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    for found in [c for c in chunks if type(c) is not DistributedDataParallel] + [
        site.optimizer for site in sites if type(site) is not DistributedSite
    ]:
        raise ValueError(
            f"--param-rounding-format mxfp8 does not know {type(found).__name__}: params become MXFP8 after the all-gather of "
            "Megatron's DistributedDataParallel and DistributedOptimizer; use these (--use-distributed-optimizer, without "
            "--use-precision-aware-optimizer, --optimizer-cpu-offload, FSDP), or another format"
        )
    if any(chunk.ddp_config.reuse_grad_buf_for_mxfp8_param_ag for chunk in chunks):
        if config.verify_interval:
            raise ValueError(
                f"{FLAGS['verify_interval']} {config.verify_interval} does not work with params in Transformer Engine's tensors; "
                "leave it out"
            )
        weights = mxfp8_te.TEWeights(model, identities, config)
        mxfp8_te.route(weights, sites)
    else:
        weights = MXFP8Weights(model, identities, config)
        for chunk in chunks:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                group._post_param_sync = _then_refresh(group._post_param_sync, weights, group)
        _quantize_reloaded(optimizer, weights)
    for site in sites:
        site.after_round.append(lambda site: weights.stale(site.optimizer_params(), site.step))
    return weights


def _then_refresh(original: Callable, weights: MXFP8Weights, group) -> Callable:
    """Every all-gather ends in this method of the bucket group, overlapped with the forward pass or not."""

    def post_param_sync():
        original()
        weights.refresh(parameter for bucket in group.buckets for parameter in bucket.params_list)

    return post_param_sync


def _quantize_reloaded(optimizer, weights: MXFP8Weights) -> None:
    """`reload_model_params` (--finetune, --no-load-optim) takes main params from BF16 model params that were loaded before."""
    original = optimizer.reload_model_params

    def reload_model_params(*args, **kwargs):
        original(*args, **kwargs)
        weights.stale(weights.names, 0)
        weights.refresh(weights.names)

    optimizer.reload_model_params = reload_model_params


@torch.no_grad()
def recompute(weights: MXFP8Weights, site: DistributedSite, gather: Callable[[], None]) -> dict[str, tuple[int, int]]:
    """Round the params of a site anew from its main params, gather and quantize them; what was not equal before.

    Returns checkpoint key -> (elements whose bits differed, elements); collective, the same on all data-parallel ranks.
    Memory: 2 bytes a param while it runs.
    """
    before = {parameter: parameter.detach().clone() for parameter in site.optimizer_params()}
    site.round_()
    gather()
    wrong: dict[str, tuple[int, int]] = {}
    for parameter, old in before.items():
        bits = {2: torch.int16, 4: torch.int32}[old.element_size()]
        differing = (old.view(bits) != parameter.detach().view(bits)).sum().item()
        if differing:
            key = site.identities[parameter].key
            known = wrong.get(key, (0, 0))
            wrong[key] = known[0] + differing, known[1] + old.numel()
    return wrong
