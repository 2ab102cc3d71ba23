"""Seeds and padding of rollouts."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_sr.rl.rollouts import collate, prompt_seeds


@given(st.integers(0, 2**32), st.integers(0, 10**6), st.integers(1, 64), st.integers(1, 16))
def test_request_seeds_are_at_least_n_apart_and_in_range(seed, iteration, prompts, n):
    seeds = prompt_seeds(seed, iteration, prompts, n)
    assert all(b - a >= n for a, b in itertools.pairwise(seeds))
    assert seeds[0] >= 0
    assert seeds[-1] + n <= 2**31


def test_no_seed_is_used_twice_in_a_run():
    used = [s + child for it in range(200) for s in prompt_seeds(0, it, 64, 8) for child in range(8)]
    assert len(set(used)) == len(used)


def test_too_many_seeds_are_refused():
    with pytest.raises(ValueError, match="lower --prompts or --completions"):
        prompt_seeds(0, 0, prompts=2**20, n=2**11)


def test_collate_pads_and_masks_exactly_the_sampled_tokens():
    completion = lambda ids: SimpleNamespace(
        token_ids=ids,
        logprobs=[-float(i) for i in ids],
        version=sum(ids),
        finish_reason="length" if len(ids) == 3 else "stop",
    )
    groups = [[completion([5, 6]), completion([7])], [completion([8, 9, 4]), completion([3])]]
    rollouts = collate([[1, 2], [1]], groups, pad_id=0, multiple=4)
    assert rollouts.tokens.tolist() == [[[1, 2, 5, 6, 0], [1, 2, 7, 0, 0]], [[1, 8, 9, 4, 0], [1, 3, 0, 0, 0]]]
    assert rollouts.mask.tolist() == [[[0, 1, 1, 0], [0, 1, 0, 0]], [[1, 1, 1, 0], [1, 0, 0, 0]]]
    sampled = rollouts.tokens[..., 1:] * rollouts.mask
    assert torch.equal(rollouts.log_probs, -sampled)
    assert rollouts.versions.tolist() == [[11, 7], [21, 3]]
    assert rollouts.truncated.tolist() == [[False, False], [True, False]]
