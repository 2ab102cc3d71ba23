"""C1 and C2 in real Megatron on real gloo ranks: every layout gives the same BF16 weights. One launch serves all tests here."""

from __future__ import annotations

import json

import pytest

from tests.launch import ROOT, torchrun

pytestmark = pytest.mark.distributed
LAYOUTS = {
    2: [
        *(("dense", layout) for layout in ("DP2", "DP2 overlap", "DP2 one bucket", "DP2 not distributed")),
        *(("dense", layout) for layout in ("DP2 overlap, not distributed", "TP2", "TP2 SP", "PP2", "PP2 VPP2")),
        *(("tied", layout) for layout in ("TP2", "PP2")),
        *(("moe", layout) for layout in ("DP2", "EP2", "TP2 SP", "PP2", "EP2 not distributed")),
    ],
    4: [
        *(("dense", layout) for layout in ("DP4", "DP4 overlap", "DP4 in 2 instances", "TP2 PP2", "PP2 VPP2 DP2")),
        *(("qwen2 tied", layout) for layout in ("TP2 PP2", "PP4")),
        *(("moe", layout) for layout in ("TP2 EP2", "PP2 EP2", "PP2 VPP2 EP2 overlap", "EP4", "TP2 PP2 SP")),
        ("moe", "DP2 EP2 not distributed"),
    ],
}
ALL_LAYOUTS = [(ranks, *layout) for ranks, layouts in LAYOUTS.items() for layout in layouts]
MODELS = [(2, "dense"), (2, "tied"), (2, "moe"), (4, "dense"), (4, "qwen2 tied"), (4, "moe")]
each_layout = pytest.mark.parametrize("ranks, model, layout", ALL_LAYOUTS)
each_run = pytest.mark.parametrize("ranks, model, run", [*((*model, "DP1") for model in MODELS), *ALL_LAYOUTS])


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """By the number of ranks: what each layout gave. Four ranks load the checkpoints that two have saved."""
    folder = tmp_path_factory.mktemp("layouts")

    def launch(ranks: int) -> dict:
        script, file = ROOT / "tests/distributed/run_ranks.py", folder / f"{ranks}.json"
        torchrun(ranks, script, "tests.distributed.layouts_ranks", file, folder / "checkpoints", timeout=600)
        return json.loads(file.read_text())

    return {ranks: launch(ranks) for ranks in LAYOUTS}


@each_layout
def test_c2_bf16_weights_are_equal_in_every_layout(results, ranks, model, layout):
    one_rank, here = results[ranks][model]["DP1"], results[ranks][model][layout]
    assert here["start"] == one_rank["start"]  # otherwise the comparison below would say nothing about rounding
    assert here["main"] == one_rank["main"]
    assert here["weights"] == one_rank["weights"]


@each_run
def test_c1_weights_are_the_rounding_of_the_gathered_main_params(results, ranks, model, run):
    assert results[ranks][model][run]["recomputed wrongly"] == []


@each_run
def test_c2_replicas_agree(results, ranks, model, run):
    """Norms, q/k norms and the router under TP, the tied embedding on the first and last stage, data-parallel replicas."""
    assert results[ranks][model][run]["differing"] == []


@each_layout
def test_identities_are_where_distributed_checkpointing_puts_elements(results, ranks, model, layout):
    assert results[ranks][model][layout]["misplaced"] == []


@each_run
def test_c7_three_steps_draw_three_times(results, ranks, model, run):
    assert results[ranks][model][run]["step"] == 3


def test_every_weight_depends_on_the_seed(results):
    ours, others = results[2]["dense"]["DP1"], results[2]["dense"]["another seed"]
    assert ours["main"] == others["main"]
    assert [key for key, digest in ours["weights"].items() if digest == others["weights"][key]] == []
    assert [key for key, digest in ours["weights"].items() if digest == ours["start"][key]] == []
