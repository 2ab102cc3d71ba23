"""One engine for all ranks: every method is collective, what fails on the first rank fails on all, and no rank is left waiting."""

import pytest

from tests.launch import torchrun

pytestmark = pytest.mark.distributed


def test_point_5_one_engine_serves_all_ranks():
    """See `shared_engine_ranks.py`."""
    printed = torchrun(2, "tests/distributed/shared_engine_ranks.py").stdout
    assert "ok rank 0" in printed
    assert "ok rank 1" in printed
