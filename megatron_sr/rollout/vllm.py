"""The rollout engine that runs inside the trainer's process: one vLLM engine per rank, its weights replaced in place and read back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from megatron_sr.rollout import names, vllm_environment, vllm_faults
from megatron_sr.rollout.engine import (
    Completion,
    SamplingConfig,
    UpdateRefused,
    UpdateReport,
    WeightsUnverified,
    check_seeds,
)
from megatron_sr.rollout.held import Held
from megatron_sr.rollout.manifest import Manifest
from megatron_sr.rollout.vllm_readback import live_views


class VLLMEngine:
    """vLLM on this rank's device, in this process (implements `engine.RolloutEngine`).

    model_dir               a Hugging Face checkpoint directory (config.json, *.safetensors) of a Qwen2, Qwen3 or Qwen3-MoE model
    dtype                   "bfloat16"
    max_model_len           most tokens of prompt plus completion
    max_num_seqs            most sequences decoded at once
    max_num_batched_tokens  most tokens of one engine step
    seed                    vLLM's own seed; completions follow the seeds given to `generate`
    kv_cache_gib            size of the KV cache on CPU

    Build it after Megatron's process groups, on every rank: vLLM joins torch's default group, and each rank is an engine of its
    own. The environment it sets is named in `vllm_environment.import_vllm`. CUDA graphs and TorchInductor are off.
    An update keeps the whole set of sent tensors in memory until it is verified. Run on CPU only so far: nothing here has been
    tried on a GPU, where every rank's engine would also have to see its own device alone (CUDA_VISIBLE_DEVICES).

    Raises VLLMUnavailable (missing or unknown vLLM), FileNotFoundError, ValueError (dtype, family, sizes).
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        dtype: str = "bfloat16",
        max_model_len: int,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        seed: int = 0,
        kv_cache_gib: int = 1,
    ):
        self._directory = Path(model_dir)
        if not (self._directory / "config.json").is_file():
            raise FileNotFoundError(f"{self._directory} is not a model directory: it has no config.json")
        if dtype != "bfloat16":
            raise ValueError(f"dtype={dtype!r}: the engine's weights are verified for 'bfloat16' only; use it")
        vllm = vllm_environment.import_vllm(kv_cache_gib)
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self._directory)
        self._shapes = names.expected_shapes(config)
        head = names.head_dim(config)
        if head < 32 and not torch.cuda.is_available():
            raise ValueError(f"head size {head} is too small: vLLM's CPU attention needs at least 32")
        vllm_faults.pack_experts_on_reload()
        self._group_was_there = torch.distributed.is_initialized()
        with vllm_environment.trainer_undisturbed():
            self._llm = vllm.LLM(
                model=str(self._directory),
                skip_tokenizer_init=True,
                generation_config="vllm",  # sampling is what the caller says, not what the checkpoint suggests
                dtype=dtype,
                enforce_eager=True,
                use_tqdm_on_load=False,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                seed=seed,
            )
        self._sampling_params = vllm.SamplingParams
        self._max_model_len, self._vocabulary = max_model_len, config.vocab_size
        self._end_tokens = _end_tokens(self._directory, config)
        worker = self._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self._runner = worker.model_runner
        live_views(self._runner.get_model(), self._shapes)  # a layout that cannot be read back is refused now
        self._version = 0
        self._held: Held | None = None  # what was last sent; None: the checkpoint
        self._refusal: str | None = None

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """See `RolloutEngine.generate`. Logprobs are vLLM's raw ones: of the model's distribution, before temperature and top_p."""
        if self._refusal:
            raise WeightsUnverified(self._refusal)
        check_seeds(seeds, sampling.n, len(prompts))
        self._check_prompts(prompts, sampling)
        if not prompts:
            return []
        stop = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self._end_tokens)
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            [
                self._sampling_params(
                    n=sampling.n,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    max_tokens=sampling.max_tokens,
                    min_tokens=sampling.min_tokens,
                    ignore_eos=sampling.ignore_eos,
                    stop_token_ids=sorted(stop),
                    logprobs=0,  # of the sampled token only
                    detokenize=False,
                    seed=seed,
                )
                for seed in seeds
            ],
            use_tqdm=False,
        )
        return [[self._completion(i, choice) for choice in output.outputs] for i, output in enumerate(outputs)]

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> UpdateReport:
        """See `RolloutEngine.update_weights`.

        After a report with mismatches, or an error once loading began, the engine refuses to generate until an update succeeds;
        the same version may then be sent again.
        """
        sent = self._accept(list(tensors), version)
        start = time.perf_counter()
        manifest = Manifest.of(sent.items(), version)
        digested = time.perf_counter()
        self._refusal = f"the update to version {version} did not finish; update the weights again"
        vllm_faults.reload_weights(self._runner, sent.items())
        if not self._llm.reset_prefix_cache():
            raise WeightsUnverified(
                "the prefix cache, computed with the old weights, could not be cleared: requests are running"
            )
        loaded = time.perf_counter()
        views = live_views(self._runner.get_model(), self._shapes)
        self._held = Held.of(manifest, sent, views)
        mismatched = self._held.mismatched(views)
        if mismatched:
            self._refusal = (
                f"after the update to version {version} the engine does not hold the trainer's bits in "
                f"{len(mismatched)} tensors ({', '.join(mismatched[:4])}...); update the weights again"
            )
        else:
            self._refusal, self._version = None, version
        return UpdateReport(
            version=version,
            tensors=len(sent),
            mismatched=mismatched,
            seconds=loaded - digested,
            verify_seconds=digested - start + time.perf_counter() - loaded,
            digest=manifest.digest,
            value_verified=sorted(self._held.values),
            indistinct=self._held.indistinct,
        )

    def weights_version(self) -> int:
        """See `RolloutEngine.weights_version`."""
        return self._version

    def weights_digest(self) -> str:
        """See `RolloutEngine.weights_digest`. Before the first update the live weights are compared with the checkpoint's files."""
        if self._refusal:
            raise WeightsUnverified(self._refusal)
        views = live_views(self._runner.get_model(), self._shapes)
        if self._held is None:
            checkpoint = self._checkpoint()
            self._held = Held.of(Manifest.of(checkpoint.items(), 0), checkpoint, views)
        if mismatched := self._held.mismatched(views):
            self._refusal = (
                f"the live weights are not those of version {self._version}: {', '.join(mismatched[:4])} differ; "
                f"update the weights again"
            )
            raise WeightsUnverified(self._refusal)
        return self._held.manifest.digest

    def shutdown(self) -> None:
        """See `RolloutEngine.shutdown`. torch's default process group is kept if it existed before the engine."""
        if self._llm is None:
            return
        with vllm_environment.default_group_kept(self._group_was_there):
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = self._runner = None
        self._refusal = "the engine was shut down"

    def _checkpoint(self) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint's files. Raises ValueError when one that the model needs is in none of them."""
        from safetensors.torch import load_file

        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(self._directory.glob("*.safetensors")):
            tensors.update(load_file(file))
        if missing := [name for name in self._shapes if name not in tensors]:
            raise ValueError(f"{self._directory}: no .safetensors file holds {missing[:8]}")
        return {name: tensors[name] for name in self._shapes}

    def _accept(self, tensors: list[tuple[str, torch.Tensor]], version: int) -> dict[str, torch.Tensor]:
        """The sent tensors by name. Raises UpdateRefused before anything is touched."""
        if self._llm is None:
            raise UpdateRefused("the engine was shut down; build a new one")
        sent = dict(tensors)
        problems = []
        if version < self._version or (version == self._version and not self._refusal):
            problems.append(f"version {version} is not above the present one, {self._version}")
        if len(sent) != len(tensors):
            seen = [name for name, _ in tensors]
            problems.append(f"sent twice: {sorted({name for name in seen if seen.count(name) > 1})}")
        if missing := [name for name in self._shapes if name not in sent]:
            problems.append(f"missing tensors: {missing[:8]} ({len(missing)} in all)")
        if extra := [name for name in sent if name not in self._shapes]:
            problems.append(f"tensors that the model does not have: {extra[:8]} ({len(extra)} in all)")
        for name, tensor in sent.items():
            if name in self._shapes and tuple(tensor.shape) != self._shapes[name]:
                problems.append(f"{name} has shape {list(tensor.shape)}, the model {list(self._shapes[name])}")
            if tensor.dtype != torch.bfloat16:
                problems.append(f"{name} is {tensor.dtype}, the model torch.bfloat16")
            elif not all(bound.isfinite() for bound in torch.aminmax(tensor)):
                problems.append(f"{name} has NaN or infinite elements")
        if problems:
            raise UpdateRefused(f"update refused, version {self._version} stays: {'; '.join(problems)}")
        return sent

    def _check_prompts(self, prompts, sampling: SamplingConfig) -> None:
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompt {i} is empty; give at least one token")
            if len(prompt) + sampling.max_tokens > self._max_model_len:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens: with max_tokens={sampling.max_tokens} that is more than "
                    f"max_model_len={self._max_model_len}; shorten it or build the engine with a larger max_model_len"
                )
            if not 0 <= min(prompt) <= max(prompt) < self._vocabulary:
                raise ValueError(f"prompt {i} has token ids outside 0..{self._vocabulary - 1}")

    def _completion(self, prompt_index: int, choice) -> Completion:
        if choice.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a completion of prompt {prompt_index} with {choice.finish_reason!r}")
        tokens = list(choice.token_ids)
        logprobs = [position[token].logprob for token, position in zip(tokens, choice.logprobs)]
        return Completion(prompt_index, tokens, logprobs, choice.finish_reason, self._version)


def _end_tokens(directory: Path, config) -> set[int]:
    """The model's end-of-sequence tokens: those of generation_config.json where it exists, else of config.json."""
    from transformers import GenerationConfig

    found = config.eos_token_id
    if (directory / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(directory).eos_token_id or found
    if found is None:
        return set()
    return set(found) if isinstance(found, (list, tuple)) else {found}
