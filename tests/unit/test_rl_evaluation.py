"""mean@n, response lengths, and rewards shared by ranks, against numbers worked out by hand. Engine and ranks are stand-ins."""

import pytest
import torch

from megatron_sr.rl import rollouts
from megatron_sr.rl.response_length import response_lengths
from megatron_sr.rl.rollouts import share_rewards
from megatron_sr.rl.sampled_evaluation import SampledEvaluation, mean_at_n, sampling_for
from megatron_sr.rl.tasks import Example
from megatron_sr.rollout.engine import Completion


class Ranks:
    """torch.distributed as rank 0 of `size` sees it; the other ranks contribute what `others` makes of rank 0's object."""

    def __init__(self, monkeypatch, size=1, others=lambda rank, mine: mine):
        monkeypatch.setattr(rollouts.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(rollouts.dist, "get_world_size", lambda: size)

        def all_gather_object(out, mine):
            out[:] = [mine] + [others(rank, mine) for rank in range(1, size)]

        monkeypatch.setattr(rollouts.dist, "all_gather_object", all_gather_object)


class EvenTask:
    """A completion is right if it has an even number of tokens."""

    name, ignore_eos = "even", False

    def rewards(self, examples, completions):
        return [[float(len(ids) % 2 == 0) for ids in group] for group in completions]

    def failures(self):
        return {"timed_out": 2}


class Engine:
    """Completion i of a request with seed s has 1 + (s + i) % 3 tokens; three tokens are the limit."""

    def generate(self, prompts, sampling, seeds):
        self.seeds = list(seeds)
        lengths = [[1 + (seed + i) % 3 for i in range(sampling.n)] for seed in seeds]
        return [
            [Completion(p, [7] * n, [0.0] * n, "length" if n == 3 else "stop", 1) for n in group]
            for p, group in enumerate(lengths)
        ]


def test_mean_at_n_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    # means 0.5, 0, 1: standard deviation 0.5
    assert mean_at_n(rewards) == {
        "mean@4": 0.5, "standard_error": pytest.approx(0.5 / 3**0.5), "pass@4": pytest.approx(2 / 3),
    }  # fmt: skip
    assert mean_at_n(rewards[:1]) == {"mean@4": 0.5, "standard_error": None, "pass@4": 1.0}


def test_evaluation_draws_the_same_samples_each_time_and_counts_them(monkeypatch):
    Ranks(monkeypatch)
    engine, task = Engine(), EvenTask()
    tokenizer = type("Tokenizer", (), {"eos_token_id": 9})
    sampling = sampling_for(task, tokenizer, n=3, temperature=0.6, max_tokens=3)
    assert (sampling.stop_token_ids, sampling.temperature, sampling.min_tokens) == ((9,), 0.6, 0)
    evaluate = SampledEvaluation(task, [Example([1], ""), Example([2], "")], sampling)
    first = evaluate(engine)
    seeds = engine.seeds
    assert seeds[1] - seeds[0] == 3, "children of a request take the seeds that follow"
    assert {**evaluate(engine), "seconds": 0} == {**first, "seconds": 0}
    assert engine.seeds == seeds
    # Each problem has one answer of 1, 2 and 3 tokens.
    assert (first["mean@3"], first["pass@3"], first["problems"]) == (pytest.approx(1 / 3), 1.0, 2)
    assert first["reward_failures"] == {"timed_out": 2}
    assert first["response_length"]["mean"] == 2.0
    assert first["response_length"]["truncated"] == pytest.approx(1 / 3)


def test_response_lengths_are_nearest_rank_percentiles():
    lengths = torch.arange(1, 101)[torch.randperm(100, generator=torch.Generator().manual_seed(0))]
    assert response_lengths(lengths) == {"mean": 50.5, "max": 100, "p10": 10, "p50": 50, "p90": 90, "p99": 99}
    two = response_lengths(torch.tensor([[3, 8]]), torch.tensor([[False, True]]))
    assert two == {"mean": 5.5, "max": 8, "p10": 3, "p50": 3, "p90": 8, "p99": 8, "truncated": 0.5}


def test_each_rank_rewards_its_share_and_all_get_all_in_order(monkeypatch):
    seen = []

    class Task(EvenTask):
        def rewards(self, examples, completions):
            seen.append([e.answer for e in examples])
            return super().rewards(examples, completions)

    Ranks(monkeypatch, size=2, others=lambda rank, mine: [[0.5], [0.25]])
    examples = [Example([1], str(i)) for i in range(4)]
    completions = [[[1, 2]], [[1]], [[1]], [[1, 2, 3, 4]]]
    assert share_rewards(Task(), examples, completions) == [[1.0], [0.5], [0.0], [0.25]]
    assert seen == [["0", "2"]]


def test_a_reward_that_fails_on_one_rank_ends_all(monkeypatch):
    Ranks(monkeypatch, size=2, others=lambda rank, mine: RuntimeError("workers cannot start on rank 1"))
    with pytest.raises(RuntimeError, match="on rank 1"):
        share_rewards(EvenTask(), [Example([1], "")] * 2, [[[1]], [[1]]])
