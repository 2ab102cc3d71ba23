"""Point 1: from every trainer layout into vLLM with one and with two workers, bit for bit. See `parity_ranks.py`."""

import pytest

from tests.launch import torchrun
from tests.rollout.layouts import PARITY

pytestmark = [pytest.mark.rollout, pytest.mark.distributed]


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    outputs = {}

    def run(family):
        if family not in outputs:
            directory = tmp_path_factory.mktemp(family)
            outputs[family] = torchrun(
                2, "tests/rollout/parity_ranks.py", directory, family, check=False, timeout=900
            ).stdout
        return outputs[family]

    return run


@pytest.mark.parametrize(
    "family, layout", [(family, layout) for family, layouts in PARITY.items() for layout in layouts]
)
def test_point_1_layout_into_one_and_two_workers(family, layout, printed):
    """Hard bit patterns, one layout after the other into the same live engines, every other time in shuffled order."""
    assert f"ok {layout}\n" in printed(family), printed(family)[-6000:]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("family", list(PARITY))
def test_point_1_logprobs_equal_a_fresh_engines(family, workers, printed):
    """Difference 0.0, after all the syncs."""
    assert f"ok fresh-tp{workers}\n" in printed(family), printed(family)[-6000:]


def test_point_2_one_of_two_vllm_workers_killed_in_mid_update(printed):
    assert "ok dead-worker\n" in printed("dense"), printed("dense")[-6000:]
