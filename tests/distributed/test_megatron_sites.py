"""Issue points 1, 3 and 4: every cast site is rounded or refused, FP16 with loss scaling, formats, chosen tensors, metrics, the replica
check. Real megatron-core, real gloo ranks; one launch serves all tests here."""

from __future__ import annotations

import json
import re

import pytest

from tests.launch import ROOT, torchrun

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    file = tmp_path_factory.mktemp("sites") / "results.json"
    torchrun(2, ROOT / "tests/distributed/run_ranks.py", "tests.distributed.sites_ranks", file, timeout=600)
    return json.loads(file.read_text())


def test_1_not_distributed_optimizer_gives_the_bits_of_the_distributed_one(results):
    assert results["float16 site"] == {"kinds": ["Float16OptimizerWithFloat16Params"], "equal": True, "not rounded": []}


def test_1_chained_not_distributed_optimizers_of_a_moe(results):
    assert results["chained, not distributed"] == {"parts": 2, "step": 2, "not rounded": []}


@pytest.mark.parametrize("fraction, offloaded", [("0.0", 0), ("0.5", 3), ("1.0", 10)])
def test_1_cpu_offload(results, fraction, offloaded):
    """HybridDeviceOptimizer; that a part of the main params lies on another device is a stand-in here (host_offload.py)."""
    site = results["offload"][fraction]
    assert (site["kind"], site["offloaded"], site["params"]) == ("HybridDeviceOptimizer", offloaded, 10)
    assert (site["step"], site["not rounded"]) == (2, [])
    assert site["after loading"] == {"equal": True, "step": 2, "mismatches": []}
    assert site["later"] == []


def test_1_precision_aware_optimizer_with_main_params_and_with_remainders(results):
    """The kernel of Transformer Engine's FusedAdam is a stand-in."""
    sites, kind = results["precision-aware"], "DistributedOptimizer, precision-aware FusedAdam"
    assert sites["FP32 main params"] == {"kind": kind, "step": 2, "not rounded": []}
    assert sites["16-bit remainders"]["step"] == 2
    assert sites["equal"]
    assert "--param-rounding-log-interval 1 does not work with --use-precision-aware-optimizer" in sites["logging"]
    assert (
        "--param-rounding nearest --param-rounding-format e8m4 does not work with --use-precision" in sites["nearest"]
    )


def test_1_layer_wise_optimizer(results):
    layer_wise = results["layer-wise"]
    assert layer_wise["optimizer"] == "LayerWiseDistributedOptimizer"
    assert sum(layer_wise["own"]) < layer_wise["params"]  # this rank steps some of the params only
    assert (layer_wise["step"], layer_wise["equal"]) == (2, True)


def test_1_sgd(results):
    assert results["sgd"] == {"step": 2, "not rounded": []}


@pytest.mark.parametrize(
    "kind, optimizer", [("plain", "ChainedOptimizer"), ("layer-wise", "LayerWiseDistributedOptimizer")]
)
def test_1_muon(results, kind, optimizer):
    muon = results["muon"][kind]
    assert (muon["optimizer"], muon["inner"]) == (optimizer, ["TensorParallelMuon", "FusedAdam"])
    assert (muon["step"], muon["not rounded"]) == (2, [])
    assert muon["all params"] == (kind == "plain")  # layer-wise, this rank has a part of them


@pytest.mark.parametrize(
    "case, words",
    [
        ("unknown class", "--param-rounding stochastic does not know"),
        ("fp16 format in bf16", "--param-rounding-format fp16 does not fit into bfloat16 model params"),
        ("e8m8", "--param-rounding-format e8m8 does not fit into bfloat16 model params"),
        ("mxfp8 with logging", "--param-rounding-log-interval 5 does not work with --param-rounding-format mxfp8"),
    ],
)
def test_1_what_is_not_rounded_is_refused(results, case, words):
    assert words in results["refused"][case]


