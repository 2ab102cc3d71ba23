"""What the modules of a live vLLM model compute: their inputs and outputs while they read a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_sr.rollout.engine import SamplingConfig


def record_modules(engine, prompts: Sequence[Sequence[int]]) -> list[tuple[str, list, object]]:
    """(path in the model, positional inputs, output) of every call of every module during the prefill of each prompt, as copies.

    engine: a `VLLMEngine` in this process. Prompts go through one by one and past the prefix cache, so each call sees one whole
    sequence. Memory: all activations of the prompts.
    """
    (model,) = engine._rpc(lambda worker: worker.model_runner.get_model())
    calls, inputs, handles = [], {}, []
    for path, module in model.named_modules():
        # Copies before the call: rotary embeddings and residual sums are written in place.
        handles.append(
            module.register_forward_pre_hook(lambda m, args, path=path: inputs.__setitem__(path, _copy(args)))
        )
        handles.append(module.register_forward_hook(
            lambda m, args, out, path=path: calls.append((path, list(inputs.pop(path)), _copy(out)))))  # fmt: skip
    try:
        for number, prompt in enumerate(prompts):
            engine._requests.forget_cache()
            engine.generate([prompt], SamplingConfig(n=1, max_tokens=1, ignore_eos=True), [number])
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _copy(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    return type(value)(_copy(v) for v in value) if isinstance(value, (tuple, list)) else value
