"""Rank-side helpers of the Megatron tests: a tiny job whose weights and gradients depend only on (tensor key, index, step).

Started through run_ranks.py, which installs the CPU host before megatron is imported here.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import zlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module

from megatron_sr.megatron.identity import Identity, identify
from megatron_sr.megatron.model import Layout, gpt_model, transformer_config

LEARNING_RATE = 3e-5  # below half an ulp of most weights: rounding decides what changes


@contextlib.contextmanager
def process_groups(layout: Layout, alone: bool = False, virtual: int | None = None, instances: int = 1):
    """Megatron's groups of `layout` over the torchrun ranks; with `alone`, each rank is a world of its own.

    instances: of the distributed optimizer.
    """
    if alone:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    elif not dist.is_initialized():
        _join_world()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        expert_model_parallel_size=layout.expert,
        num_distributed_optimizer_instances=instances,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()
    if not alone:
        _join_world()


def _join_world() -> None:
    """A new default group. Groups have threads of their own, so those of a layout must go before the next one comes."""
    gc.collect()  # the last job is a ring of references that holds its groups
    store, rank, size = next(dist.rendezvous("env://"))
    join = store.add(f"joined by {rank}", 1)
    dist.init_process_group(store=dist.PrefixStore(f"world {join}", store), rank=rank, world_size=size)


@dataclass
class Job:
    """Model chunks in DDP, their optimizer, and where their elements lie."""

    chunks: list
    optimizer: object
    identities: dict[torch.nn.Parameter, Identity] = field(default_factory=dict)

    def __post_init__(self):
        self.identities = identify(self.chunks)

    def model_state_dict(self) -> dict:
        """The sharded state dict of the model, under the names that Megatron-LM's checkpointing uses."""
        names = ["model"] if len(self.chunks) == 1 else [f"model{i}" for i in range(len(self.chunks))]
        return {name: chunk.module.module.sharded_state_dict() for name, chunk in zip(names, self.chunks)}

    def load_model(self, state: dict) -> None:
        for name, chunk in zip(self.model_state_dict(), self.chunks):
            chunk.module.module.load_state_dict(state[name])

    def state_dict(self, is_loading: bool, sharding: str) -> dict:
        """The sharded state dict of model and optimizer. sharding: Megatron's `distrib_optim_sharding_type`."""
        state = self.model_state_dict()
        metadata = {"distrib_optim_sharding_type": sharding, "chained_optim_avoid_prefix": True}
        optimizer = self.optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=metadata)
        return {**state, "optimizer": optimizer}

    def steps(self, *numbers: int) -> None:
        """Successful optimizer steps on the keyed gradients of these steps."""
        for number in numbers:
            assert self.step(number), f"step {number} was skipped"

    def step(self, number: int, poison: float = 0.0) -> bool:
        """One optimizer step on the keyed gradients of step `number`; `poison` is added to one element of each parameter."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        for param, identity in self.identities.items():
            gradient = keyed_gradient(identity, number) * _share_of_gradient(param)
            gradient[0] += poison
            param.main_grad.copy_(gradient.view_as(param.main_grad))
        for chunk in self.chunks:
            chunk.finish_grad_sync()
        successful, _, _ = self.optimizer.step()
        return successful

    def gather_params(self) -> None:
        """Finish all-gathers that overlap with the next forward pass."""
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


def build(
    hf,
    layout: Layout,
    virtual: int | None = None,
    ddp_options: dict | None = None,
    dtype: torch.dtype = torch.bfloat16,
    sequence_parallel: bool = False,
    **optimizer_options,
) -> Job:
    """A job on this rank: weights filled by key, gradient clipping off. `ddp_options`, `optimizer_options`: Megatron's fields."""
    config = transformer_config(hf, layout, dtype)
    config.fp16, config.sequence_parallel = dtype == torch.float16, config.sequence_parallel or sequence_parallel
    config.virtual_pipeline_model_parallel_size = virtual
    models = [gpt_model(hf, config)] if virtual is None else [_virtual_stage(hf, config, v) for v in range(virtual)]
    return job_of(models, config, ddp_options, dtype, **optimizer_options)


