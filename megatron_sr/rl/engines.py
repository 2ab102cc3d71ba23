"""The rollout engines of a job (`--rollout-engine`): in the ranks' processes, in a child of each rank, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_sr.rollout.delta import DeltaEngine
from megatron_sr.rollout.engine import DRAIN, Completion, Health, RolloutEngine, SamplingConfig, UpdateReport

KINDS = ("in-process", "subprocess", "ray")


def build_engine(args, model_dir: Path) -> RolloutEngine:
    """This rank's engine as the flags say; collective. After Megatron's process groups: vLLM in process joins the default one."""
    options = {
        "dtype": "float16" if args.fp16 else "bfloat16",
        "max_model_len": args.max_prompt_tokens + args.max_completion_tokens,
        "max_num_seqs": min(512, args.prompts * args.completions),
        "max_num_batched_tokens": max(8192, args.max_prompt_tokens + args.max_completion_tokens),
        "seed": 0,
    }
    if args.rollout_engine == "ray":
        from megatron_sr.rollout.ray import RayEngines

        def start():
            return RayEngines(
                model_dir.resolve(),
                engines=args.ray_engines,
                cpus=args.ray_cpus,
                gpus=args.ray_gpus,
                address=args.ray_address,
                zstd=args.delta_zstd,
                **options,
            )

        return SharedEngine(start)
    if args.rollout_engine == "subprocess":
        from megatron_sr.rollout.subprocess_engine import SubprocessEngine

        engine = SubprocessEngine(model_dir, **options)
    else:
        from megatron_sr.rollout.vllm import VLLMEngine

        engine = VLLMEngine(model_dir, **options)
    return DeltaEngine(engine, zstd=args.delta_zstd) if args.weight_sync == "delta" else engine


class SharedEngine:
    """One engine for all ranks, held by the first (implements `RolloutEngine`). Every method is collective.

    start: makes the engine; called on the first rank. What it, or a call, raises there is raised on every rank.
    Calls of `generate` have a process group of their own, so that they may run in a thread beside the trainer's collectives; all
    ranks must then make them in one order (`RolloutQueue` uses one thread, see `collective`).
    """

    collective = True

    def __init__(self, start):
        self._rollouts = dist.new_group(backend="gloo")
        self._engine = None

        def build():
            self._engine = start()

        self._everywhere(build)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """See `RolloutEngine.generate`: this rank's prompts; the engine gets those of all ranks at once.

        Aborted requests are asked for again here: the ranks must not differ in how often they call.
        """
        shares: list = [None] * dist.get_world_size()
        dist.all_gather_object(shares, (prompts, seeds), group=self._rollouts)

        def answer():
            asked = [(list(p), s) for prompts, seeds in shares for p, s in zip(prompts, seeds)]
            done: list = [None] * len(asked)
            while missing := [i for i, group in enumerate(done) if group is None]:
                groups = self._engine.generate([asked[i][0] for i in missing], sampling, [asked[i][1] for i in missing])
                for i, group in zip(missing, groups):
                    if not any(c.finish_reason == "abort" for c in group):
                        done[i] = group
            return done

        groups = self._everywhere(answer, self._rollouts)
        first = sum(len(prompts) for prompts, _ in shares[: dist.get_rank()])
        mine = groups[first : first + len(prompts)]
        return [[Completion(**{**vars(c), "prompt_index": i}) for c in group] for i, group in enumerate(mine)]

    def update_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, *, in_flight: str = DRAIN
    ) -> UpdateReport:
        """See `RolloutEngine.update_weights`."""
        remaining = iter(tensors)

        def update():
            try:
                return self._engine.update_weights(remaining, version, in_flight=in_flight)
            finally:
                for _ in remaining:  # an export is collective: the other ranks are in it to its end
                    pass

        if self._engine is None:
            for _ in remaining:
                pass
        return self._everywhere(update)

    def pause(self, in_flight: str = DRAIN) -> None:
        """See `RolloutEngine.pause`."""
        self._everywhere(lambda: self._engine.pause(in_flight))

    def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._everywhere(lambda: self._engine.resume())

    def health(self) -> Health:
        """See `RolloutEngine.health`."""
        return self._everywhere(lambda: self._engine.health())

    def weights_version(self) -> int:
        """See `RolloutEngine.weights_version`."""
        return self._everywhere(lambda: self._engine.weights_version())

    def weights_digest(self) -> str:
        """See `RolloutEngine.weights_digest`."""
        return self._everywhere(lambda: self._engine.weights_digest())

    @property
    def last(self) -> dict:
        """Statistics of the last update on the rank that holds the engine, {} elsewhere; not collective."""
        return self._engine.last if self._engine is not None else {}

    def shutdown(self) -> None:
        """See `RolloutEngine.shutdown`; not collective."""
        if self._engine is not None:
            self._engine.shutdown()

    def _everywhere(self, function, group=None):
        """What `function` returns or raises on the first rank, on every rank."""
        outcome: list = [None, None]
        if dist.get_rank() == 0:
            try:
                outcome[0] = function()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=group)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]
