"""`torch.cuda.*` and `device="cuda"` on a machine without CUDA: the CPU answers for the device. Part of `host.install()`.

`torch.cuda.is_available()` keeps saying False, so whoever asks first (vLLM, Triton, Transformer Engine) is not misled.
"""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace

import torch
import torch.utils._device

CPU = torch.device("cpu")
_FACTORIES = (
    *("tensor", "as_tensor", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "arange", "eye"),
    *("linspace", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "empty_strided"),
)
_PRETENDED_MEMORY = 1 << 40  # bytes; only shown in logs


class _Stream:
    """torch.cuda.Stream and Event: on the CPU all work has already happened when anyone waits for it."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return False

    def elapsed_time(self, other) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def _done(self, *args, **kwargs):
        return self

    wait_stream = wait_event = record_event = record = synchronize = wait = _done


class _DefaultGenerators:
    """torch.cuda.default_generators: "the CUDA generator" is the CPU's default generator, whatever the device index."""

    def __getitem__(self, index):
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def install() -> None:
    """Replace the names below in torch.cuda, torch, torch.Tensor and torch.nn.Module. Once per process."""
    _install_devices()
    _install_streams()
    _install_memory()
    _install_generators()
    _install_tensor_types()
    _redirect_factories()
    _redirect_moves()


def _nothing(*args, **kwargs) -> None:
    return None


def _zero(*args, **kwargs) -> int:
    return 0


def _install_devices() -> None:
    cuda = torch.cuda
    # torch's own asks `device_count()` when PYTORCH_NVML_BASED_CUDA_CHECK is set, as vLLM sets it.
    cuda.is_available = lambda: False
    cuda.current_device = lambda: CPU  # Megatron uses it only as `device=torch.cuda.current_device()`
    cuda.device_count = lambda: 1
    cuda.device = lambda device=None: contextlib.nullcontext(device)
    cuda.set_device = cuda.init = cuda._lazy_init = _nothing
    cuda._lazy_call = lambda callback, **kwargs: callback()
    cuda.get_device_name = lambda *args, **kwargs: "cpu"
    cuda.get_device_capability = lambda *args, **kwargs: (0, 0)  # older than any GPU: no branch for a new one is taken
    properties = SimpleNamespace(major=0, minor=0, name="cpu", total_memory=_PRETENDED_MEMORY, multi_processor_count=1)
    cuda.get_device_properties = lambda *args, **kwargs: properties


def _install_streams() -> None:
    cuda, current = torch.cuda, _Stream()
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: current
    cuda.stream = lambda stream=None: contextlib.nullcontext(stream)
    cuda.synchronize = _nothing
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx.range_push = cuda.nvtx.range_pop = cuda.nvtx.mark = _nothing


def _install_memory() -> None:
    cuda = torch.cuda
    cuda.empty_cache = cuda.reset_peak_memory_stats = cuda.reset_max_memory_allocated = _nothing
    cuda.memory_allocated = cuda.max_memory_allocated = cuda.memory_reserved = cuda.max_memory_reserved = _zero
    cuda.memory_stats = lambda *args, **kwargs: {}
    cuda.mem_get_info = lambda *args, **kwargs: (_PRETENDED_MEMORY, _PRETENDED_MEMORY)


def _install_generators() -> None:
    cuda = torch.cuda
    cuda.default_generators = _DefaultGenerators()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(seed)


def _install_tensor_types() -> None:
    for name in ["Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Byte", "Bool"]:
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))

    original = torch.Tensor.type

    def type_(self, *args, **kwargs):
        """Megatron's optimizers and gradient clipping sort parameters by `param.type() == 'torch.cuda.BFloat16Tensor'`."""
        answer = original(self, *args, **kwargs)
        asked_for_name = not args and not kwargs
        return answer.replace("torch.", "torch.cuda.", 1) if asked_for_name and ".cuda." not in answer else answer

    torch.Tensor.type = type_


def _is_cuda(device) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


def _redirect_factories() -> None:
    """`torch.zeros(..., device="cuda")` makes a CPU tensor."""
    # `with torch.device("meta"):` knows the factories by identity and lists them when first used: it must list the originals, or
    # the context has no effect any more (transformers' from_pretrained then leaves rotary frequencies uninitialised).
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _with_cpu_device(getattr(torch, name)))


def _with_cpu_device(factory):
    @functools.wraps(factory)
    def wrapper(*args, **kwargs):
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return wrapper


def _redirect_moves() -> None:
    """`.cuda()` and `.to("cuda")` leave a tensor or module where it is."""
    for owner in (torch.Tensor, torch.nn.Module):
        owner.cuda = lambda self, *args, **kwargs: self
        owner.to = _to_cpu(owner.to)


def _to_cpu(original):
    @functools.wraps(original)
    def to(self, *args, **kwargs):
        args = tuple(CPU if _is_cuda(a) else a for a in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    return to