def job_of(
    models: list, config, ddp_options: dict | None = None, dtype: torch.dtype = torch.bfloat16, **optimizer_options
) -> Job:
    """A job on model chunks of any kind; as `build`."""
    for param, identity in identify(models).items():
        param.data.copy_(keyed_weight(identity).view_as(param))
    ddp = dict(use_distributed_optimizer=True, grad_reduce_in_fp32=True) | (ddp_options or {})
    ddp_config = DistributedDataParallelConfig(**ddp)
    chunks = [
        DistributedDataParallel(config, ddp_config, Float16Module(config, model), disable_bucketing=number > 0)
        for number, model in enumerate(models)
    ]
    options = dict(
        optimizer="adam", lr=LEARNING_RATE, weight_decay=0.1, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16,
        params_dtype=dtype, use_distributed_optimizer=ddp_config.use_distributed_optimizer, clip_grad=0.0,
        overlap_param_gather=ddp_config.overlap_param_gather,
    )  # fmt: skip
    return Job(chunks, get_megatron_optimizer(OptimizerConfig(**options | optimizer_options), chunks))


def _virtual_stage(hf, config, stage: int) -> GPTModel:
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage),
        vocab_size=hf.vocab_size,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope",
        vp_stage=stage,
    ).to(config.params_dtype)


def global_indices(identity: Identity) -> torch.Tensor:
    """int64, one per local element, flat: its index in the logical tensor, straight from the definition of Segment."""
    pieces = []
    for s in identity.segments:
        i = torch.arange(s.length)
        pieces.append(s.global_start + (i // s.run) * s.stride + i % s.run)
    return torch.cat(pieces)


def keyed_weight(identity: Identity) -> torch.Tensor:
    """float32, flat, about +-0.03, most of them not representable in BF16."""
    return (_hash(identity, 0) % 1021 - 510).float() / 2**14


def keyed_gradient(identity: Identity, step: int) -> torch.Tensor:
    """float32, flat, multiples of 2**-10 below 1/8: exact under the scaling and summing of a data-parallel reduction."""
    return (_hash(identity, step) % 255 - 127).float() / 2**10


def _hash(identity: Identity, step: int) -> torch.Tensor:
    seed = zlib.crc32(f"{identity.key} {step}".encode())
    return ((global_indices(identity) + seed) * 2654435761 % 2**32) >> 7


def _share_of_gradient(param: torch.nn.Parameter) -> float:
    """This rank's part of the gradient: unequal parts, whose sum, divided by the data-parallel size, is exactly the whole."""
    expert = not getattr(param, "allreduce", True)
    group = parallel_state.get_expert_data_parallel_group() if expert else parallel_state.get_data_parallel_group()
    weights = {1: (1.0,), 2: (0.25, 0.75), 4: (0.125, 0.25, 0.125, 0.5)}[group.size()]
    return weights[group.rank()] * parallel_state.get_data_parallel_world_size()


def logical_tensors(job: Job, values: dict | None = None) -> tuple[dict[str, str], list[str]]:
    """Digest of each whole logical tensor, put together from all ranks, and the keys whose replicas differ. Collective.

    values: by parameter; default the parameters themselves.
    """
    mine = [  # as numpy, which is pickled many times faster
        (identity.key, global_indices(identity).numpy(), _bits((values[param] if values else param).detach()).numpy())
        for param, identity in job.identities.items()
    ]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole, differing = {}, set()
    for key, *piece in (piece for pieces in everyone for piece in pieces):
        index, bits = map(torch.from_numpy, piece)
        known = whole.setdefault(
            key, {"bits": torch.zeros(0, dtype=bits.dtype), "set": torch.zeros(0, dtype=torch.bool)}
        )
        _grow(known, int(index.max()) + 1)
        replica = known["set"][index]
        if not torch.equal(known["bits"][index][replica], bits[replica]):
            differing.add(key)
        known["bits"][index], known["set"][index] = bits, True
    holes = [key for key, known in whole.items() if not known["set"].all()]
    assert not holes, f"elements that no rank holds: {holes}"
    digests = {key: hashlib.sha256(known["bits"].numpy().tobytes()).hexdigest() for key, known in sorted(whole.items())}
    return digests, sorted(differing)


def _grow(known: dict, size: int) -> None:
    for name, tensor in known.items():
        if tensor.numel() < size:
            known[name] = torch.cat([tensor, tensor.new_zeros(size - tensor.numel())])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
