"""Megatron shards <-> Hugging Face tensors on real ranks (C2, C5): every layout, bit for bit, in one launch."""

import pytest

from tests.launch import torchrun
from tests.rollout.export_ranks import CASES


@pytest.mark.distributed
def test_c5_export_after_load_equals_the_checkpoint_in_every_layout(tmp_path):
    done = torchrun(2, "tests/rollout/export_ranks.py", tmp_path)
    for case in CASES:
        assert f"ok {case[0]}\n" in done.stdout, done.stdout[-4000:]
