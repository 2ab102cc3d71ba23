"""The post-training loop: roll out, reward, train, round, sync, and measure; the same on every rank."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megatron_sr.megatron.main_params import full_main_params
from megatron_sr.rl import checkpoint
from megatron_sr.rl.advantages import dr_grpo_advantages
from megatron_sr.rl.drift import k3
from megatron_sr.rl.evaluation import ExactReward
from megatron_sr.rl.loss import Clipping
from megatron_sr.rl.metrics import MetricsLog, progress_line
from megatron_sr.rl.rollouts import Rollouts, generate, prompt_seeds
from megatron_sr.rl.tasks import iteration_generator
from megatron_sr.rollout.engine import SamplingConfig
from megatron_sr.rollout.mxfp8_export import export_mxfp8
from megatron_sr.study.sticking import unchanged_fraction

# What a resumed run must share with the saved one to equal it; a difference is announced, not refused.
SETTINGS = ("lr", "clip_grad", "prompts", "completions", "mini_batches", "max_prompt_tokens", "max_completion_tokens")
STICKING_STEPS = 4  # optimizer steps after which the paper's Table 1 reports sticking


class PostTraining:
    """One job. `iteration` counts finished iterations; the weights of iteration i have version i + 1.

    args: `options.parser()`'s; policy: `Policy`; rounding: the controller of `apply_param_rounding`; engine: a `RolloutEngine`.
    """

    def __init__(self, args, policy, rounding, engine, task, tokenizer, base: dict[str, torch.Tensor]):
        self.args, self.policy, self.rounding, self.engine = args, policy, rounding, engine
        self.task, self.base, self.pad_id = task, base, tokenizer.pad_token_id
        self.iteration = 0
        self.parity = {"syncs": 0, "tensors": 0, "mismatched_tensors": 0}
        self.sampling = SamplingConfig(
            n=args.completions,
            temperature=1.0,  # the loss and the gap are of the distribution that was sampled
            max_tokens=args.max_completion_tokens,
            min_tokens=args.max_completion_tokens if task.ignore_eos else 0,
            ignore_eos=task.ignore_eos,
            stop_token_ids=() if task.ignore_eos else (tokenizer.eos_token_id,),
        )
        self.is_writer = dist.get_rank() == 0
        self.log = MetricsLog(args.metrics if self.is_writer else None)
        self.exact = None
        if task.has_exact_reward:
            self.exact = ExactReward(task.evaluation_set(args.eval_prompts), self.pad_id, policy.sequence_multiple)

    def run(self) -> None:
        """Load if asked, then iterate to the end, saving on the way. Collective."""
        if self.args.load:
            self._load()
        self._sync()
        if self.iteration == 0:
            self._report({"iteration": 0, **self._evaluate(main_params=True)})
        while self.iteration < self.args.iterations:
            started = time.perf_counter()
            record = self._iterate()
            self.iteration += 1
            record |= {"sync_seconds": self._sync(), "parity": dict(self.parity)}
            last = self.iteration == self.args.iterations
            interval = self.args.main_params_interval
            record |= self._evaluate(main_params=last or bool(interval and self.iteration % interval == 0))
            self._report({"iteration": self.iteration, **record, "seconds": time.perf_counter() - started})
            if record["logprob_gap_mean"] > self.args.max_logprob_gap:
                raise RuntimeError(
                    f"trainer and engine hold the same bits, but their log-probabilities differ by {record['logprob_gap_mean']:.3f} nats "
                    f"a token (--max-logprob-gap {self.args.max_logprob_gap}): they do not compute the same model"
                )
            if self.args.save and (last or (self.args.save_interval and self.iteration % self.args.save_interval == 0)):
                folder = checkpoint.save(self.args.save, self.policy, self._loop_state())
                if self.is_writer and not self.args.quiet:
                    print(f"saved {folder}", flush=True)

    def _iterate(self) -> dict:
        """Rollouts, rewards, and one pass of optimizer steps over them."""
        args, policy = self.args, self.policy
        generator = iteration_generator(args.seed, self.iteration)
        examples = self.task.sample(args.prompts, generator)
        seeds = prompt_seeds(args.seed, self.iteration, args.prompts, args.completions)
        rollouts = generate(self.engine, examples, self.sampling, seeds, self.pad_id, policy.sequence_multiple)
        rewards = torch.tensor(
            [[self.task.reward(e, c) for c in group] for e, group in zip(examples, rollouts.completions)]
        )
        mini_batches = torch.randperm(args.prompts, generator=generator).view(args.mini_batches, -1)
        mine = mini_batches.chunk(policy.data_parallel_size, dim=1)[policy.data_parallel_rank]
        batch = self._local_batch(rollouts, rewards, mine.flatten())
        losses, unchanged = [], []
        size = mine.shape[1] * args.completions
        for i in range(args.mini_batches):
            piece = {name: value[i * size : (i + 1) * size] for name, value in batch.items()}
            loss, grad_norm = policy.train_step(
                {k: piece[k] for k in ("tokens", "old_log_probs", "advantages", "mask")},
                args.micro_batch_size,
                args.max_completion_tokens,
                Clipping(args.clip_low, args.clip_high, args.dual_clip),
            )
            losses.append(loss)
            step = self.iteration * args.mini_batches + i + 1
            if step <= STICKING_STEPS:
                unchanged.append([step, unchanged_fraction(policy.export(), self.base)])
        record = {
            "sampled_reward": rewards.mean().item(),
            "completion_tokens": rollouts.mask.sum().item() / rewards.numel(),
            "loss": sum(losses) / len(losses),
            "grad_norm": grad_norm,
            "rollout_version": rollouts.version,
            **self._token_statistics(batch),
        }
        return record | ({"unchanged_after_steps": unchanged} if unchanged else {})

    def _local_batch(self, rollouts: Rollouts, rewards: torch.Tensor, prompts: torch.Tensor) -> dict[str, torch.Tensor]:
        """This rank's sequences, flattened to [B, ...], with log-probabilities of the old policy and of the base."""
        advantages = dr_grpo_advantages(rewards)
        tokens = rollouts.tokens[prompts].flatten(0, 1)
        old = self.policy.log_probs(tokens, self.args.micro_batch_size)
        with self.policy.base_weights():
            base = self.policy.log_probs(tokens, self.args.micro_batch_size)
        return {
            "tokens": tokens,
            "mask": rollouts.mask[prompts].flatten(0, 1),
            "rollout_log_probs": rollouts.log_probs[prompts].flatten(0, 1),
            "old_log_probs": old,
            "base_log_probs": base,
            "advantages": advantages[prompts].flatten(),
        }

    def _token_statistics(self, batch: dict[str, torch.Tensor]) -> dict:
        """Trainer-engine logprob gap (mean and max of |difference|) and drift from the base (k3), over all ranks' tokens."""
        mask = batch["mask"].bool()
        gap = (batch["old_log_probs"] - batch["rollout_log_probs"]).abs()[mask]
        drift = k3(batch["old_log_probs"], batch["base_log_probs"])[mask]
        sums = torch.tensor([gap.sum(), drift.sum(), mask.sum()], dtype=torch.float64)
        largest = gap.max()
        dist.all_reduce(sums, group=self.policy.data_parallel_group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.policy.data_parallel_group)
        tokens = sums[2].item()
        return {
            "logprob_gap_mean": sums[0].item() / tokens,
            "logprob_gap_max": largest.item(),
            "drift_k3": sums[1].item() / tokens,
        }

    def _sync(self) -> float:
        """Hand the trainer's bits to every rank's engine and verify them; returns the seconds it took.

        Raises RuntimeError when a tensor read back from an engine differs, or when the ranks' trainers disagree.
        """
        started = time.perf_counter()
        report = self.engine.update_weights(self._rollout_tensors(), version=self.iteration + 1)
        reports: list = [None] * dist.get_world_size()
        dist.all_gather_object(reports, report)
        self.parity["syncs"] += 1
        self.parity["tensors"] += sum(r.tensors for r in reports)
        self.parity["mismatched_tensors"] += sum(len(r.mismatched) for r in reports)
        for rank, other in enumerate(reports):
            if other.mismatched:
                raise RuntimeError(
                    f"weights version {report.version}: {len(other.mismatched)} tensors of rank {rank}'s engine differ from the "
                    f"trainer's, first {other.mismatched[0]}; the engine refuses to generate"
                )
            if other.digest != report.digest:
                raise RuntimeError(
                    f"weights version {report.version}: the trainer's weights differ between ranks 0 and {rank}"
                )
        return time.perf_counter() - started

    def _rollout_tensors(self):
        """What the engine is given: BF16 weights, or the trainer's MXFP8 codes and scales."""
        if self.rounding.mxfp8 is None:
            return self.policy.export()
        return export_mxfp8(self.policy.gpt, self.policy.hf_config, self.rounding.mxfp8)

    def _evaluate(self, main_params: bool) -> dict:
        record = {}
        if self.iteration:
            record["unchanged"] = unchanged_fraction(self.policy.export(), self.base)
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
        if not self.args.quiet:
            print(progress_line(record, self.args.iterations), flush=True)

    def _loop_state(self) -> dict:
        settings = {name: getattr(self.args, name) for name in SETTINGS}
        return {
            "iteration": self.iteration,
            "seed": self.args.seed,
            "task": self.task.name,
            "settings": settings,
            "parity": self.parity,
        }

    def _load(self) -> None:
        state = checkpoint.read_loop_state(self.args.load)
        for name, ours in (("seed", self.args.seed), ("task", self.task.name)):
            if state[name] != ours:
                raise ValueError(
                    f"--load {self.args.load} was saved with --{name} {state[name]}, this job has {ours}; use the same"
                )
        changed = {
            n: (old, getattr(self.args, n)) for n, old in state["settings"].items() if old != getattr(self.args, n)
        }
        if changed and self.is_writer:
            listed = ", ".join(f"--{name.replace('_', '-')} {old} -> {new}" for name, (old, new) in changed.items())
            print(f"--load {self.args.load}: goes on with other settings than the saved run: {listed}", flush=True)
        checkpoint.load(self.args.load, self.policy)
        self.iteration, self.parity = state["iteration"], state["parity"]
