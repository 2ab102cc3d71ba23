"""Stochastic rounding in Megatron-Core's DistributedOptimizer: main params into the param buffer, before the all-gather.

Megatron's step of a ZeRO shard is: Adam on the FP32 main shard, `_copy_main_params_to_model_params` (a cast into the rank's
place in the param buffer), all-gather. Only the cast is replaced, by one launch over all shards of an optimizer instance. The
bits are a pure function of (main params, seed, step, tensor, element), so the copy may be repeated at will.
Source: megatron/core/optimizer/distrib_optimizer.py, core 0.19.
"""

from __future__ import annotations

import torch

from megatron_sr.config import ParamRounding
from megatron_sr.coordinates import clip
from megatron_sr.megatron import checkpoint
from megatron_sr.megatron.identity import Identity, identify, model_chunks
from megatron_sr.megatron.support import check_supported
from megatron_sr.rounding import RoundingPlan


class Controller:
    """Parameter rounding of one Megatron optimizer, as `apply_param_rounding` has set it up.

    config  the ParamRounding.
    step    draws so far, which is the number of successful optimizer steps (C7); 0 with nearest, which draws nothing.
    """

    def __init__(self, config: ParamRounding, shards: list[_ShardRounding]):
        self.config = config
        self._shards = shards

    @property
    def step(self) -> int:
        steps = sorted({shard.step for shard in self._shards})
        if len(steps) > 1:
            raise RuntimeError(
                f"chained optimizers have made {steps} steps; step the whole optimizer, not one of its parts"
            )
        return steps[0] if steps else 0

    def state_dict(self) -> dict:
        """The rounding state. It already rides in the optimizer's own state dict: needed only to look at it."""
        return checkpoint.rounding_state(self.config, self.step)

    def load_state_dict(self, state: dict) -> None:
        """Continue at the state's step. Raises ValueError when it was saved under another mode, seed, format or noise."""
        checkpoint.check_loadable(state, self.config)
        for shard in self._shards:
            shard.set_step(state["step"])


def apply_param_rounding(optimizer, model, config: ParamRounding) -> Controller:
    """Make `optimizer` round main params to model params as `config` says. Once, before the first step and before loading.

    optimizer  what `get_megatron_optimizer` returned.
    model      the model chunk it optimizes, or the list of chunks; in DDP or bare.

    nearest leaves the step as it is, no attribute replaced (C4); it only refuses optimizer states saved under stochastic.
    Raises ValueError for what is not supported (C6), and, naming it, for a parameter without a layout-independent identity.
    """
    if config.mode == "nearest":
        for part in _parts(optimizer):
            if isinstance(getattr(part, "optimizer", None), torch.optim.Optimizer):
                checkpoint.on_load(part.optimizer, config, loaded=lambda state: None)
        return Controller(config, [])
    config = config.for_dtype(torch.bfloat16)
    parts = _supported_parts(optimizer, model)
    identities = identify(model)
    return Controller(config, [_ShardRounding(part, identities, config) for part in parts])


def _parts(optimizer) -> list:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _supported_parts(optimizer, model) -> list:
    """The DistributedOptimizer instances that hold parameters; ValueError if anything else is among them."""
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parts = _parts(optimizer)
    for part in parts:
        check_supported(part.config, *([part.ddp_config] if hasattr(part, "ddp_config") else []), *_configs(model))
        if type(part) is not DistributedOptimizer or type(optimizer) not in (DistributedOptimizer, ChainedOptimizer):
            raise ValueError(
                f"--param-rounding stochastic does not know {type(optimizer).__name__} of {type(part).__name__}; "
                "use Megatron's DistributedOptimizer with Adam, or --param-rounding nearest"
            )
        if "_copy_main_params_to_model_params" in vars(part):
            raise ValueError(
                "the optimizer's copy of main params is already replaced; call apply_param_rounding only once"
            )
    return [part for part in parts if not part.is_stub_optimizer]


def _configs(model) -> list:
    return [chunk.config for chunk in model_chunks(model)]


class _ShardRounding:
    """Stochastic rounding in one DistributedOptimizer: this rank's main shards, their places in the param buffers, the step."""

    def __init__(self, optimizer, identities: dict[torch.nn.Parameter, Identity], config: ParamRounding):
        self.config = config
        self.step = 0
        self._inner = optimizer.optimizer
        pairs = list(_pairs(optimizer, optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups))
        self._plan = RoundingPlan(
            [place for _, place, _ in pairs],
            [main for _, _, main in pairs],
            [_shard_identity(optimizer, param, identities) for param, _, _ in pairs],
            seed=config.seed,
            stream=config.stream,
            format=config.format,
        )
        # FP32 model params (an FP32 router, say) keep Megatron's plain copy.
        self._fp32 = [
            (place, main)
            for _, place, main in _pairs(optimizer, optimizer.model_fp32_groups, optimizer.shard_fp32_groups)
        ]
        self.set_step(0)
        # Torch's own hooks count: the inner step runs exactly when Megatron has not skipped the step for an overflow.
        self._inner.register_step_post_hook(lambda *_: self.set_step(self.step + 1))
        checkpoint.on_load(self._inner, config, loaded=lambda state: self.set_step(state["step"]))
        optimizer._copy_main_params_to_model_params = self.copy_main_params_to_model_params

    def set_step(self, step: int) -> None:
        self.step = step
        checkpoint.store(self._inner, checkpoint.rounding_state(self.config, step))

    @torch.no_grad()
    def copy_main_params_to_model_params(self) -> None:
        """As Megatron's method of this name; the same bits however often it is called between two steps."""
        self._plan.run_(0 if self.config.noise == "fixed" else self.step)
        for place, main in self._fp32:
            place.copy_(main)


def _pairs(optimizer, model_groups, main_groups):
    """(model param, this rank's place for it in the param buffer, its main shard), both flat and of equal length."""
    for model_group, main_group in zip(model_groups, main_groups, strict=True):
        for param, main in zip(model_group, main_group, strict=True):
            where = optimizer._get_model_param_range_map(param)["gbuf_world_in_bucket"]
            buffer, _, bucket = optimizer.model_param_gbuf_map[param]
            yield param, optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)[where.start : where.end], main


def _shard_identity(optimizer, param: torch.nn.Parameter, identities: dict) -> Identity:
    """The identity of this rank's shard of `param`. ZeRO cuts the flat parameter anywhere, also within a row."""
    if param not in identities:
        raise ValueError(
            f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not in the given model; "
            "pass every model chunk that the optimizer was made for"
        )
    shard = optimizer._get_model_param_range_map(param)["param"]
    key, segments = identities[param]
    return Identity(key, clip(segments, shard.start, shard.end))
