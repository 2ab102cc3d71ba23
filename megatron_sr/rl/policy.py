"""The trainer's policy: a Megatron GPT model under DDP with its optimizer; log-probabilities and training steps in any layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_sr.megatron.model import Layout, build_optimizer, gpt_model, transformer_config, wrap_ddp
from megatron_sr.rl.loss import Clipping, policy_loss
from megatron_sr.rollout.export import export_hf, load_hf


class Policy:
    """Built on every rank after `initialize_model_parallel`, from a Hugging Face config and state dict (base weights).

    dtype: of the model params, BF16 or FP16; FP16 brings Megatron's dynamic loss scale, whose settings are `loss_scale`
    (see `build_optimizer`). skipped_steps: how many optimizer steps it skipped because gradients overflowed.
    """

    def __init__(
        self,
        hf_config,
        state_dict: dict[str, torch.Tensor],
        layout: Layout,
        lr: float,
        clip_grad: float,
        dtype: torch.dtype = torch.bfloat16,
        **loss_scale,
    ):
        from megatron.core import parallel_state

        self.hf_config, self.layout = hf_config, layout
        self.config = transformer_config(hf_config, layout, dtype)
        self.gpt = gpt_model(hf_config, self.config)
        load_hf(self.gpt, state_dict, hf_config)
        self.ddp = wrap_ddp(self.gpt, self.config)
        self.optimizer = build_optimizer(self.ddp, self.config, lr=lr, clip_grad=clip_grad, **loss_scale)
        self.dtype, self.skipped_steps = dtype, 0
        self.base_params = [p.detach().clone() for p in self.gpt.parameters()]
        self.data_parallel_group = parallel_state.get_data_parallel_group()
        self.data_parallel_rank = parallel_state.get_data_parallel_rank()
        self.data_parallel_size = parallel_state.get_data_parallel_world_size()
        self.is_last_stage = parallel_state.is_pipeline_last_stage()
        self.token_log_probs = _vocab_parallel_log_probs
        # With sequence parallelism every sequence is split over the tensor-parallel ranks.
        self.sequence_multiple = layout.tensor if self.config.sequence_parallel else 1

    def export(self, tensors=None) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor) pairs on every rank; collective. See `rollout.export.export_hf`."""
        return export_hf(self.gpt, self.hf_config, tensors)

    @contextlib.contextmanager
    def base_weights(self):
        """Within the context the model holds the base's weights; afterwards the policy's very bits again."""
        current = [p.detach().clone() for p in self.gpt.parameters()]
        try:
            self._set_params(self.base_params)
            yield
        finally:
            self._set_params(current)

    @torch.no_grad()
    def _set_params(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self.gpt.parameters(), values):
            parameter.copy_(value)

    @torch.no_grad()
    def log_probs(self, tokens: torch.Tensor, micro_batch_size: int) -> torch.Tensor:
        """log p(tokens[:, 1:]) -> [batch, S] FP32 on every rank of the model-parallel group. tokens [batch, S + 1]."""

        def collect(output, non_loss_data):
            return output

        # The pipeline schedules want micro-batches of one size: repeat the last sequence to fill the last one.
        size = min(micro_batch_size, len(tokens))
        padding = -len(tokens) % size
        padded = torch.cat([tokens, tokens[-1:].expand(padding, -1)]) if padding else tokens
        outputs = self._run(
            [{"tokens": t} for t in padded.split(size)], collect, forward_only=True, collect_non_loss_data=True
        )
        shape = (len(padded), tokens.shape[1] - 1)
        result = (
            torch.cat(outputs) if self.is_last_stage else torch.empty(shape, dtype=torch.float32, device=tokens.device)
        )
        return self._from_last_stage(result)[: len(tokens)]

    def train_step(
        self, batch: dict[str, torch.Tensor], micro_batch_size: int, max_tokens: int, clipping: Clipping
    ) -> tuple[float, float | None]:
        """One optimizer step on this rank's share of a mini-batch; returns (loss averaged over data-parallel ranks, gradient norm).

        batch: tokens [B, S + 1]; old_log_probs, mask [B, S]; advantages [B]; optionally importance [B, S] (see `policy_loss`).
        A norm of None: the gradients overflowed in FP16, so Megatron skipped the step, and lowers the loss scale.
        Raises RuntimeError when it skips a step in BF16, which has no loss scale to lower.
        """

        def loss_of(output, micro_batch):
            loss = policy_loss(
                output,
                micro_batch["old_log_probs"],
                micro_batch["advantages"],
                micro_batch["mask"],
                token_budget=len(output) * max_tokens,
                clipping=clipping,
                importance=micro_batch.get("importance"),
            )
            return loss, {"loss": loss.detach()}

        pieces = {name: value.split(micro_batch_size) for name, value in batch.items()}
        micro_batches = [dict(zip(pieces, values)) for values in zip(*pieces.values())]
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        outputs = self._run(micro_batches, loss_of, forward_only=False)
        success, grad_norm, _ = self.optimizer.step()
        if not success:
            if self.dtype != torch.float16:
                raise RuntimeError("Megatron skipped the optimizer step: the gradients overflowed or are not finite")
            self.skipped_steps += 1
        loss = torch.stack([o["loss"] for o in outputs]).mean() if self.is_last_stage else torch.zeros(())
        loss = self._from_last_stage(loss)
        dist.all_reduce(loss, group=self.data_parallel_group)
        return loss.item() / self.data_parallel_size, float(grad_norm or 0.0) if success else None

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before the backward pass; 1.0 in BF16."""
        return float(self.optimizer.get_loss_scale())

    def _run(self, micro_batches: list[dict], consume, forward_only: bool, **kwargs) -> list:
        """Megatron's pipeline schedule over `micro_batches`; `consume(log_probs, micro_batch)` runs on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        sequence = micro_batches[0]["tokens"].shape[1] - 1

        def forward_step(batches, model):
            batch = next(batches)
            output = self._forward(model, batch["tokens"])
            if "collect_non_loss_data" in kwargs:
                return output, consume
            return output, lambda out: consume(out, batch)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=self.ddp,
            num_microbatches=len(micro_batches),
            seq_length=sequence,
            micro_batch_size=len(micro_batches[0]["tokens"]),
            forward_only=forward_only,
            **kwargs,
        )

    def _forward(self, model, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [B, S] on the last stage, hidden states on the others."""
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:]
        sequence = inputs.shape[1]
        positions = torch.arange(sequence, device=tokens.device).expand(len(tokens), -1)
        # Right padding needs no mask of its own: causal attention keeps it from every earlier position.
        causal = torch.ones(1, 1, sequence, sequence, dtype=torch.bool, device=tokens.device).triu(1)
        output = model(inputs, positions, causal)
        if not self.is_last_stage:
            return output
        return self.token_log_probs(output, targets.contiguous())

    def _from_last_stage(self, value: torch.Tensor) -> torch.Tensor:
        if self.layout.pipeline == 1:
            return value
        from megatron.core import parallel_state

        value = value.contiguous()
        dist.broadcast(
            value,
            parallel_state.get_pipeline_model_parallel_last_rank(),
            parallel_state.get_pipeline_model_parallel_group(),
        )
        return value


def _vocab_parallel_log_probs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """log p(targets) [B, S], FP32, of logits [B, S, vocabulary / TP]."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return -vocab_parallel_cross_entropy(logits.float(), targets)
