"""Issue point 7: every parameter of models beyond Qwen has an identity that is the same in every layout. One launch serves all tests."""

from __future__ import annotations

import json

import pytest

from tests.launch import ROOT, torchrun

pytestmark = pytest.mark.distributed
RUNS = [
    *(("shared experts", layout) for layout in ("TP2", "EP2")),
    ("MLA", "TP2"),
    ("MTP", "PP2"),
    *(("GDN", layout) for layout in ("TP2", "PP2", "EP2")),
    ("Mamba", "TP2"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("identity")
    script = ROOT / "tests/distributed/run_ranks.py"
    torchrun(
        2, script, "tests.distributed.identity_ranks", folder / "results.json", folder / "checkpoints", timeout=600
    )
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("kind, layout", RUNS)
def test_7_identities_are_where_distributed_checkpointing_puts_elements(results, kind, layout):
    assert results[f"{kind} {layout}"]["misplaced"] == []


@pytest.mark.parametrize("kind, layout", RUNS)
def test_7_weights_after_two_steps_are_equal_in_every_layout(results, kind, layout):
    assert results[f"{kind} {layout}"]["differing"] == []
    assert results[f"{kind} {layout}"]["weights"] == results[f"{kind} DP2"]["weights"]


@pytest.mark.parametrize(
    "kind, key",
    [
        ("shared experts", "decoder.layers.mlp.shared_experts.gate_weight"),
        ("MTP", "mtp.layers.0.eh_proj.weight"),
        ("GDN", "decoder.layers.0.self_attention.in_proj.weight"),
        ("Mamba", "decoder.layers.0.mixer.in_proj.weight"),
    ],
)
def test_7_parameters_that_a_checkpoint_splits_keep_one_name(results, kind, key):
    assert key in results[f"{kind} DP2"]["keys"]


def test_7_experts_stacked_in_one_parameter(results):
    """Three experts of 4 x 5 elements, the second half of six, in the second of two layers."""
    stacked = results["stacked"]
    assert stacked["key"] == "experts.weight"
    assert [segment[:3] for segment in stacked["segments"]] == [[20 * i, 20, 120 + (3 + i) * 20] for i in range(3)]
