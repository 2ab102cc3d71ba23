"""The policy loss of Dr. GRPO with asymmetric and dual clipping.

ratio = exp(log p - log p_old)                                       per token
J     = min(ratio A, clip(ratio, 1 - low, 1 + high) A)               PPO; high > low as in DAPO's "clip higher"
J     = max(J, dual A)                       where A < 0             dual clip (Ye et al. 2020): bounds a huge ratio
loss  = - sum(J over response tokens) / token budget                 a constant budget: no length bias
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Clipping:
    """Clip ranges of the probability ratio; the defaults are the paper's."""

    low: float = 0.2
    high: float = 0.28
    dual: float = 3.0


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    token_budget: int,
    clipping: Clipping,
) -> torch.Tensor:
    """Scalar loss of a micro-batch (FP32).

    log_probs, old_log_probs, mask [batch, sequence]; advantages [batch]; mask is 1 on response tokens. token_budget is the
    constant that replaces the number of tokens: batch * max completion tokens.
    """
    advantages = advantages[:, None]
    ratio = (log_probs - old_log_probs).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clipping.low, 1 + clipping.high) * advantages)
    objective = torch.where(advantages < 0, torch.maximum(objective, clipping.dual * advantages), objective)
    # where, not multiplication: padding may hold any value, also one whose ratio overflows
    return -torch.where(mask.bool(), objective, 0.0).sum() / token_budget
