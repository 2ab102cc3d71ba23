"""Drift of the policy from its base, by the k3 estimator of KL(policy || base) (Schulman, "Approximating KL divergence")."""

from __future__ import annotations

import torch


def k3(log_probs: torch.Tensor, base_log_probs: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1 with d = log p_base - log p, per token sampled from the policy; non-negative, mean = KL in nats a token."""
    d = base_log_probs - log_probs
    return d.exp() - d - 1
