"""`megatron-sr verify` on checkpoints made here, tensor by tensor: what the layouts of real jobs in tests/distributed do not show."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_sr import Noise, ParamRounding, checkpoint, round_to_
from megatron_sr.megatron.checkpoint_index import COMPOSED, INDEX
from megatron_sr.megatron.checkpoint_model import SAVE_MODEL
from megatron_sr.megatron.verify import verify

SEED, STEP = 9, 4
BUCKET = "optimizer.distributed.dp_group_idx_0."


def main_params(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 30


def model_params(main: torch.Tensor, key: str, start: int = 0) -> torch.Tensor:
    rounded = torch.empty(main.shape, dtype=torch.bfloat16)
    return round_to_(rounded, main, noise=Noise(SEED, STEP, key), start=start, backend="reference")


def pickled(value) -> io.BytesIO:
    """An object as Megatron stores it: in a list, saved by torch, twice."""
    buffer = io.BytesIO()
    torch.save([value], buffer)
    return buffer


def save(path, tensors: dict, state: dict | None = None, content: dict | None = None, **objects):
    state = state or checkpoint.rounding_state(ParamRounding(seed=SEED, format="bf16"), STEP)
    common = {"optimizer": {"param_groups": [{"lr": 1.0, checkpoint.KEY: state}]}, "content_metadata": content or {}}
    objects = {key: pickled(value) for key, value in objects.items()}
    dcp.save({**tensors, "common_state/shard_0_1": pickled(common), **objects}, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture
def in_proj():
    """Mamba's input projection: one parameter, stored as .z and .x, which lie one after the other in one logical tensor."""
    key = "decoder.layers.mixer.in_proj.weight"
    main = {f"{key}.z": main_params(2, 6, 4), f"{key}.x": main_params(2, 3, 4, seed=1)}
    start = {f"{key}.z": 0, f"{key}.x": 48}
    model = {part: model_params(value, key, start[part]) for part, value in main.items()}
    return key, main, model, {COMPOSED: {part: [key, at] for part, at in start.items()}}


def test_tensors_that_are_stored_in_parts(tmp_path, in_proj):
    key, main, model, content = in_proj
    stored = model | {f"optimizer.state.param.{part}": value for part, value in main.items()}
    result = verify(save(tmp_path / "right", stored, content=content))
    assert (result["mismatches"], result["unmatched"], result["elements"]) == ([], [], 72)
    without = verify(save(tmp_path / "without", stored))
    assert {m["tensor"] for m in without["mismatches"]} >= {f"{key}.x"}  # the parts matter


def test_tensors_that_are_stored_in_parts_and_their_main_params_in_buckets(tmp_path):
    key = "decoder.layers.mixer.in_proj.weight"
    z, x = main_params(1, 6, 4), main_params(1, 3, 4, seed=1)
    model = {f"{key}.z": model_params(z, key), f"{key}.x": model_params(x, key, 24)}
    content = {COMPOSED: {f"{key}.z": [key, 0], f"{key}.x": [key, 24]}}
    # The parameter is z, then x; 5 elements of padding lie before it.
    bucket = torch.cat([torch.full((5,), torch.nan), z.flatten(), x.flatten()])
    index = {"gbuf_idx_0.bucket_idx_0": [(5, 36, key, [(0, 24, 0, 24, 24), (24, 12, 24, 12, 12)])]}
    tensors, objects = {f"{BUCKET}gbuf_idx_0.bucket_idx_0.param": bucket}, {f"{BUCKET}{INDEX}/shard_0_1": index}
    result = verify(save(tmp_path / "right", model | tensors, content=content, **objects))
    assert (result["mismatches"], result["unmatched"], result["elements"]) == ([], [], 36)
    model[f"{key}.x"].view(torch.int16)[0, 1, 1] ^= 1
    result = verify(save(tmp_path / "edited", model | tensors, content=content, **objects))
    assert [(m["tensor"], m["differing"]) for m in result["mismatches"]] == [(key, 1)]


def test_a_float16_optimizers_main_params_are_found_under_their_own_prefix(tmp_path):
    main = main_params(7, 3)
    result = verify(save(tmp_path, {"w": model_params(main, "w"), "optimizer.state.fp32_param.w": main}))
    assert (result["tensors"], result["mismatches"]) == (1, [])


def test_frozen_tensors_are_listed_and_fp32_ones_do_not_count(tmp_path):
    main = main_params(4)
    frozen = torch.ones(3, dtype=torch.bfloat16)
    tensors = {"w": model_params(main, "w"), "optimizer.state.param.w": main, "frozen": frozen, "router": torch.ones(2)}
    result = verify(save(tmp_path, tensors | {"optimizer.state.param.router": torch.ones(2)}))
    assert (result["mismatches"], result["unmatched"], result["tensors"]) == ([], ["frozen"], 1)


@pytest.mark.parametrize(
    "tensors, content, message",
    [
        ({"w": torch.ones(3, dtype=torch.bfloat16)}, {}, "no main params are stored"),
        ({"w": torch.ones(3), "optimizer.state.param.w": torch.ones(3)}, {}, "there is nothing to compare"),
        ({"w": torch.ones(3), "optimizer.state.param.w": torch.ones(3, dtype=torch.int16)}, {}, "not FP32"),
        ({f"{BUCKET}gbuf_idx_0.x.bucket_idx_0.param": torch.ones(3)}, {}, "without a list of what lies where"),
    ],
)
def test_what_cannot_be_compared_is_an_error_not_a_success(tmp_path, tensors, content, message):
    with pytest.raises(ValueError, match=message):
        verify(save(tmp_path, tensors, content=content))


def test_parts_of_different_steps_are_a_mixed_checkpoint(tmp_path):
    other = checkpoint.rounding_state(ParamRounding(seed=SEED, format="bf16"), STEP + 1)
    tensors = {"w": torch.ones(3, dtype=torch.bfloat16), "optimizer.state.param.w": torch.ones(3)}
    objects = {f"{BUCKET}optimizer/shard_0_1": {"param_groups": [{checkpoint.KEY: other}]}}
    with pytest.raises(ValueError, match=r"saved in different runs or at different steps: \(seed, step\)"):
        verify(save(tmp_path, tensors, **objects))


def test_without_model_params_main_params_are_read(tmp_path):
    result = verify(save(tmp_path, {"optimizer.state.param.w": torch.ones(5)}, content={SAVE_MODEL: "none"}))
    assert (result["model_params"], result["elements"], result["mismatches"]) == (False, 5, [])
