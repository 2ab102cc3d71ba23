"""What runs inside each vLLM worker: replace its share of the weights, and tell whether it still holds them.

vLLM mixes `WeightsWorker` into its own worker class (`worker_extension_cls`); `self` is that worker. Names start with `sr_`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from megatron_sr.rollout import mxfp8_audit, mxfp8_layout, vllm_faults
from megatron_sr.rollout.held import Held
from megatron_sr.rollout.manifest import TensorRecord
from megatron_sr.rollout.shared_memory import SharedTensors
from megatron_sr.rollout.vllm_readback import live_views
from megatron_sr.rollout.vllm_shards import local_part

EXTENSION = "megatron_sr.rollout.vllm_extension.WeightsWorker"


class WeightsWorker:
    """Methods for `collective_rpc`."""

    def sr_prepare(self) -> None:
        """Once after loading. Raises ValueError for a layout that could not be read back after an update."""
        vllm_faults.pack_experts_on_reload()
        vllm_faults.rewind_cpu_generators(self.model_runner)
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        config = self.model_config.hf_config
        if mxfp8_layout.is_mxfp8(config):
            rows = mxfp8_audit.audit_engine(self.model_runner.get_model(), config)
            mxfp8_audit.check(rows, "its config.json")
        self._sr_rank = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self._sr_kv_heads = config.num_key_value_heads
        whole = {
            n: torch.empty(shape, device="meta") for n, (shape, _) in mxfp8_layout.expected_tensors(config).items()
        }
        self._sr_shapes = {name: tuple(self.sr_part(name, tensor).shape) for name, tensor in whole.items()}
        self._sr_held: Held | None = None
        self.sr_views()

    def sr_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor that this worker holds."""
        return local_part(name, tensor, self._sr_kv_heads, *self._sr_rank)

    def sr_views(self):
        """Where this worker holds its weights, now (`vllm_readback.live_views`)."""
        return live_views(self.model_runner.get_model(), self._sr_shapes, self.model_config.dtype)

    def sr_reload(
        self,
        source: SharedTensors | Iterable[tuple[str, torch.Tensor]],
        records: Mapping[str, TensorRecord] | None = None,
    ) -> None:
        """Replace all weights by those of `source`. records: digests of its whole tensors, where they are known."""
        with _tensors(source) as tensors:
            held, views = Held(), self.sr_views()
            held.values_only = {name for view in views if not view.bits for name in view.names}
            vllm_faults.reload_weights(self.model_runner, self._sr_noting(tensors, held, records))
            self._sr_held = held

    def sr_note(self, source, records: Mapping[str, TensorRecord] | None = None) -> None:
        """Take `source` as what the engine should hold, without loading it."""
        with _tensors(source) as tensors:
            held = Held()
            held.values_only = {name for view in self.sr_views() if not view.bits for name in view.names}
            for _ in self._sr_noting(tensors, held, records):
                pass
            self._sr_held = held

    def _sr_noting(self, tensors, held: Held, records) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            part = self.sr_part(name, tensor)
            whole = part.shape == tensor.shape and records is not None
            held.note(name, part, records.get(name) if whole else None)
            yield name, tensor

    def sr_mismatched(self) -> list[str]:
        """Names of the tensors that this worker holds otherwise than it was given, read back from the live model now."""
        return self._sr_held.mismatched(self.sr_views())

    def sr_held(self) -> tuple[list[str], int]:
        """Names held in a layout from which only values can be read, and how many of their elements were -0.0 or subnormal."""
        return sorted(self._sr_held.values), self._sr_held.indistinct


class _tensors:
    """The (name, tensor) pairs of a source, which may lie in another process's memory."""

    def __init__(self, source):
        self._source, self._buffer = source, None

    def __enter__(self):
        if not isinstance(self._source, SharedTensors):
            return self._source
        self._buffer, tensors = self._source.open()
        return tensors

    def __exit__(self, *error):
        if self._buffer is not None:
            self._buffer.close()
