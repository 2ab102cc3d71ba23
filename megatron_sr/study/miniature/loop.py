"""One run of the miniature RL loop: Dr. GRPO on verifiable rewards, FP32 compute, rounded weights.

The random numbers of prompts, sampling and shuffling depend on (seed, iteration, purpose) alone, never on what happened before: runs
of different formats with one seed are paired.
"""

from __future__ import annotations

import time
from collections import deque

import torch

from megatron_sr.noise import Noise
from megatron_sr.rl.advantages import dr_grpo_advantages
from megatron_sr.rl.drift import k3
from megatron_sr.rl.loss import Clipping, policy_loss
from megatron_sr.rounding import round_to_
from megatron_sr.study.miniature import bases
from megatron_sr.study.miniature.loss_scale import DynamicLossScale
from megatron_sr.study.miniature.model import Model
from megatron_sr.study.miniature.settings import RunSettings
from megatron_sr.study.miniature.weights import WeightRounder, on_grid

# Streams of the noise; MXFP8's second rounding takes the one after. 0 and 1 are the product's, see noise.py.
STREAM_STEP, STREAM_FORWARD, STREAM_BACKWARD, STREAM_GRADIENT = 0, 2, 4, 6
STICKING_STEPS = 4
BETAS, EPS = (0.9, 0.999), 1e-8
EVALUATION_SEED = 99_991
DRIFT_PROMPTS, DRIFT_COMPLETIONS = 64, 8


class Adam:
    """Adam without decay on a flat FP32 buffer, in place (Kingma & Ba 2015, algorithm 1)."""

    def __init__(self, params: torch.Tensor, lr: float):
        self.params, self.lr, self.steps = params, lr, 0
        self.m, self.v = torch.zeros_like(params), torch.zeros_like(params)

    def step(self, grad: torch.Tensor) -> None:
        self.steps += 1
        self.m.mul_(BETAS[0]).add_(grad, alpha=1 - BETAS[0])
        self.v.mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
        denominator = (self.v / (1 - BETAS[1] ** self.steps)).sqrt_().add_(EPS)
        self.params.addcdiv_(self.m, denominator, value=-self.lr / (1 - BETAS[0] ** self.steps))


