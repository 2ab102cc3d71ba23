"""What the policy makes of a step that Megatron skips; Megatron itself is a stand-in (its FP16 overflow: test_megatron_sites.py)."""

from types import SimpleNamespace

import pytest
import torch

from megatron_sr.rl import policy as module
from megatron_sr.rl.loss import Clipping
from megatron_sr.rl.policy import Policy


def stand_in(monkeypatch, dtype, steps):
    """A Policy on one rank whose optimizer gives these results, one a step."""
    monkeypatch.setattr(module.dist, "all_reduce", lambda *_, **__: None)
    results = iter(steps)
    policy = object.__new__(Policy)
    policy.dtype, policy.skipped_steps, policy.is_last_stage = dtype, 0, True
    policy.layout, policy.data_parallel_group, policy.data_parallel_size = SimpleNamespace(pipeline=1), None, 1
    policy.ddp = SimpleNamespace(zero_grad_buffer=lambda: None)
    policy.optimizer = SimpleNamespace(zero_grad=lambda: None, step=lambda: next(results), get_loss_scale=lambda: 8.0)
    policy._run = lambda micro_batches, loss_of, forward_only: [
        loss_of(batch["old_log_probs"], batch)[1] for batch in micro_batches
    ]
    return policy


def step(policy):
    batch = {"tokens": torch.zeros(2, 4), "old_log_probs": torch.zeros(2, 3), "mask": torch.ones(2, 3)}
    batch |= {"advantages": torch.tensor([1.0, 3.0]), "importance": torch.full((2, 3), 0.5)}
    return policy.train_step(batch, micro_batch_size=1, max_tokens=6, clipping=Clipping())


def test_fp16_counts_skipped_steps_and_goes_on(monkeypatch):
    policy = stand_in(monkeypatch, torch.float16, [(False, None, None), (True, 0.25, None), (False, None, None)])
    # By hand: ratio 1, weight 0.5, three tokens of budget 6 a sequence: losses -0.25 and -0.75, mean -0.5.
    assert [step(policy) for _ in range(3)] == [(-0.5, None), (-0.5, 0.25), (-0.5, None)]
    assert (policy.skipped_steps, policy.loss_scale) == (2, 8.0)


def test_bf16_has_no_loss_scale_to_lower_so_a_skipped_step_is_an_error(monkeypatch):
    policy = stand_in(monkeypatch, torch.bfloat16, [(False, None, None)])
    with pytest.raises(RuntimeError, match="Megatron skipped the optimizer step"):
        step(policy)
