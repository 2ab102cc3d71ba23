"""Issue 7, point 2: MasterWeights on sharded models, real gloo ranks. Two launches, of four and of two ranks, serve all tests."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.backends.sharded_model import Model, digests, make, run
from tests.launch import torchrun

pytestmark = pytest.mark.distributed
LAYOUTS = [
    "DDP",
    "fully_shard 4",
    "fully_shard 4, each layer",
    "fully_shard 2",
    "HSDP 2x2",
    "TP 2",
    "TP 2, fully_shard 2",
]


def unsharded(*steps: int, optimizer: str = "AdamW") -> dict:
    model = Model()
    opt = make(model, optimizer)
    run(model, opt, *steps)
    return digests(model, opt)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("fsdp")
    model = Model()
    opt = make(model)
    run(model, opt, 1, 2)
    weights, state = get_state_dict(model, opt)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder / "unsharded", no_dist=True)
    for ranks in (4, 2):
        torchrun(ranks, "tests.backends.fsdp_ranks", folder / f"{ranks}.json", folder)
    return {"four": json.loads((folder / "4.json").read_text()), "two": json.loads((folder / "2.json").read_text()),
            "folder": folder}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c2_sharded_bits_equal_unsharded(results, layout):
    """Uneven and empty shards, 3-D and one-element parameters, FSDP2 on top of tensor parallelism: weights and main params."""
    got, expected = results["four"]["layouts"][layout], unsharded(1, 2, 3)
    assert got["wrong"] == []
    assert got["main"] == expected["main"]
    assert got["weights"] == expected["weights"]


def test_c2_another_optimizer_class_on_dtensors(results):
    """Not the fused step: torch's SGD with momentum on DTensor main params."""
    assert results["four"]["SGD"]["wrong"] == []
    assert results["four"]["SGD"]["main"] == unsharded(1, 2, 3, optimizer="SGD")["main"]


@pytest.mark.parametrize("layout", ["DDP", "fully_shard 4, each layer", "HSDP 2x2", "TP 2", "TP 2, fully_shard 2"])
def test_training_with_gradient_accumulation_and_clipping(results, layout):
    training = results["four"]["training"][layout]
    assert training["losses"][-1] < 0.9 * training["losses"][0]
    assert training["same"]  # every rank sees the same weights
    assert training["wrong"] == []


@pytest.mark.parametrize(
    "way",
    ["unsharded -> TP 2, fully_shard 2", "unsharded -> fully_shard 4", "unsharded -> fully_shard 4, each layer, flat"],
)
def test_resume_1_to_4_ranks_bit_for_bit(results, way):
    got = results["four"]["resume"][way]
    loaded = unsharded(1, 2)
    assert got["loaded"] == {**loaded, "steps": 2, "counted while asked for its state": 0}
    assert got["continued"] == unsharded(1, 2, 3, 4)
    assert got["wrong"] == []


def test_resume_4_to_2_ranks_bit_for_bit(results):
    assert results["two"]["resume"]["loaded"]["weights"] == unsharded(1, 2, 3, 4)["weights"]
    assert results["two"]["resume"]["loaded"]["steps"] == 4
    assert results["two"]["resume"]["continued"] == unsharded(1, 2, 3, 4, 5)


def test_resume_2_ranks_to_1_bit_for_bit(results):
    model = Model()
    opt = make(model)
    weights, state = get_state_dict(model, opt)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=results["folder"] / "two", no_dist=True)
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)
    assert opt.steps == 5
    run(model, opt, 6)
    assert digests(model, opt) == unsharded(1, 2, 3, 4, 5, 6)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