class MiniatureRun:
    """The state of one run. `execute` gives the fields of `results.Run` that the run itself knows."""

    def __init__(self, settings: RunSettings, base: torch.Tensor | None = None):
        """base: [numel] FP32, instead of the one that settings.base names."""
        self.settings, self.task = settings, settings.task
        self.config = bases.config_of(self.task)
        base = bases.load(settings.base) if base is None else base
        self.main = on_grid(base, self.config, settings.grid)
        self.adam = Adam(self.main, settings.lr)
        self.trainer = Model(self.config, backward_weights=settings.scheme == "backward")
        self.policy = Model(self.config)  # generates and is evaluated
        self.base = Model(self.config)
        self.base.flat.copy_(self.main)
        self.scored = Model(self.config)  # the FP32 main params
        self.loss_scale = DynamicLossScale(settings.initial_loss_scale) if settings.format == "fp16" else None
        self.skipped, self.forwards = 0, 0
        self._make_rounders()
        self._round_weights()
        self.start = self.policy.flat.clone()
        self.versions = deque([self.start.clone()], maxlen=settings.staleness + 1)
        self.evaluation = self._evaluation_set()

    def _make_rounders(self) -> None:
        s = self.settings

        def rounder(stochastic: bool, stream: int = STREAM_STEP) -> WeightRounder:
            return WeightRounder(self.main, self.config, s.format, s.seed if stochastic else None, stream)

        stochastic = s.rounding == "stochastic"
        stream = STREAM_FORWARD if s.scheme == "fresh" else STREAM_STEP
        self._trainer_rounder = rounder(stochastic and s.scheme != "rollout-only", stream)
        self._policy_rounder = rounder(stochastic and s.scheme != "trainer-only", stream)
        self._backward_rounder = rounder(stochastic, STREAM_BACKWARD) if s.scheme == "backward" else None
        # Schemes whose trainer and rollouts hold the same bits
        self._shared = s.scheme not in ("fresh", "rollout-only", "trainer-only")

    def _noise_step(self) -> int:
        """The step in the noise's counter: of the optimizer, of the forward pass, or always 0."""
        if self.settings.scheme == "fixed":
            return 0
        if self.settings.scheme == "fresh":
            self.forwards += 1
            return self.forwards
        return self.adam.steps

    def _round_trainer(self) -> None:
        self._trainer_rounder.round_(self.trainer.flat, self._noise_step())
        if self._backward_rounder:
            self._backward_rounder.round_(self.trainer.backward_flat, self.adam.steps)

    def _round_policy(self) -> None:
        if self._shared:
            self.policy.flat.copy_(self.trainer.flat)
        else:
            self._policy_rounder.round_(self.policy.flat, self._noise_step())

    def _round_weights(self) -> None:
        with torch.no_grad():
            self._round_trainer()
            self._round_policy()

    def _generator(self, iteration: int, purpose: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.settings.seed * 1_000_003 + iteration) * 16 + purpose)

    def _evaluation_set(self):
        prompts = self.task.prompts(self.task.evaluation_prompts, torch.Generator().manual_seed(EVALUATION_SEED))
        return prompts, *self.task.right_completions(prompts)

    @torch.no_grad()
    def exact_reward(self, model: Model) -> float:
        """E[reward] over the fixed evaluation prompts: the total probability of the right completions."""
        prompts, completions, counts = self.evaluation
        total = 0.0
        for piece in torch.arange(len(prompts)).split(max(1, 8192 // completions[0].numel())):
            log_probs = model.log_probs(prompts[piece], completions[piece]).sum(-1)
            total += (log_probs.exp() * counts[piece]).sum().double().item()
        return total / len(prompts)

    @torch.no_grad()
    def drift(self) -> float:
        """k3 estimate of KL(policy || base) a token, on fixed prompts and with the same random numbers at every call."""
        generator = torch.Generator().manual_seed(EVALUATION_SEED + 1 + self.settings.seed)
        prompts = self.task.prompts(DRIFT_PROMPTS, generator)
        tokens, log_probs = self.policy.generate(prompts, DRIFT_COMPLETIONS, self.task.completion_length, generator)
        return k3(log_probs, self.base.log_probs(prompts, tokens)).double().mean().item()

    def iterate(self, iteration: int) -> float:
        """Rollouts, rewards, one pass of optimizer steps. Returns the mean sampled reward."""
        s, length = self.settings, self.task.completion_length
        prompts = self.task.prompts(s.prompts, self._generator(iteration, 1))
        current = self.policy.flat.clone()
        stale = len(self.versions) > 1
        if stale:
            self.policy.flat.data.copy_(self.versions[0])
        tokens, old = self.policy.generate(prompts, s.completions, length, self._generator(iteration, 2))
        if stale:
            self.policy.flat.data.copy_(current)
        rewards = self.task.reward(prompts, tokens)
        advantages = dr_grpo_advantages(rewards)
        if not self._shared and not stale:  # the loss's ratio is of the trainer's own policy, as in the main job
            with torch.no_grad():
                if s.scheme == "fresh":
                    self._round_trainer()
                old = self.trainer.log_probs(prompts, tokens)
        shuffle = torch.randperm(s.prompts, generator=self._generator(iteration, 3))
        for mine in shuffle.view(s.mini_batches, -1):
            self._train(prompts[mine], tokens[mine], old[mine], advantages[mine])
        with torch.no_grad():
            self._round_policy()
        self.versions.append(self.policy.flat.clone())
        return rewards.mean().item()

    def _train(self, prompts, tokens, old, advantages) -> None:
        """One mini-batch: one optimizer step, and the rounding behind it."""
        if self.settings.scheme == "fresh":
            with torch.no_grad():
                self._round_trainer()
        log_probs = self.trainer.log_probs(prompts, tokens).flatten(0, 1)
        budget = log_probs.numel()
        loss = policy_loss(
            log_probs, old.flatten(0, 1), advantages.flatten(), torch.ones_like(log_probs), budget, Clipping()
        )
        grad = self.trainer.grad.zero_()
        (loss * self.loss_scale.scale if self.loss_scale else loss).backward()
        with torch.no_grad():
            if self.loss_scale:
                overflow = self.loss_scale.unscale_(grad)
                self.loss_scale.update(overflow)
                if overflow:
                    self.skipped += 1
                    return
            if self.settings.scheme == "gradients":
                rounded = torch.empty(grad.shape, dtype=torch.bfloat16)
                noise = Noise(self.settings.seed, self.adam.steps, "gradient", STREAM_GRADIENT)
                grad.copy_(round_to_(rounded, grad, noise=noise))
            self.adam.step(grad)
            if self.settings.scheme != "fresh":
                self._round_trainer()
            if self.adam.steps <= STICKING_STEPS:
                self._round_policy()
                self.sticking.append(self._unchanged())

    def _unchanged(self) -> float:
        return 100.0 * (self.policy.flat == self.start).double().mean().item()

    def execute(self, report=None) -> dict:
        """Run to the end. report(iterations finished), if given, is called after each. Returns a `results.Run` without target."""
        s, started = self.settings, time.process_time()
        self.sticking: list[float] = []
        series = {name: [] for name in ("iteration", "exact_reward", "main_params_exact_reward", "sampled_reward")}
        series |= {name: [] for name in ("drift_k3", "unchanged", "response_length")}
        start_reward, sampled = self.exact_reward(self.base), []
        for iteration in range(s.iterations + 1):
            last = iteration == s.iterations
            if last or iteration % s.evaluate_every == 0:
                series["iteration"].append(iteration)
                series["exact_reward"].append(self.exact_reward(self.policy))
                scored = last or iteration % s.score_main_params_every == 0
                series["main_params_exact_reward"].append(self._main_params_reward() if scored else None)
                series["sampled_reward"].append(sum(sampled) / len(sampled) if sampled else None)
                series["drift_k3"].append(self.drift())
                series["unchanged"].append(self._unchanged())
                series["response_length"].append(None)
                sampled = []
            if not last:
                sampled.append(self.iterate(iteration))
                if report:
                    report(iteration + 1)
        return {
            "base": s.base,
            "seed": s.seed,
            "start_reward": start_reward,
            **series,
            "unchanged_after_steps": self.sticking,
            "optimizer_steps": self.adam.steps,
            "skipped_steps": self.skipped,
            "final_loss_scale": self.loss_scale.scale if self.loss_scale else None,
            "seconds": time.process_time() - started,
        }

    def _main_params_reward(self) -> float:
        self.scored.flat.copy_(self.main)
        return self.exact_reward(self.scored)