@pytest.mark.parametrize("optimizer", ["distributed", "not distributed"])
def test_4_fp16_overflow_skips_the_step_and_draws_nothing(results, optimizer):
    fp16 = results["fp16"][optimizer]
    assert (fp16["format"], fp16["dtypes"]) == ("fp16", ["torch.float16"])
    assert not fp16["successful"]
    assert fp16["unchanged"]
    assert (fp16["step"], fp16["final step"]) == (1, 3)
    assert fp16["scale"] == [1024.0, 512.0]
    assert fp16["not rounded"] == []


@pytest.mark.parametrize("format, unused", [("e8m4", 3), ("e8m5", 2), ("e8m6", 1), ("e8m7", 0), ("bf16", 0)])
def test_formats_simulated_in_bf16_buffers(results, format, unused):
    assert results["formats"][format] == {"not rounded": [], "unused bits": unused}


def test_nearest_in_a_simulated_format_draws_nothing(results):
    assert results["nearest format"] == {"not rounded": [], "unused bits": 3, "equal": True}


def test_exclude_rounds_to_nearest_and_leaves_the_other_tensors_as_they_were(results):
    chosen = results["chosen"]
    assert "decoder.final_layernorm.weight" in chosen["excluded"]
    assert "decoder.layers.mlp.linear_fc1.weight" not in chosen["excluded"]
    assert chosen["wrong"] == []
    assert chosen["stochastic"] == []  # stochastic and nearest do differ
    assert chosen["include is the complement"]


def test_c6_a_glob_that_matches_nothing_is_refused_by_name(results):
    assert "*nrom* matches no tensor" in results["chosen"]["typo"]


@pytest.mark.parametrize("layout", ["distributed", "not distributed", "TP2 moe", "PP2 tied", "EP2"])
def test_metrics_are_those_of_the_whole_model(results, layout):
    """Changed weights, distance of main and model params: every element once, whatever has replicas; the bits stay the same."""
    logged = results["metrics"][layout]
    assert logged["step"] == 2
    assert logged["seen"] == pytest.approx(logged["expected"], rel=1e-9)
    assert logged["same bits as without logging"]
    assert 0 < logged["seen"]["changed"] < 1
    elements = {"TP2 moe": 181184, "EP2": 181184}.get(layout, 115136)
    assert logged["elements"] == elements


@pytest.mark.parametrize(
    "case, tensor",
    [
        ("data-parallel replica", "decoder.final_layernorm.weight"),
        ("norm under TP", "decoder.layers.self_attention.linear_qkv.layer_norm_weight"),
        ("router under TP", "decoder.layers.mlp.router.weight"),
        ("tied embedding", "embedding.word_embeddings.weight"),
    ],
)
def test_3_verify_names_the_tensor_and_the_ranks_of_a_differing_replica(results, case, tensor):
    fault = results["faults"][case]
    assert fault["before"] is None
    assert f"replicas differ: {tensor} (" in fault["found"]
    assert "has 2 versions: ranks 0; ranks 1" in fault["found"]
    assert fault["on every rank"]


def test_3_verify_finds_params_that_are_not_the_rounding_of_their_main_params(results):
    fault = results["faults"]["main params"]
    assert "not the rounding of the main params: decoder.layers.mlp.linear_fc1.weight on ranks 0, 1" in fault["found"]
    assert fault["repaired"] is None


def test_3_verify_interval_works_with_an_overlapped_all_gather(results):
    assert "after optimizer step 2" in results["faults"]["overlap"]["found"]


def test_the_table_at_start_up(results):
    table, nearest = results["table"]["stochastic"], results["table"]["nearest"]
    assert "--param-rounding stochastic, seed 5, format bf16, noise step" in table
    assert re.search(r"^  --param-rounding-exclude +\*norm\*$", table, re.MULTILINE)
    assert "cast site DistributedOptimizer: 2 ranks, 131,072 elements stochastic, 448 to nearest" in table
    assert "to nearest: decoder.final_layernorm.weight, " in table
    assert nearest.endswith("--param-rounding nearest (Megatron's own cast)")
