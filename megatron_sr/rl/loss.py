"""The policy loss of Dr. GRPO with asymmetric and dual clipping, and truncated importance sampling.

d     = log p - log p_old, kept within +-20                            so that exp(d) stays finite (as verl does)
ratio = exp(d)                                                         per token
J     = min(ratio A, clip(ratio, 1 - low, 1 + high) A)                 PPO (Schulman et al. 2017, eq. 7); high > low is "clip
                                                                       higher" (DAPO, Yu et al. 2025, eq. 10)
J     = max(J, dual A)                       where A < 0               dual clip (Ye et al. 2020, arXiv 1912.09729): bounds a huge ratio
J     = w J                                                            w: truncated importance weights, if wanted
loss  = - sum(J over response tokens) / token budget                   Dr. GRPO (Liu et al. 2025, sec. 3.2): a constant, so that
                                                                       long answers are not favoured
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOG_RATIO_LIMIT = 20.0


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
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scalar loss of a micro-batch, in the dtype of log_probs (FP32).

    log_probs, old_log_probs, mask [batch, sequence]; advantages [batch]; mask is 1 on response tokens. token_budget is the
    constant that replaces the number of tokens: batch * max completion tokens. importance [batch, sequence]: weights of the
    tokens (`truncated_importance`), without gradient; None: 1. Whatever stands outside the mask reaches neither loss nor gradient.
    """
    used, advantages = mask.bool(), advantages[:, None]
    log_ratio = torch.where(used, log_probs - old_log_probs, 0.0)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clipping.low, 1 + clipping.high) * advantages)
    objective = torch.where(advantages < 0, torch.maximum(objective, clipping.dual * advantages), objective)
    if importance is not None:
        objective = objective * importance.detach()
    return -torch.where(used, objective, 0.0).sum() / token_budget


@torch.no_grad()
def truncated_importance(
    trainer_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor, cap: float
) -> torch.Tensor:
    """w = min(p_trainer / p_rollout, cap) per token: [batch, sequence] like its arguments, 1 outside the mask.

    Tokens come from the engine's distribution, the trainer's gradient is of its own: kernels differ, and with stale rollouts weights
    too. The weight corrects the expectation; the cap bounds its variance from above (Yao et al. 2025, "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training"; Ionides 2008, truncated importance sampling). Both log-probabilities are of the
    token's policy when it was drawn and before this update: p_trainer recomputed by the trainer, p_rollout as the engine reported it.
    """
    log_ratio = (trainer_log_probs - rollout_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.where(mask.bool(), log_ratio.exp().clamp(max=cap), 1.0)
