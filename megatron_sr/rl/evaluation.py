"""The exact expected reward of a task whose examples have one right answer, and the FP32 main params' own score.

Where only one completion is right, E[reward | prompt] = p(answer | prompt): no sampling noise hides small steps.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_sr.rl.tasks import Example


class ExactReward:
    """Mean of p(answer | prompt) over a fixed set of examples, by the trainer's own BF16 forward pass."""

    def __init__(self, examples: list[Example], pad_id: int, multiple: int):
        self.tokens, self.mask = answer_batch(examples, pad_id, multiple)

    @torch.no_grad()
    def of_policy(self, policy, micro_batch_size: int) -> float:
        """Collective: each data-parallel rank scores its share."""
        share = slice(policy.data_parallel_rank, None, policy.data_parallel_size)
        log_probs = policy.log_probs(self.tokens[share], micro_batch_size)
        total = (log_probs * self.mask[share]).sum(1).exp().sum().double()
        dist.all_reduce(total, group=policy.data_parallel_group)
        return total.item() / len(self.tokens)

    @torch.no_grad()
    def of_weights(self, hf_config, state_dict: dict[str, torch.Tensor]) -> float:
        """The score of `state_dict` (Hugging Face names) in FP32, by transformers' own model of `hf_config`."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
        from transformers.utils import logging

        logging.disable_progress_bar()
        # from_pretrained, not load_state_dict: it also stacks the experts, as transformers keeps them in memory.
        cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
        model = cls.from_pretrained(None, config=hf_config, state_dict=state_dict, dtype=torch.float32)
        log_probs = model.eval()(input_ids=self.tokens[:, :-1], use_cache=False).logits.log_softmax(-1)
        picked = log_probs.gather(-1, self.tokens[:, 1:, None]).squeeze(-1)
        return (picked * self.mask).sum(1).exp().mean().item()


def answer_batch(examples: list[Example], pad_id: int, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [B, S + 1] of prompt + answer, mask [B, S] of the positions that predict the answer)."""
    longest = max(len(e.prompt_ids) + len(e.answer_ids) for e in examples)
    length = -(-(longest - 1) // multiple) * multiple
    tokens = torch.full((len(examples), length + 1), pad_id, dtype=torch.int64)
    mask = torch.zeros(len(examples), length)
    for i, e in enumerate(examples):
        sequence = e.prompt_ids + e.answer_ids
        tokens[i, : len(sequence)] = torch.tensor(sequence)
        mask[i, len(e.prompt_ids) - 1 : len(sequence) - 1] = 1
    return tokens, mask
