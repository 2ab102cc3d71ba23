"""Workarounds of four vLLM faults on CPU (0.32 and 0.33), all in this file.

1. MoE experts are packed at the first load only. `UnquantizedFusedMoEMethod._setup_kernel` calls the experts'
   `process_weights_after_loading`, which packs w13 and w2 for the CPU kernel, only when the kernel is built; a later
   `reload_weights` leaves them unpacked and the kernel reads garbage.
2. A tied output layer keeps its first weights. It shares the embedding's parameter but holds a packed copy of its own
   (`cpu_linear`), which a reload never renews, because no tensor of that name is loaded: embedding and head then differ.
3. A request with a seed breaks the engine when its prompt is computed in parts: a prompt longer than what is left of
   max_num_batched_tokens, or one computed anew after an update that kept it. vLLM samples a token at the end of every part, throws
   it away, and rewinds the request's generator by an offset, which only CUDA generators have.
4. vLLM's AMX attention does not ask Linux for the right to use AMX tiles. Most often oneDNN has done so, in a matrix product; where the
   first request of a process is one token long, none needed AMX, and the process dies of SIGILL.

The workarounds look at what vLLM does, not at a version number, so they do nothing once it does the work itself. The read-back
after each update would show faults 1 and 2. Delete this file when no supported version needs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps

import torch

PROBE_LIMIT = 1 << 33  # products: about half a second of one core


def pack_experts_on_reload() -> None:
    """Make CPU MoE reloads pack their weights (fault 1). Safe to call twice; nothing changes on other devices."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as upstream

    method = upstream.UnquantizedFusedMoEMethod
    original = method._setup_kernel
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def setup_kernel(self, layer, w13, w2):
        if self.moe_kernel is None or self.unquantized_backend != upstream.UnquantizedMoeBackend.CPU:
            return original(self, layer, w13, w2)
        experts = self.moe_kernel.fused_experts
        pack, packed = experts.process_weights_after_loading, []
        experts.process_weights_after_loading = lambda *args: packed.append(pack(*args))
        try:
            original(self, layer, w13, w2)
        finally:
            del experts.process_weights_after_loading  # the class's own method shows again
        if not packed:
            pack(layer)

    method._setup_kernel = setup_kernel


class _Rewound:
    """Stands for a CPU generator while vLLM asks for the offset of a CUDA one: any offset it sets means "before the last draw"."""

    def __init__(self, generator: torch.Generator):
        self._generator, self._before = generator, generator.get_state()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, _: int) -> None:
        self._generator.set_state(self._before)


def rewind_cpu_generators(runner) -> None:
    """Give the generators of a CPU model runner's requests back the state they had before a token that is thrown away (fault 3).

    Does nothing on other devices.
    """
    if runner.device.type != "cpu":
        return
    original = runner.sample_tokens

    @wraps(original)
    def sample_tokens(*arguments, **keywords):
        batch = runner.input_batch
        generators = (
            batch.generators
        )  # the sampler holds this same dictionary, and draws from the generators themselves
        thrown_away = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        stand_ins = {i: _Rewound(generators[i]) for i in thrown_away if i in generators}
        batch.generators = {**generators, **stand_ins}
        try:
            return original(*arguments, **keywords)
        finally:
            batch.generators = generators

    runner.sample_tokens = sample_tokens


def request_amx() -> None:
    """Ask Linux for the right to use AMX tiles, for all threads of this process (fault 4). Only where vLLM computes on a CPU with AMX."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        raise RuntimeError(
            "this processor has AMX, but Linux does not let this process use it, so that vLLM's attention would end it with SIGILL; "
            "use Linux 5.16 or newer, and under gVisor, seccomp or the like allow arch_prctl(ARCH_REQ_XCOMP_PERM)"
        )


def keep_large_linears_plain() -> None:
    """Let vLLM's CPU linears of more than PROBE_LIMIT products keep their weight as it is, instead of behind a oneDNN handle.

    Not a fault but a lack: such a handle is read back by multiplying with the identity, K * K * N products, which for large layers
    takes minutes. vLLM itself falls back to torch's linear when a handle cannot be made, and that path is taken. Call it before the
    model is loaded; safe to call twice.
    """
    from vllm import _custom_ops

    original = _custom_ops.create_onednn_mm
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def create(weight, *arguments, **keywords):
        k, n = weight.shape
        if k * k * n > PROBE_LIMIT:
            raise RuntimeError(f"megatron-sr keeps a weight of {n} x {k} plain, so that it can be read back in time")
        return original(weight, *arguments, **keywords)

    _custom_ops.create_onednn_mm = create


def reload_weights(runner, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """The model runner's `reload_weights`, after which a tied output layer computes with the new embedding (fault 2).

    When it raises, the live weights are a mixture, but vLLM's bookkeeping is put back, so that a later reload starts afresh.
    """
    head = _tied_head(runner.get_model())
    operator = head.cpu_linear if head is not None else None
    try:
        runner.reload_weights(weights_iterator=iter(tensors))
    except BaseException:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(runner.get_model(), runner.model_config)
        raise
    if head is not None and head.cpu_linear is operator:
        head.quant_method.process_weights_after_loading(head)


def _tied_head(model: torch.nn.Module) -> torch.nn.Module | None:
    """The output layer if it shares the embedding's parameter and packs a copy of it."""
    head, embedding = getattr(model, "lm_head", None), getattr(model.model, "embed_tokens", None)
    if head is None or head is embedding or not hasattr(head, "cpu_linear"):
        return None
    return head if head.weight is embedding.weight else None
