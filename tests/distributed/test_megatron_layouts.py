"""C1 and C2 in real Megatron on real gloo ranks: every layout gives the same BF16 weights. One launch serves all tests here."""

from __future__ import annotations

import json

import pytest

from tests.launch import ROOT, torchrun

pytestmark = pytest.mark.distributed
LAYOUTS = [
    *(("dense", layout) for layout in ("DP2", "DP2 overlap", "TP2", "PP2", "PP2 VPP2")),
    *(("tied", layout) for layout in ("TP2", "PP2")),
    *(("moe", layout) for layout in ("DP2", "EP2", "TP2 SP", "PP2")),
]
each_layout = pytest.mark.parametrize("model, layout", LAYOUTS)
each_run = pytest.mark.parametrize("model, run", [*((model, "DP1") for model in ("dense", "tied", "moe")), *LAYOUTS])


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("layouts")
    ranks = ROOT / "tests/distributed/run_ranks.py"
    torchrun(2, ranks, "tests.distributed.layouts_ranks", folder / "results.json", folder / "checkpoints")
    return json.loads((folder / "results.json").read_text())


@each_layout
def test_c2_bf16_weights_are_equal_in_every_layout(results, model, layout):
    one_rank, here = results[model]["DP1"], results[model][layout]
    assert here["start"] == one_rank["start"]  # otherwise the comparison below would say nothing about rounding
    assert here["main"] == one_rank["main"]
    assert here["weights"] == one_rank["weights"]


@each_run
def test_c1_weights_are_the_rounding_of_the_gathered_main_params(results, model, run):
    assert results[model][run]["recomputed wrongly"] == []


@each_run
def test_c2_replicas_agree(results, model, run):
    """Norms, q/k norms and the router under TP, the tied embedding on the first and last stage, data-parallel replicas."""
    assert results[model][run]["differing"] == []


@each_layout
def test_identities_are_where_distributed_checkpointing_puts_elements(results, model, layout):
    assert results[model][layout]["misplaced"] == []


@each_run
def test_c7_three_steps_draw_three_times(results, model, run):
    assert results[model][run]["step"] == 3


def test_every_weight_depends_on_the_seed(results):
    ours, others = results["dense"]["DP1"], results["dense"]["another seed"]
    assert ours["main"] == others["main"]
    assert [key for key, digest in ours["weights"].items() if digest == others["weights"][key]] == []
    assert [key for key, digest in ours["weights"].items() if digest == ours["start"][key]] == []
