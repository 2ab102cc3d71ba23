"""Rollouts that run ahead: when a batch may start, how many are on the way, and what is too old to train on. The engine is a mock."""

import threading
import time

import pytest
import torch

from megatron_sr.rl import rollouts
from megatron_sr.rl.async_rollouts import RolloutQueue
from megatron_sr.rl.rollouts import Batch, Rollouts, StaleRollouts, staleness
from megatron_sr.rl.tasks import Example
from megatron_sr.rollout.engine import Completion, SamplingConfig

PROMPTS = 3


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch):
    monkeypatch.setattr(rollouts.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(rollouts.dist, "get_world_size", lambda: 1)


class Mock:
    """Answers with its version; notes (batch, version) of each call. aborts: how many of the next calls are aborted half-way."""

    def __init__(self, aborts=0):
        self.version, self.calls, self.aborts, self.hold, self.lock = 1, [], aborts, threading.Event(), threading.Lock()
        self.hold.set()

    def generate(self, prompts, sampling, seeds):
        with self.lock:
            self.calls.append((seeds[0] // 100, self.version, len(prompts)))
            aborted = self.aborts > 0
            self.aborts -= aborted
        self.hold.wait()
        reasons = ["abort" if aborted and i % 2 else "length" for i in range(len(prompts))]
        return [[Completion(i, [7], [-1.0], reason, self.version)] for i, reason in enumerate(reasons)]


def draw(iteration):
    return Batch(
        iteration, [Example([1], "")] * PROMPTS, [100 * iteration + i for i in range(PROMPTS)], torch.arange(PROMPTS)
    )


def queue_of(engine, staleness, last=6):
    return RolloutQueue(engine, draw, SamplingConfig(n=1), staleness, last)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_point_4_a_batch_starts_when_its_policy_may_make_it_not_before(limit):
    engine = Mock()
    queue = queue_of(engine, limit)
    for iteration in range(6):
        engine.version = iteration + 1
        queue.advance(iteration)
        assert queue.waiting <= limit + 1
        time.sleep(0.02)
        _, groups = queue.take(iteration)
        assert len(groups) == PROMPTS
    queue.close()
    assert sorted(batch for batch, _, _ in engine.calls) == list(range(6)), (
        "each batch once, none beyond the last iteration"
    )
    assert all(0 <= batch + 1 - version <= limit for batch, version, _ in engine.calls)


def test_point_4_aborted_prompts_are_asked_again_and_only_they():
    engine = Mock(aborts=2)
    queue = queue_of(engine, 0)
    queue.advance(0)
    _, groups = queue.take(0)
    assert [c.finish_reason for group in groups for c in group] == ["length"] * PROMPTS
    assert [count for _, _, count in engine.calls] == [
        3,
        1,
    ]  # the second abort leaves the first prompt of its call complete
    assert queue.aborted == 1
    queue.close()


def test_point_4_what_fails_in_the_background_is_raised_where_it_is_waited_for():
    class Broken(Mock):
        def generate(self, *args):
            raise ConnectionError("the engine is gone")

    queue = queue_of(Broken(), 1)
    queue.advance(0)
    with pytest.raises(ConnectionError, match="the engine is gone"):
        queue.take(0)
    queue.close()


def versions(*rows):
    return Rollouts(None, None, None, None, torch.tensor(rows), None)


def test_point_4_histogram_and_limit():
    assert staleness(versions([5, 5], [3, 4]), version=5, limit=2) == {"0": 2, "1": 1, "2": 1}
    with pytest.raises(StaleRollouts, match="3 versions older than the policy's version 6, --max-staleness 2"):
        staleness(versions([5, 5], [3, 4]), version=6, limit=2)
    with pytest.raises(StaleRollouts):
        staleness(versions([6, 7]), version=6, limit=2)  # from a policy that does not exist yet
