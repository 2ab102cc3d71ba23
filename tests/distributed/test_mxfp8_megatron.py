"""Points 1, 2, 3 and 6 of the MXFP8 mode in real Megatron on two real gloo ranks. One launch serves all tests here."""

from __future__ import annotations

import json
import math

import pytest

from tests.launch import ROOT, torchrun

pytestmark = pytest.mark.distributed

LAYOUTS = [
    *(("dense", layout) for layout in ("DP2", "DP2 overlap", "TP2", "PP2")),
    *(("moe", layout) for layout in ("DP2", "EP2", "TP2 SP", "PP2")),
]
RUNS = [("dense", "DP1"), ("moe", "DP1"), *LAYOUTS]
each_run = pytest.mark.parametrize("model, run", RUNS)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("mxfp8")
    ranks = ROOT / "tests/distributed/run_ranks.py"
    torchrun(2, ranks, "tests.distributed.mxfp8_ranks", folder / "results.json", folder / "checkpoints", timeout=400)
    return json.loads((folder / "results.json").read_text()) | {"checkpoint": folder / "checkpoints" / "dp2"}


@each_run
def test_point1_mxfp8_params_are_the_two_roundings_of_the_main_params(results, model, run):
    """Computed anew on whole logical tensors with the public API: BF16 params hold exactly the dequantized MXFP8 values."""
    assert results["layouts"][model][run]["recomputed wrongly"] == []
    assert results["layouts"][model][run]["step"] == 3


@each_run
def test_point1_mxfp8_linear_and_expert_weights_alone(results, model, run):
    here = results["layouts"][model][run]
    linear = {"decoder.layers.self_attention.linear_qkv.weight", "decoder.layers.self_attention.linear_proj.weight"}
    mlp = "decoder.layers.mlp.experts.experts." if model == "moe" else "decoder.layers.mlp."
    linear |= {f"{mlp}linear_fc1.weight", f"{mlp}linear_fc2.weight"}
    if run != "PP2":  # rank 0 has the first stage only
        assert {"output_layer.weight", "decoder.final_layernorm.weight"} < set(here["keys"])
    assert "embedding.word_embeddings.weight" in here["keys"]
    assert ("decoder.layers.mlp.router.weight" in here["keys"]) == (model == "moe")
    assert set(here["quantized"]) == linear


def test_point1_mxfp8_first_and_last_layers_stay_bf16(results):
    assert results["ends"] == {"layers": ["1", "2"], "bf16_layers": [0, 3], "not rounded to BF16": []}


def test_point1_mxfp8_nearest_rounds_twice_to_nearest(results):
    assert results["nearest"] == {"wrong": [], "quantized": 8}


def test_point1_mxfp8_weights_only_load_quantizes_after_main_params_are_made(results):
    assert results["weights only"] == {"main params are the base": True, "copied again": True}


def test_point2_mxfp8_unbiased_through_zero_shards(results):
    """The ratio has a standard deviation of about 1.3 * sqrt(2 / elements); 6.5 of them give a false-alarm rate below 1e-9."""
    found = results["unbiased"]
    assert found["shards that cut tiles"] > 0
    assert found["elements"] > 100_000
    assert abs(found["ratio"] - 1 - 1 / 200) < 6.5 * 1.3 * math.sqrt(2 / found["elements"])


@pytest.mark.parametrize("model, layout", LAYOUTS)
def test_point3_mxfp8_c2_codes_and_scales_are_equal_in_every_layout(results, model, layout):
    one_rank, here = results["layouts"][model]["DP1"], results["layouts"][model][layout]
    assert here["start"] == one_rank["start"]
    assert here["main"] == one_rank["main"]
    assert here["words"] == one_rank["words"]
    assert here["words"] != here["start"]


@each_run
def test_point3_mxfp8_replicas_and_repeated_copies_and_gathers_agree(results, model, run):
    here = results["layouts"][model][run]
    assert here["differing"] == []
    assert (here["gathered again"], here["copied again"], here["values again"]) == (True, True, True)


def test_point3_mxfp8_tensor_parallel_split_within_a_block_is_refused(results):
    message = results["refused"]["cut"]
    assert (
        "mlp.experts.local_experts.0.linear_fc2.weight: tensor parallelism splits its input dimension of 32" in message
    )
    assert "within a block of 32 that shares a scale; choose a tensor-parallel size" in message


def test_point3_mxfp8_what_blocks_do_not_fit_is_refused(results):
    assert "its input dimension is 48, which blocks of 32 do not divide" in results["refused"]["no blocks"]
    assert "use these (--use-distributed-optimizer" in results["refused"]["not distributed"]


@each_run
def test_point4_mxfp8_export_is_equal_in_every_layout(results, model, run):
    """Under Hugging Face names: the same codes and scales from every layout, and they stand for the very values of the params."""
    here = results["layouts"][model][run]
    assert here["exported"] == results["layouts"][model]["DP1"]["exported"]
    assert here["exported as expected"]
    assert here["exported wrongly"] == []


def test_point6_mxfp8_resume_gives_the_same_codes(results):
    found = results["resume"]
    assert (found["step"], found["loaded"], found["continued"]) == (2, True, True)


def test_point6_mxfp8_resume_in_another_layout_gives_the_same_codes(results):
    assert results["resume on TP2"]["step"] == 2
    assert results["resume on TP2"]["words"] == results["resume"]["words"]


def test_point6_mxfp8_checkpoint_verifies_offline(results):
    """`megatron-sr verify CHECKPOINT` without ranks: main params, seed and step give the BF16 and the MXFP8 values that are stored."""
    from megatron_sr.megatron.verify import verify

    found = verify(results["checkpoint"])
    assert found["rounding"]["format"] == "mxfp8"
    assert found["mismatches"] == []
    assert found["elements"] > 100_000


def test_point6_mxfp8_damaged_params_are_found(results):
    found, name = results["verify"], "decoder.layers.mlp.linear_fc2.weight"
    assert found["good"] is None
    assert "layers.1.mlp.linear_fc2.weight does not hold the MXFP8 values" in found["off grid"]
    for case in ("off grid, verify", "other value"):
        assert name in found[case], case
