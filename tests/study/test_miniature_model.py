"""The miniature's model and tasks: packing, generation, exact rewards against enumeration."""

import itertools

import pytest
import torch

from megatron_sr.study.miniature import bases, tasks
from megatron_sr.study.miniature.loop import MiniatureRun
from megatron_sr.study.miniature.model import Model, ModelConfig, views
from megatron_sr.study.miniature.settings import RunSettings


def small_model(length: int, vocabulary: int = tasks.VOCABULARY, backward_weights: bool = False) -> Model:
    model = Model(ModelConfig(vocabulary, length, hidden=32, layers=2, heads=2), backward_weights)
    bases.initialise(model, torch.Generator().manual_seed(0))
    return model


def test_packed_completions_equal_separate_sequences_in_value_and_gradient():
    model, generator = small_model(7), torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 12, (3, 4), generator=generator)
    completions = torch.randint(0, 12, (3, 5, 3), generator=generator)
    packed = model.log_probs(prompts, completions)
    model.grad.zero_()
    packed.square().sum().backward()
    packed_grad = model.grad.clone()
    separate = model.log_probs(prompts.repeat_interleave(5, 0), completions.reshape(15, 1, 3)).view(3, 5, 3)
    model.grad.zero_()
    separate.square().sum().backward()
    torch.testing.assert_close(packed, separate, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed_grad, model.grad, rtol=1e-4, atol=1e-4)


def test_generation_reports_the_log_probabilities_of_what_it_drew():
    model = small_model(7)
    prompts = torch.randint(0, 12, (3, 4), generator=torch.Generator().manual_seed(2))
    tokens, log_probs = model.generate(prompts, 5, 3, torch.Generator().manual_seed(3))
    torch.testing.assert_close(log_probs, model.log_probs(prompts, tokens).detach(), rtol=1e-5, atol=1e-5)
    again, _ = model.generate(prompts, 5, 3, torch.Generator().manual_seed(3))
    assert torch.equal(tokens, again)
    greedy, _ = model.generate(prompts, 1, 3, None)
    first = model.generate(prompts, 1, 1, None)[0]
    assert torch.equal(greedy[:, :, :1], first)


def test_sampling_follows_the_probabilities():
    model = small_model(3, vocabulary=4)
    prompts = torch.zeros(1, 2, dtype=torch.int64)
    draws = 20_000
    tokens, _ = model.generate(prompts, draws, 1, torch.Generator().manual_seed(4))
    expected = model.log_probs(prompts, torch.arange(4).view(1, 4, 1)).exp().flatten().detach()
    counts = torch.bincount(tokens.flatten(), minlength=4).double()
    chi2 = ((counts - draws * expected) ** 2 / (draws * expected)).sum()
    assert chi2 < 31.0  # 3 degrees of freedom: false alarm below 1e-6


def test_a_backward_weight_changes_the_gradient_of_activations_only():
    plain, other = small_model(7), small_model(7, backward_weights=True)
    prompts, completions = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 2, 3, dtype=torch.int64)

    def gradient(model):
        model.grad.zero_()
        loss = model.log_probs(prompts, completions).sum()
        loss.backward()
        return loss.detach(), model.grad.clone()

    other.backward_flat.copy_(other.flat)
    loss, grad = gradient(plain)
    same_loss, same_grad = gradient(other)
    assert torch.equal(loss, same_loss)
    torch.testing.assert_close(grad, same_grad, rtol=1e-5, atol=1e-5)
    other.backward_flat.mul_(2.0)
    doubled_loss, doubled_grad = gradient(other)
    assert torch.equal(loss, doubled_loss)
    output = views(grad, plain.config)["output"]
    torch.testing.assert_close(views(doubled_grad, plain.config)["output"], output)  # its input is unchanged
    assert not torch.allclose(doubled_grad, grad, rtol=1e-2)


TINY = {
    "unique": tasks.Addition("unique", size=1),
    "free": tasks.Addition("free", size=1, free=1),
    "scratch": tasks.Addition("scratch", size=1, scratch=1),
}


@pytest.mark.parametrize("name", TINY)
def test_exact_reward_equals_the_sum_over_all_completions(name):
    task = TINY[name]
    model = small_model(task.prompt_length + task.completion_length)
    prompts = task.prompts(3, torch.Generator().manual_seed(5))
    every = torch.tensor(list(itertools.product(range(tasks.VOCABULARY), repeat=task.completion_length)))
    every = every.expand(3, -1, -1)
    with torch.no_grad():
        probability = model.log_probs(prompts, every).sum(-1).exp()
        enumerated = (probability * task.reward(prompts, every)).sum(1)
        right, counts = task.right_completions(prompts)
        exact = (model.log_probs(prompts, right).sum(-1).exp() * counts).sum(1)
    torch.testing.assert_close(probability.sum(1), torch.ones(3), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(exact, enumerated, rtol=1e-4, atol=1e-7)


def test_split_lists_every_right_answer_once_and_grades_alike():
    task = tasks.get("split")
    prompts = torch.tensor([[0, 0, 0, 11], [0, 9, 9, 11], [1, 9, 8, 11], [0, 4, 2, 11]])
    right, counts = task.right_completions(prompts)
    assert counts.sum(1).tolist() == [1, 100, 1, 43]
    assert torch.equal(task.reward(prompts, right)[counts], torch.ones(145))
    assert len({tuple(c) for c in right[1].tolist()}) == 100
    assert task.reward(prompts, torch.tensor([10, 0, 9, 9]).expand(4, 1, 4)).sum() == 0  # "+" is no digit


@pytest.mark.parametrize("name", tasks.TASKS)
def test_demonstrations_earn_the_reward(name):
    task, generator = tasks.get(name), torch.Generator().manual_seed(6)
    prompts = task.prompts(50, generator)
    demonstrations = task.demonstrations(prompts, generator)
    assert demonstrations.shape == (50, task.completion_length)
    assert task.reward(prompts, demonstrations[:, None]).min() == 1
    wrong = demonstrations.clone()
    wrong[:, getattr(task, "scratch", 0)] = (wrong[:, getattr(task, "scratch", 0)] + 1) % 10
    assert task.reward(prompts, wrong[:, None]).max() == 0


def test_the_runs_exact_reward_agrees_with_sampling():
    run = MiniatureRun(RunSettings(base="split-0"))
    exact = run.exact_reward(run.policy)
    prompts = run.evaluation[0]
    tokens, _ = run.policy.generate(prompts, 128, 4, torch.Generator().manual_seed(7))
    rewards = run.task.reward(prompts, tokens)
    # 8192 draws: five standard deviations, false alarm below 1e-6
    assert abs(rewards.mean().item() - exact) < 5 * 0.5 / 8192**0.5
    assert 0.2 < exact < 0.3


def test_every_base_loads_and_holds_bf16_numbers():
    for name in bases.BASES:
        flat = bases.load(name)
        assert torch.equal(flat.bfloat16().float(), flat)
    with pytest.raises(ValueError, match="addition-9.*choose one of: addition-0"):
        bases.load("addition-9")


def test_a_missing_base_says_how_to_make_it(monkeypatch, tmp_path):
    monkeypatch.setattr(bases, "folder", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match="python -m megatron_sr.study.miniature.bases"):
        bases.load("addition-0")
