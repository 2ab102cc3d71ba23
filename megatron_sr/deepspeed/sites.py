"""Where DeepSpeed's optimizers keep main and model params: one class for each way.

A site makes a `Rounding` for each flat partition of this rank, and puts a `RoundedPlace` where DeepSpeed writes. The identity of
an element is its parameter's name and its row-major index there; stage, world size, sub-groups and padding only decide which rank
rounds it.

    Zero12    ZeRO 1 and 2, with or without CPU offload    zero/stage_1_and_2.py   step, update_lp_params
    Bf16      ZeRO 1 with FP32 gradient accumulation       bf16_optimizer.py       update_lp_params
    Zero3     ZeRO 3, SuperOffload                         zero/stage3.py          _reassign_or_swap_out_partitioned_parameters
    Replicas  no ZeRO                                      fp16/fused_optimizer.py, fp16/unfused_optimizer.py   step

Source: deepspeed/runtime, 0.19.8.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable

import torch

from megatron_sr.coordinates import Segment, clip
from megatron_sr.deepspeed.place import PartitionRounding, RoundedPlace, Rounding


def site_of(optimizer, identity, config, step) -> Site:
    """The site of a DeepSpeed optimizer. `identity(param)` gives (key, [Segment, ...]) of a parameter before ZeRO cut it."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    sites = {
        DeepSpeedZeroOptimizer: Zero12,
        BF16_Optimizer: Bf16,
        DeepSpeedZeroOptimizer_Stage3: Zero3,
        SuperOffloadOptimizer_Stage3: Zero3,
        FP16_Optimizer: Replicas,
        FP16_UnfusedOptimizer: Replicas,
    }
    if type(optimizer) not in sites:
        raise ValueError(
            f"param_rounding: where {type(optimizer).__name__} casts main params is not known; use ZeRO 1, 2 or 3 with BF16 or FP16 "
            'enabled, or "mode": "nearest"'
        )
    return sites[type(optimizer)](optimizer, identity, config, step)


class Site:
    """What all have in common.

    roundings  partition number -> its Rounding, since `install`.
    """

    def __init__(self, optimizer, identity, config, step):
        self.optimizer = optimizer
        self.roundings: dict[tuple, Rounding] = {}
        self._identity, self._config, self._step = identity, config, step

    def install(self) -> None:
        """Put the places where DeepSpeed will write. Also later: its `reload_states` makes new lists."""
        raise NotImplementedError

    def recompute(self) -> None:
        """Round again with the current step, and let every rank have the result. Collective."""
        raise NotImplementedError

    @contextlib.contextmanager
    def stepping(self):
        """Around DeepSpeed's step."""
        yield

    def missed(self, step: int) -> bool:
        """Whether there are model params that the step with this number did not round."""
        return any(rounding.written != step for rounding in self.roundings.values())

    def _place(self, tensors: list, i: int, main: torch.Tensor, fragments: Callable, number: tuple) -> None:
        """Put a place over the model params tensors[i], unless it is there.

        fragments  called for (param, position of its element `low` in the partition, low, high) of all parts of params in it.
        """
        if isinstance(tensors[i], RoundedPlace):
            return
        pieces = []
        for param, at, low, high in fragments():
            key, segments = self._identity(param)
            if low < high:
                pieces.append((key, [s._replace(local_start=s.local_start + at) for s in clip(segments, low, high)]))
        rounding = PartitionRounding(tensors[i], main, pieces, self._config, self._step)
        self.roundings[number] = rounding
        tensors[i] = RoundedPlace.of(tensors[i], rounding.write)


def _cut(params, offsets, first: int, size: int):
    """The fragments of params, which lie at `offsets` in a flat group, in its elements first .. first + size - 1."""
    for param, offset in zip(params, offsets):
        low, high = max(0, first - offset), min(param.numel(), first + size - offset)
        yield param, offset + low - first, low, high


