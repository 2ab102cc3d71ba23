"""Advantages of Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-like training"): no division by the group's standard deviation."""

from __future__ import annotations

import torch


def dr_grpo_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """A_i = r_i - mean(r of the group).

    rewards [prompts, n] -> advantages [prompts, n]. Dividing by the standard deviation, as GRPO does, would weight prompts by
    how one-sided their rewards are.
    """
    return rewards - rewards.mean(dim=1, keepdim=True)
