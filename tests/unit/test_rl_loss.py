"""Dr. GRPO loss, advantages and drift against scalar formulas written out here."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sr.rl.advantages import dr_grpo_advantages
from megatron_sr.rl.drift import k3
from megatron_sr.rl.loss import Clipping, policy_loss, truncated_importance


def scalar_objective(log_prob, old, advantage, clipping):
    ratio = math.exp(log_prob - old)
    clipped = min(max(ratio, 1 - clipping.low), 1 + clipping.high)
    objective = min(ratio * advantage, clipped * advantage)
    return max(objective, clipping.dual * advantage) if advantage < 0 else objective


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0), st.floats(-1, 1), st.booleans()), min_size=1, max_size=12)
)
def test_loss_is_the_written_formula(tokens):
    clipping = Clipping()
    expected = -sum(scalar_objective(p, old, a, clipping) for p, old, a, used in tokens if used) / 7
    log_probs, old, advantages, mask = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens))
    # one token a sequence: the advantage belongs to the sequence
    loss = policy_loss(log_probs[:, None], old[:, None], advantages, mask[:, None], token_budget=7, clipping=clipping)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient_flows"),
    [
        (1.27, 1.0, True),
        (1.29, 1.0, False),  # above 1 + 0.28
        (1.29, -1.0, True),  # still being pushed down
        (0.81, -1.0, True),
        (0.79, -1.0, False),  # below 1 - 0.2
        (2.9, -1.0, True),
        (3.1, -1.0, False),  # dual clip
    ],
)
def test_gradient_stops_outside_the_asymmetric_and_dual_clip(ratio, advantage, gradient_flows):
    log_prob = torch.tensor([[math.log(ratio)]], requires_grad=True)
    policy_loss(
        log_prob, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1), token_budget=1, clipping=Clipping()
    ).backward()
    assert (log_prob.grad.abs().item() > 0) == gradient_flows


@pytest.mark.parametrize("padding", [80.0, float("inf"), float("nan")])  # 80: a ratio of exp(160) = inf
def test_padding_reaches_neither_loss_nor_gradient(padding):
    log_probs = torch.tensor([[-1.0, padding]], requires_grad=True)
    old = torch.tensor([[-1.0, -80.0]])
    loss = policy_loss(
        log_probs, old, torch.tensor([1.0]), torch.tensor([[1.0, 0.0]]), token_budget=4, clipping=Clipping()
    )
    loss.backward()
    assert loss.item() == -0.25
    assert log_probs.grad.tolist() == [[-0.25, 0.0]]


@pytest.mark.parametrize("advantage, expected", [(1.0, -1.28), (-1.0, 3.0)])
def test_a_ratio_beyond_fp32_gives_a_bounded_loss_and_no_nan(advantage, expected):
    log_prob = torch.tensor([[-1.0]], requires_grad=True)
    loss = policy_loss(
        log_prob, torch.tensor([[-200.0]]), torch.tensor([advantage]), torch.ones(1, 1), 1, clipping=Clipping()
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert log_prob.grad.item() == 0.0


def test_the_token_budget_is_constant_so_length_does_not_dilute_a_token():
    """By hand: ratio 1 everywhere, so a token's gradient is -A / (2 sequences x 10 tokens), in a short answer and in a long one."""
    log_probs = torch.zeros(2, 10, requires_grad=True)
    mask = torch.zeros(2, 10)
    mask[0, :1] = mask[1, :9] = 1
    policy_loss(log_probs, torch.zeros(2, 10), torch.tensor([0.5, 0.5]), mask, 20, Clipping()).backward()
    assert torch.equal(log_probs.grad, -0.025 * mask)


def test_importance_weights_by_hand():
    trainer, engine = torch.tensor([[0.5, 0.3, 0.9]]).log(), torch.tensor([[0.25, 0.1, 0.9]]).log()
    weights = truncated_importance(trainer, engine, torch.tensor([[1, 1, 0]]), cap=2.5)
    assert weights.tolist() == [[pytest.approx(2.0), 2.5, 1.0]]
    # They scale a token's objective after all clips, and carry no gradient of their own.
    log_prob = torch.tensor([[0.0]], requires_grad=True)
    importance = torch.full((1, 1), 0.5, requires_grad=True)
    loss = policy_loss(
        log_prob, torch.zeros(1, 1), torch.tensor([2.0]), torch.ones(1, 1), 1, Clipping(), importance=importance
    )
    loss.backward()
    assert (loss.item(), log_prob.grad.item(), importance.grad) == (-1.0, -1.0, None)


def test_advantages_are_centred_per_prompt_and_not_scaled():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    assert torch.equal(dr_grpo_advantages(rewards), torch.tensor([[0.75, -0.25, -0.25, -0.25], [0.0] * 4]))


def test_k3_is_non_negative_and_zero_only_at_equality():
    log_probs = torch.linspace(-5, 0, 50)
    assert torch.equal(k3(log_probs, log_probs), torch.zeros(50))
    assert (k3(log_probs, log_probs + 0.3) > 0).all()
    assert (k3(log_probs, log_probs - 0.3) > 0).all()


def test_k3_estimates_the_kl_divergence():
    # E_p[k3] = KL(p || q) exactly, as a sum over a small vocabulary.
    p, q = torch.randn(2, 9, generator=torch.Generator().manual_seed(0)).double().log_softmax(-1)
    assert (p.exp() * k3(p, q)).sum().item() == pytest.approx((p.exp() * (p - q)).sum().item(), rel=1e-12)
