"""Megatron shards <-> Hugging Face tensors on two real ranks: every layout, bit for bit, in one launch."""

import pytest

from tests.launch import torchrun
from tests.rollout.layouts import CASES

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    return torchrun(2, "tests/rollout/export_ranks.py", tmp_path_factory.mktemp("export"), check=False).stdout


@pytest.mark.parametrize("name", [case[0] for case in CASES])
def test_c5_export_after_load_equals_the_checkpoint(name, printed):
    """Also: FP32 main params in place of the parameters; damaged checkpoints and incomplete values are refused."""
    assert f"ok {name}\n" in printed, printed[-6000:]
