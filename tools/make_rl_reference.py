"""Values of the RL formulas as public trainers compute them, for tests/unit/test_rl_reference.py.

    pip install --target DIR --no-deps verl==0.9.1 trl==1.16.0 datasets pandas pyarrow xxhash multiprocess pytz orjson pyvers \
        'tensordict<0.11' omegaconf hydra-core codetiming pylatexenc torchdata
    PYTHONPATH=DIR python tools/make_rl_reference.py tests/data/rl_reference.json

They are stored, not computed in the test, because verl 0.9.1 wants transformers < 5.11, against this project's pins.
What runs is their own code: verl's `compute_policy_loss_vanilla`, `compute_grpo_outcome_advantage`, `compute_rollout_correction_weights`
and `kl_penalty_forward`; TRL's `GRPOTrainer._compute_loss`, given log-probabilities in place of a model.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import torch

PROMPTS, COMPLETIONS, TOKENS, MOST_TOKENS = 2, 3, 5, 8
LOW, HIGH, DUAL, CAP = 0.2, 0.28, 3.0, 2.0


def draw() -> dict[str, torch.Tensor]:
    """Log-probabilities so far apart that every kind of clip is met; FP64."""
    generator = torch.Generator().manual_seed(20261201)
    shape = PROMPTS * COMPLETIONS, TOKENS

    def normal(scale):
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    log_probs = -1.5 + normal(0.5)
    mask = (torch.arange(TOKENS) < torch.randint(1, TOKENS + 1, (shape[0], 1), generator=generator)).double()
    return {
        "rewards": torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]], dtype=torch.float64),
        "log_probs": log_probs,
        "old_log_probs": log_probs + normal(1.0),
        "rollout_log_probs": log_probs + normal(0.6),
        "base_log_probs": log_probs + normal(0.6),
        "mask": mask,
    }


def verl_values(inputs: dict[str, torch.Tensor]) -> dict:
    """By verl."""
    from verl.trainer.ppo import core_algos, rollout_corr_helper

    mask = inputs["mask"]
    token_rewards = torch.zeros_like(mask)
    token_rewards[:, 0] = inputs["rewards"].flatten()
    groups = np.repeat(np.arange(PROMPTS), COMPLETIONS)
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        token_rewards, torch.ones_like(mask), groups, norm_adv_by_std_in_grpo=False
    )
    config = MagicMock(clip_ratio=LOW, clip_ratio_low=LOW, clip_ratio_high=HIGH)
    config.get = lambda name, default: DUAL if name == "clip_ratio_c" else default
    config.global_batch_info = {"loss_scale_factor": MOST_TOKENS}

    def loss(weights):
        log_probs = inputs["log_probs"].clone().requires_grad_()
        value, _ = core_algos.compute_policy_loss_vanilla(
            inputs["old_log_probs"], log_probs, advantages, mask, "seq-mean-token-sum-norm", config, weights
        )
        value.backward()
        return {"loss": value.item(), "grad": log_probs.grad.tolist()}

    log_ratio = inputs["old_log_probs"] - inputs["rollout_log_probs"]
    importance, _ = rollout_corr_helper.compute_rollout_correction_weights(
        log_ratio, mask, rollout_is="token", rollout_is_threshold=CAP
    )
    return {
        "advantages": advantages[:, 0].view(PROMPTS, COMPLETIONS).tolist(),
        "policy_loss": loss(None),
        "importance": importance.tolist(),  # 0 outside the mask
        "policy_loss_with_importance": loss(importance),
        "k3": core_algos.kl_penalty_forward(inputs["log_probs"], inputs["base_log_probs"], "k3").tolist(),
    }


def trl_values(inputs: dict[str, torch.Tensor]) -> dict:
    """By TRL: loss_type dr_grpo, its `delta` is the dual clip."""
    from trl import GRPOTrainer

    log_probs = inputs["log_probs"].clone().requires_grad_()
    advantages = (inputs["rewards"] - inputs["rewards"].mean(1, keepdim=True)).flatten()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        loss_type="dr_grpo",
        epsilon_low=LOW,
        epsilon_high=HIGH,
        args=SimpleNamespace(delta=DUAL),
        use_vllm=False,
        model=SimpleNamespace(training=True),
        max_completion_length=MOST_TOKENS,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, **_: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    ids = torch.zeros(len(log_probs), TOKENS, dtype=torch.long)
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": inputs["mask"],
    }
    batch |= {"advantages": advantages, "old_per_token_logps": inputs["old_log_probs"]}
    loss = GRPOTrainer._compute_loss(trainer, None, batch)
    loss.backward()
    return {"policy_loss": {"loss": loss.item(), "grad": log_probs.grad.tolist()}}


def main() -> None:
    inputs = draw()
    settings = {"low": LOW, "high": HIGH, "dual": DUAL, "cap": CAP, "max_tokens": MOST_TOKENS}
    values = {
        "made_by": "tools/make_rl_reference.py",
        "versions": {name: metadata.version(name) for name in ("verl", "trl", "torch")},
        "settings": settings,
        "inputs": {name: tensor.tolist() for name, tensor in inputs.items()},
        "verl": verl_values(inputs),
        "trl": trl_values(inputs),
    }
    Path(sys.argv[1]).write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
