"""Issue 7, point 2: MasterWeights gives the bits that Megatron's own optimizer gives for the same names, seed and step."""

import json

import pytest

from tests.launch import ROOT, torchrun

pytestmark = pytest.mark.distributed


def test_master_weights_equal_megatrons_distributed_optimizer_bit_for_bit(tmp_path):
    """Three steps of a GPT model with the same gradients and Adam arithmetic: weights and FP32 main params."""
    ranks = ROOT / "tests/distributed/run_ranks.py"
    torchrun(1, ranks, "tests.backends.megatron_ranks", tmp_path / "results.json")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["names"]
    assert results["count"] > 10
    assert results["differing"] == {"weights": [], "main params": []}
    assert results["stochastic"] > 100
