"""Drift of the policy from its base, by the k3 estimator of KL(policy || base) (Schulman 2020, "Approximating KL divergence").

With tokens drawn from the policy and d = log p_base - log p: E[exp(d)] = 1, so k3 = exp(d) - d - 1 has the mean -E[d] = KL, without
bias; it is non-negative for every token, and varies less than k1 = -d, whose signs cancel.
"""

from __future__ import annotations

import torch


def k3(log_probs: torch.Tensor, base_log_probs: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1 with d = log p_base - log p, per token sampled from the policy; mean = KL in nats a token. Any equal shapes, FP32."""
    d = base_log_probs - log_probs
    return d.exp() - d - 1