class Zero12(Site):
    def install(self) -> None:
        from deepspeed import comm

        optimizer = self.optimizer
        for group, main in enumerate(optimizer.single_partition_of_fp32_groups):
            rank = comm.get_rank(group=optimizer.real_dp_process_group[group])
            size = optimizer.partition_size[group]
            fragments = functools.partial(
                _cut,
                optimizer.round_robin_bit16_groups[group],
                optimizer.round_robin_bit16_offsets[group],
                rank * size,
                size,
            )
            self._place(optimizer.parallel_partitioned_bit16_groups[group], rank, main, fragments, (group, "model"))
            if optimizer.cpu_offload:
                # The step rounds into a buffer beside the main params, which DeepSpeed copies to the device.
                buffers = optimizer.param_buffer_of_bit16_for_cpu_offload_groups
                self._place(buffers, group, main, fragments, (group, "buffer"))

    def missed(self, step: int) -> bool:
        part = "buffer" if self.optimizer.cpu_offload else "model"
        return any(rounding.written != step for (_, name), rounding in self.roundings.items() if name == part)

    def recompute(self) -> None:
        self.optimizer.update_lp_params()


class Bf16(Site):
    def install(self) -> None:
        from deepspeed import comm

        optimizer = self.optimizer
        for group, main in enumerate(optimizer.fp32_groups_flat_partition):
            rank = comm.get_rank(group=optimizer.real_dp_process_group[group])
            fragments = functools.partial(self._fragments, group, rank * main.numel(), main.numel())
            self._place(optimizer.bf16_partitioned_groups[group], rank, main, fragments, (group,))

    def _fragments(self, group: int, first: int, size: int):
        params = self.optimizer.bf16_groups[group]
        return _cut(params, itertools.accumulate((p.numel() for p in params), initial=0), first, size)

    def recompute(self) -> None:
        self.optimizer.update_lp_params()


class Zero3(Site):
    def install(self) -> None:
        optimizer = self.optimizer
        for group, main in enumerate(optimizer.fp32_partitioned_groups_flat):
            self._place(
                optimizer.fp16_partitioned_groups_flat, group, main, functools.partial(self._fragments, group), (group,)
            )

    def _fragments(self, group: int):
        """ZeRO 3 cuts every parameter by itself, in equal parts; the last rank's may end in padding."""
        from deepspeed import comm

        at = 0
        for param in self.optimizer.fp16_groups[group]:
            numel = param.partition_numel()
            low = comm.get_rank(group=self.optimizer._get_param_partition_group(param)) * numel
            yield param, at, low, min(low + numel, param.ds_numel)
            at += numel

    def recompute(self) -> None:
        # Persistent parameters are kept gathered: they are released, and gathered again from what is rounded now.
        self.optimizer.checkpoint_event_prologue()
        for group in range(len(self.optimizer.fp16_groups)):
            self.optimizer._reassign_or_swap_out_partitioned_parameters(group)
        self.optimizer.checkpoint_event_epilogue()


class Replicas(Site):
    """Without ZeRO every rank has all main params, flat by group (fused) or one by one (unfused), and casts them in a loop.

    The loop goes over `fp16_groups`; between the inner optimizer's step and the loop these are empty.
    """

    def install(self) -> None:
        if self.roundings:
            return
        optimizer, self._hidden = self.optimizer, None
        model, main = [], []
        for group, params in enumerate(optimizer.fp16_groups):
            model += params
            if hasattr(optimizer, "fp32_groups_flat"):
                main += optimizer.fp32_groups_flat[group].detach().split([param.numel() for param in params])
            else:
                main += optimizer.fp32_groups[group]
        pieces = [self._identity(param) for param in model]
        self.roundings[0] = Rounding(model, main, pieces, self._config, self._step)
        self._stepping = False
        optimizer.optimizer.register_step_post_hook(self._hide)

    def _hide(self, *_) -> None:
        if self._stepping:
            self._hidden, self.optimizer.fp16_groups = (
                self.optimizer.fp16_groups,
                [[] for _ in self.optimizer.fp16_groups],
            )

    @contextlib.contextmanager
    def stepping(self):
        self._hidden, self._stepping = None, True
        try:
            yield
        finally:
            self._stepping = False
            if self._hidden is not None:
                self.optimizer.fp16_groups = self._hidden
        if self._hidden is not None:
            for main in (main for group in getattr(self.optimizer, "fp32_groups", ()) for main in group):
                main.grad = None  # as the loop would
            self.recompute()

    def recompute(self) -> None:
        self.roundings[0].run_()


def whole(param: torch.nn.Parameter, name: str) -> tuple[str, list[Segment]]:
    """The identity of a parameter that is its own logical tensor: its name, its elements in row-major order."""
    return name, [Segment(0, getattr(param, "ds_numel", param.numel()), 0)]
