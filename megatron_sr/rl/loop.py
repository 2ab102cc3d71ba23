"""The post-training loop: roll out, reward, train, round, sync, and measure; the same on every rank."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megatron_sr.megatron.main_params import full_main_params
from megatron_sr.rl import checkpoint, numerical_parity, save_hf
from megatron_sr.rl.advantages import dr_grpo_advantages
from megatron_sr.rl.async_rollouts import RolloutQueue
from megatron_sr.rl.drift import k3
from megatron_sr.rl.evaluation import ExactReward
from megatron_sr.rl.loss import Clipping, truncated_importance
from megatron_sr.rl.metrics import MetricsLog, open_log, progress_line
from megatron_sr.rl.mxfp8 import counted
from megatron_sr.rl.response_length import response_lengths
from megatron_sr.rl.rollouts import Batch, Rollouts, gather, generate_share, share_rewards, staleness, sum_counts
from megatron_sr.rl.sampled_evaluation import SampledEvaluation, sampling_for
from megatron_sr.rl.sync import JobSync
from megatron_sr.study.sticking import unchanged_fraction

# What a resumed run must share with the saved one to equal it; a difference is announced, not refused.
SETTINGS = ("lr", "clip_grad", "prompts", "completions", "mini_batches", "max_prompt_tokens", "max_completion_tokens")
STICKING_STEPS = 4  # optimizer steps after which the paper's Table 1 reports sticking


class PostTraining:
    """One job. `iteration` counts finished iterations, `steps` optimizer steps that were not skipped; the weights of iteration i have
    version i + 1.

    args: `options.parser()`'s; policy: `Policy`; rounding: the controller of `apply_param_rounding`; engine: a `RolloutEngine`.
    """

    def __init__(self, args, policy, rounding, engine, task, tokenizer, base: dict[str, torch.Tensor], eval_task=None):
        self.args, self.policy, self.rounding, self.engine = args, policy, rounding, engine
        self.task, self.base, self.pad_id = task, base, tokenizer.pad_token_id
        self.iteration = self.steps = 0
        self.sync = JobSync(engine, policy, rounding, base, args.in_flight)
        limit = args.max_completion_tokens
        # Temperature 1: the loss and the gap are of the distribution that was sampled.
        self.sampling = sampling_for(task, tokenizer, args.completions, temperature=1.0, max_tokens=limit)
        self.eval_task, self.sampled_evaluation = eval_task, None
        if eval_task:
            sampling = sampling_for(eval_task, tokenizer, args.eval_samples, args.eval_temperature, limit)
            examples = eval_task.evaluation_set(args.eval_prompts)
            self.sampled_evaluation = SampledEvaluation(eval_task, examples, sampling)
        self.is_writer = dist.get_rank() == 0
        self.log = open_log(args, f"{rounding.config.mode}-seed{args.seed}") if self.is_writer else MetricsLog(None)
        self.exact = None
        if task.has_exact_reward:
            self.exact = ExactReward(task.evaluation_set(args.eval_prompts), self.pad_id, policy.sequence_multiple)
        self.queue = None
        if args.max_staleness:
            self.queue = RolloutQueue(engine, self._draw, self.sampling, args.max_staleness, args.iterations)

    def run(self) -> None:
        """Load if asked, then iterate to the end, saving on the way. Collective."""
        if self.args.load:
            self._load()
        self.sync(self.iteration + 1)
        if self.args.numerical_parity:
            self._report_operators()
        if self.iteration == 0:
            self._report({"iteration": 0, **self._evaluate(main_params=True, sampled=True)})
        while self.iteration < self.args.iterations:
            started = time.perf_counter()
            record = self._iterate()
            self.iteration += 1
            record |= self.sync(self.iteration + 1)
            last = self.iteration == self.args.iterations
            interval = self.args.main_params_interval
            record |= self._evaluate(
                main_params=last or bool(interval and self.iteration % interval == 0),
                sampled=last or self.iteration % self.args.eval_interval == 0,
            )
            self._report({"iteration": self.iteration, **record, "seconds": time.perf_counter() - started})
            if (record["logprob_gap_mean"] or 0.0) > self.args.max_logprob_gap:
                raise RuntimeError(
                    f"trainer and engine hold the same bits, but their log-probabilities differ by {record['logprob_gap_mean']:.3f} nats "
                    f"a token (--max-logprob-gap {self.args.max_logprob_gap}): they do not compute the same model"
                )
            if self.args.save and (last or (self.args.save_interval and self.iteration % self.args.save_interval == 0)):
                folder = checkpoint.save(self.args.save, self.policy, self._loop_state())
                if self.is_writer and not self.args.quiet:
                    print(f"saved {folder}", flush=True)
        if self.queue:
            self.queue.close()
        self.log.close()
        if self.args.save_hf:
            target, dtype = self.args.save_hf if self.is_writer else None, self.policy.dtype
            save_hf.write(target, self.policy.export(), self.args.model, dtype=dtype)

    def _draw(self, iteration: int) -> Batch:
        return Batch.draw(self.task, self.args.seed, iteration, self.args.prompts, self.args.completions)

    def _roll_out(self) -> tuple[Batch, Rollouts]:
        """This iteration's rollouts; with --max-staleness, those that the queue has made or is making. Collective."""
        if self.queue:
            self.queue.advance(self.iteration)
            batch, groups = self.queue.take(self.iteration)
        else:
            batch = self._draw(self.iteration)
            groups = generate_share(self.engine, batch, self.sampling)
        return batch, gather(batch, groups, self.pad_id, self.policy.sequence_multiple)

    def _iterate(self) -> dict:
        """Rollouts, rewards, and one pass of optimizer steps over them."""
        args, policy = self.args, self.policy
        batch, rollouts = self._roll_out()
        ages = staleness(rollouts, self.iteration + 1, args.max_staleness)
        rewards = torch.tensor(share_rewards(self.task, batch.examples, rollouts.completions))
        mini_batches = batch.shuffle.view(args.mini_batches, -1)
        mine = mini_batches.chunk(policy.data_parallel_size, dim=1)[policy.data_parallel_rank]
        local = self._local_batch(rollouts, rewards, mine.flatten())
        losses, unchanged, grad_norm = [], [], None
        size = mine.shape[1] * args.completions
        for i in range(args.mini_batches):
            piece = {name: value[i * size : (i + 1) * size] for name, value in local.items()}
            loss, norm = policy.train_step(
                {k: piece[k] for k in ("tokens", "old_log_probs", "advantages", "mask", "importance") if k in piece},
                args.micro_batch_size,
                args.max_completion_tokens,
                Clipping(args.clip_low, args.clip_high, args.dual_clip),
            )
            losses.append(loss)
            if norm is None:  # skipped: FP16 overflow
                continue
            self.steps, grad_norm = self.steps + 1, norm
            if self.steps <= STICKING_STEPS:
                counting = counted(policy.export(), self.rounding.mxfp8)
                unchanged.append([self.steps, unchanged_fraction(counting, self.base)])
        record = {
            "sampled_reward": rewards.mean().item(),
            "completion_tokens": rollouts.mask.sum().item() / rewards.numel(),
            "response_length": response_lengths(
                rollouts.mask.sum(-1), None if self.task.ignore_eos else rollouts.truncated
            ),
            "loss": sum(losses) / len(losses),
            "grad_norm": grad_norm,
            "rollout_version": rollouts.versions.min().item(),
            **self._token_statistics(local),
        }
        if failures := self.task.failures():
            record["reward_failures"] = sum_counts(failures)
        if policy.dtype == torch.float16:
            record |= {"skipped_steps": policy.skipped_steps, "loss_scale": policy.loss_scale}
        if self.queue:
            record |= {"staleness": ages, "rollouts_asked_again": self.queue.aborted}
        return record | ({"unchanged_after_steps": unchanged} if unchanged else {})

    def _local_batch(self, rollouts: Rollouts, rewards: torch.Tensor, prompts: torch.Tensor) -> dict[str, torch.Tensor]:
        """This rank's sequences, flattened to [B, ...], with log-probabilities of the policy before the update and of the base.

        old_log_probs are those of the policy that drew the tokens: the trainer's own where it is that policy; the engine's, who
        drew them with older weights, with --max-staleness. With --importance-ratio-cap the old policy is always the trainer's present one,
        and importance weights lead from the engine's to it (decoupled, Hilton et al. 2022).
        """
        advantages = dr_grpo_advantages(rewards)
        tokens = rollouts.tokens[prompts].flatten(0, 1)
        current = self.policy.log_probs(tokens, self.args.micro_batch_size)
        with self.policy.base_weights():
            base = self.policy.log_probs(tokens, self.args.micro_batch_size)
        drawn, mask = rollouts.log_probs[prompts].flatten(0, 1), rollouts.mask[prompts].flatten(0, 1)
        cap = self.args.importance_ratio_cap
        importance = {} if cap is None else {"importance": truncated_importance(current, drawn, mask, cap)}
        return importance | {
            "tokens": tokens,
            "mask": mask,
            "fresh": (rollouts.versions[prompts] == self.iteration + 1).flatten(),
            "rollout_log_probs": drawn,
            "current_log_probs": current,
            "old_log_probs": drawn if self.queue and cap is None else current,
            "base_log_probs": base,
            "advantages": advantages[prompts].flatten(),
        }

    def _token_statistics(self, batch: dict[str, torch.Tensor]) -> dict:
        """Over all ranks' tokens: trainer-engine logprob gap (mean, max, share of equal bits) and drift from the base (k3).

        The gap is that of two implementations with equal weights: only tokens drawn by the present weights count, None without any.
        """
        mask = batch["mask"].bool()
        fresh = mask & batch["fresh"][:, None]
        gap = (batch["current_log_probs"] - batch["rollout_log_probs"]).abs()[fresh]
        drift = k3(batch["current_log_probs"], batch["base_log_probs"])[mask]
        sums = [gap.sum(), (gap == 0).sum(), fresh.sum(), drift.sum(), mask.sum()]
        sums = torch.tensor(sums, dtype=torch.float64)
        largest = gap.max() if gap.numel() else torch.zeros(())
        dist.all_reduce(sums, group=self.policy.data_parallel_group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.policy.data_parallel_group)
        gap_sum, equal, compared, drift_sum, tokens = sums.tolist()
        capped = {}
        if "importance" in batch:
            at_cap = (batch["importance"][mask] >= self.args.importance_ratio_cap).sum().double()
            dist.all_reduce(at_cap, group=self.policy.data_parallel_group)
            capped["importance_capped"] = at_cap.item() / tokens
        return capped | {
            "logprob_gap_mean": gap_sum / compared if compared else None,
            "logprob_gap_max": largest.item() if compared else None,
            "logprob_bit_exact": equal / compared if compared else None,
            "drift_k3": drift_sum / tokens,
        }

    def _report_operators(self) -> None:
        """Which operators of trainer and engine give other bits for equal input; collective. See `numerical_parity`."""
        batch = self._draw(self.iteration)
        rows = numerical_parity.compare_operators(self.policy, self.engine, [e.prompt_ids for e in batch.examples[:8]])
        self._report({"iteration": self.iteration, "operators": rows})

    def close_tasks(self) -> None:
        """End what the tasks have running in this process."""
        for task in filter(None, (self.task, self.eval_task)):
            task.close()

    def _evaluate(self, main_params: bool, sampled: bool) -> dict:
        record = {}
        if sampled and self.sampled_evaluation:
            record["evaluation"] = self.sampled_evaluation(self.engine)
        if self.exact:
            record["exact_reward"] = self.exact.of_policy(self.policy, self.args.micro_batch_size)
            if main_params:
                weights = dict(self.policy.export(full_main_params(self.policy.optimizer)))
                if self.is_writer:
                    record["exact_reward_main_params"] = self.exact.of_weights(self.policy.hf_config, weights)
        return record

    def _report(self, record: dict) -> None:
        if not self.is_writer:
            return
        record = {"rounding": self.rounding.config.mode, "seed": self.args.seed, **record}
        self.log.write(record)
        if "operators" in record and not self.args.quiet:
            print(numerical_parity.operator_table(record["operators"]), flush=True)
        elif not self.args.quiet:
            print(progress_line(record, self.args.iterations), flush=True)

    def _loop_state(self) -> dict:
        settings = {name: getattr(self.args, name) for name in SETTINGS}
        return {
            "iteration": self.iteration,
            "steps": self.steps,
            "skipped_steps": self.policy.skipped_steps,
            "dtype": _name(self.policy.dtype),
            "seed": self.args.seed,
            "task": self.task.name,
            "settings": settings,
            "parity": self.sync.parity,
            "hf_config": self.policy.hf_config.to_dict(),
        }

    def _load(self) -> None:
        state = checkpoint.read_loop_state(self.args.load)
        for name, ours in (("seed", self.args.seed), ("task", self.task.name)):
            if state[name] != ours:
                raise ValueError(
                    f"--load {self.args.load} was saved with --{name} {state[name]}, this job has {ours}; use the same"
                )
        dtype, ours = state.get("dtype", "bfloat16"), _name(self.policy.dtype)
        if dtype != ours:
            raise ValueError(
                f"--load {self.args.load} was saved in {dtype}, this job trains {ours}; {'leave out' if self.args.fp16 else 'add'} --fp16"
            )
        changed = {
            n: (old, getattr(self.args, n)) for n, old in state["settings"].items() if old != getattr(self.args, n)
        }
        if changed and self.is_writer:
            listed = ", ".join(f"--{name.replace('_', '-')} {old} -> {new}" for name, (old, new) in changed.items())
            print(f"--load {self.args.load}: goes on with other settings than the saved run: {listed}", flush=True)
        checkpoint.load(self.args.load, self.policy, self.rounding.config)
        self.iteration, self.sync.parity = state["iteration"], state["parity"]
        self.policy.skipped_steps = state.get("skipped_steps", 0)  # older checkpoints: BF16, which skips none
        self.steps = state.get("steps", self.iteration * self.args.mini_batches)
        if self.is_writer:
            self.log.rewind(self.iteration, rounding=self.rounding.config.mode, seed=self.args.seed)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
