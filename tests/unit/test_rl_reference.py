"""Loss, gradient, advantages, importance weights and drift equal those of verl and TRL (values: tests/data/rl_reference.json).

The file says which versions gave them; tools/make_rl_reference.py makes it anew. Their cases meet every kind of clip.
"""

import json

import pytest
import torch

from megatron_sr.rl.advantages import dr_grpo_advantages
from megatron_sr.rl.drift import k3
from megatron_sr.rl.loss import Clipping, policy_loss, truncated_importance
from tests.launch import ROOT

REFERENCE = json.loads((ROOT / "tests" / "data" / "rl_reference.json").read_text())
INPUTS = {name: torch.tensor(values, dtype=torch.float64) for name, values in REFERENCE["inputs"].items()}
SETTINGS = REFERENCE["settings"]
MASK = INPUTS["mask"].bool()
CLIPPING = Clipping(SETTINGS["low"], SETTINGS["high"], SETTINGS["dual"])


def close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def loss_and_grad(importance=None):
    log_probs = INPUTS["log_probs"].clone().requires_grad_()
    budget = len(log_probs) * SETTINGS["max_tokens"]
    advantages = dr_grpo_advantages(INPUTS["rewards"]).flatten()
    loss = policy_loss(log_probs, INPUTS["old_log_probs"], advantages, INPUTS["mask"], budget, CLIPPING, importance)
    loss.backward()
    return loss.detach(), log_probs.grad


def importance():
    return truncated_importance(INPUTS["old_log_probs"], INPUTS["rollout_log_probs"], MASK, SETTINGS["cap"])


def test_the_cases_meet_every_kind_of_clip():
    ratio = (INPUTS["log_probs"] - INPUTS["old_log_probs"]).exp()[MASK]
    positive = (dr_grpo_advantages(INPUTS["rewards"]).flatten()[:, None] > 0).expand_as(MASK)[MASK]
    assert (positive & (ratio > 1 + CLIPPING.high)).any()
    assert (~positive & (ratio < 1 - CLIPPING.low)).any()
    assert (~positive & (ratio > CLIPPING.dual)).any()
    assert (importance()[MASK] == SETTINGS["cap"]).any()
    assert (~MASK).any()


@pytest.mark.parametrize("who", ["verl", "trl"])
def test_policy_loss_and_gradient(who):
    loss, grad = loss_and_grad()
    close(loss, REFERENCE[who]["policy_loss"]["loss"])
    close(grad, REFERENCE[who]["policy_loss"]["grad"])


def test_truncated_importance_and_the_loss_with_it():
    weights = importance()
    close(weights * MASK, REFERENCE["verl"]["importance"])
    loss, grad = loss_and_grad(weights)
    close(loss, REFERENCE["verl"]["policy_loss_with_importance"]["loss"])
    close(grad, REFERENCE["verl"]["policy_loss_with_importance"]["grad"])


def test_advantages_and_drift():
    close(dr_grpo_advantages(INPUTS["rewards"]), REFERENCE["verl"]["advantages"])
    close(k3(INPUTS["log_probs"], INPUTS["base_log_probs"]), REFERENCE["verl"]["k3"])
