"""The rollout engine on vLLM in this process: its weights are replaced in place, all or nothing, and read back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from megatron_sr.rollout import mxfp8_layout, names, staging, vllm_environment, vllm_faults, vllm_mxfp8, vllm_shards
from megatron_sr.rollout.engine import (
    DEAD,
    DRAIN,
    PAUSED,
    REFUSING,
    SERVING,
    Completion,
    EngineDead,
    Health,
    SamplingConfig,
    UpdateFailed,
    UpdateRefused,
    UpdateReport,
    WeightsUnverified,
    check_in_flight,
    check_seeds,
)
from megatron_sr.rollout.manifest import Manifest, TensorRecord
from megatron_sr.rollout.shared_memory import share
from megatron_sr.rollout.vllm_requests import Requests
from megatron_sr.rollout.vllm_worker import EXTENSION

WHOLE, STREAM = "whole", "stream"  # how an update is staged: see VLLMEngine.update_weights


class VLLMEngine:
    """vLLM on this rank's device, in this process (implements `engine.RolloutEngine`).

    model_dir               a Hugging Face checkpoint directory (config.json, *.safetensors) of a Qwen2, Qwen3 or Qwen3-MoE model, in
                            BF16 or in MXFP8 (`mxfp8_layout`)
    dtype                   "bfloat16" or "float16" (not MXFP8, not MoE): of the weights and of what it computes with
    max_model_len           most tokens of prompt plus completion
    max_num_seqs            most sequences decoded at once
    max_num_batched_tokens  most tokens of one engine step
    seed                    vLLM's own seed; completions follow the seeds given to `generate`
    kv_cache_gib            size of the KV cache on CPU
    tensor_parallel_size    vLLM workers that share the model; more than one are processes of their own, so the engine must then
                            live outside the trainer's ranks (`subprocess_engine`, `server`)
    enforce_eager           False lets vLLM compile with TorchInductor, against which a warning is given

    Build it after Megatron's process groups, on every rank: vLLM joins torch's default group, and each rank is an engine of its
    own. The environment it sets is named in `vllm_environment.import_vllm`. CUDA graphs and TorchInductor are off.
    Run on CPU only so far: nothing here has been tried on a GPU, where every rank's engine would also have to see its own device
    alone (CUDA_VISIBLE_DEVICES).

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
        tensor_parallel_size: int = 1,
        enforce_eager: bool = True,
    ):
        self._directory = Path(model_dir)
        if not (self._directory / "config.json").is_file():
            raise FileNotFoundError(f"{self._directory} is not a model directory: it has no config.json")
        if dtype not in ("bfloat16", "float16"):
            raise ValueError(
                f"dtype={dtype!r}: the engine's weights can be verified in 'bfloat16' and 'float16'; use one of them"
            )
        if tensor_parallel_size > 1 and torch.distributed.is_initialized():
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size} starts worker processes, which must not inherit the trainer's ranks: "
                f"use a SubprocessEngine or a server"
            )
        vllm = vllm_environment.import_vllm(kv_cache_gib, enforce_eager)
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self._directory)
        if dtype == "float16" and (mxfp8_layout.is_mxfp8(config) or config.model_type == "qwen3_moe"):
            raise ValueError(
                f"dtype='float16' with {self._directory}: MXFP8 and MoE models run in 'bfloat16' here; use it"
            )
        self._wanted = mxfp8_layout.expected_tensors(config, getattr(torch, dtype))
        if mxfp8_layout.is_mxfp8(config):
            vllm_mxfp8.prepare(config, tensor_parallel_size)
        vllm_shards.check_divisible(config, tensor_parallel_size)
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
                enforce_eager=enforce_eager,
                tensor_parallel_size=tensor_parallel_size,
                distributed_executor_backend="mp" if tensor_parallel_size > 1 else None,
                worker_extension_cls=EXTENSION,
                async_scheduling=False,  # no batch is in flight between steps, so weights may be swapped there
                use_tqdm_on_load=False,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                seed=seed,
            )
        self._sampling_params = vllm.SamplingParams
        self._final_only = vllm_environment.final_only()
        self._max_model_len, self._vocabulary = max_model_len, config.vocab_size
        self._end_tokens = _end_tokens(self._directory, config)
        self._workers = tensor_parallel_size
        self._executor = self._llm.llm_engine.engine_core.engine_core.model_executor
        self._requests = Requests(self._llm.llm_engine)
        self._updating = threading.Lock()
        self._held: Manifest | None = None  # what was last sent; None: the checkpoint
        self._refusal: str | None = None
        self._loading: int | None = None  # the version whose weights are going in now
        self._rpc("sr_prepare")

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """See `RolloutEngine.generate`. Logprobs are vLLM's raw ones: of the model's distribution, before temperature and top_p."""
        check_seeds(seeds, sampling.n, len(prompts))
        self._check_prompts(prompts, sampling)
        if not prompts:
            return []
        stop = sorted(set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self._end_tokens))
        requests, params = [], []
        for prompt, seed in zip(prompts, seeds):
            for i in range(sampling.n):
                requests.append({"prompt_token_ids": list(prompt)})
                params.append(self._params(sampling, stop, seed + i))
        # Asked in there, not here: while another thread updates, `decode` waits for the update's end, whatever state it is in.
        done = iter(self._requests.decode(requests, params, self._admit))
        return [[self._completion(i, *next(done)) for _ in range(sampling.n)] for i in range(len(prompts))]

    def update_weights(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        *,
        in_flight: str = DRAIN,
        expected: Mapping[str, TensorRecord] | None = None,
        stage: str = WHOLE,
    ) -> UpdateReport:
        """See `RolloutEngine.update_weights`.

        expected  digests stated by the sender, looked up as each tensor arrives: a tensor that differs was damaged on the way
        stage     WHOLE: nothing of the engine is touched until every tensor has arrived and fits; takes memory for all of them.
                  STREAM: each layer goes in as it arrives; takes memory for one layer (one worker only). If the update breaks off,
                  the engine refuses to generate until another one succeeds.

        After a report with mismatches, or an error once loading began, the engine refuses to generate until an update succeeds;
        the same version may then be sent again.
        """
        check_in_flight(in_flight)
        if stage not in (WHOLE, STREAM) or (stage == STREAM and self._workers > 1):
            raise ValueError(
                f"stage={stage!r}: {WHOLE!r}, or {STREAM!r} with one worker (tensor_parallel_size=1, here {self._workers})"
            )
        if not self._updating.acquire(blocking=False):
            raise UpdateRefused(f"update to version {version} refused: another update is running")
        try:
            incoming = staging.Incoming(self._wanted, expected)
            passing = incoming.passing(tensors)
            try:
                self._check_version(version)
            except UpdateRefused:
                for _ in passing:  # a collective export would hang
                    pass
                raise
            if stage == STREAM:
                return self._update(_whole_or_failed(passing, incoming, version), incoming, version, in_flight)
            sent = dict(passing)
            incoming.check(version)
            return self._update(sent.items(), incoming, version, in_flight)
        finally:
            self._updating.release()

    def _update(self, tensors, incoming: staging.Incoming, version: int, in_flight: str) -> UpdateReport:
        """Pause, swap, reset the cache, read back, resume."""
        paused_before = self._requests.paused
        self._requests.pause(in_flight)
        try:
            start, self._loading = time.perf_counter(), version
            self._refusal = f"the update to version {version} did not finish; update the weights again"
            self._to_workers("sr_reload", tensors, incoming.records)
            incoming.check(version)
            self._requests.forget_cache()
            loaded = time.perf_counter()
            self._held = incoming.manifest(version)
            mismatched = self._mismatched()
            if mismatched:
                self._refusal = (
                    f"after the update to version {version} the engine does not hold the trainer's bits in "
                    f"{len(mismatched)} tensors ({', '.join(mismatched[:4])}...); update the weights again"
                )
            else:
                self._refusal, self._requests.version = None, version
            by_value, indistinct = zip(*self._rpc("sr_held"))
            return UpdateReport(
                version=version,
                tensors=len(incoming.records),
                mismatched=mismatched,
                seconds=loaded - start,
                verify_seconds=time.perf_counter() - loaded,
                digest=self._held.digest,
                value_verified=sorted(set().union(*by_value)),
                indistinct=sum(indistinct),
            )
        finally:
            self._loading = None
            if self._refusal:
                self._requests.fail(WeightsUnverified(self._refusal))
            if not paused_before:
                self._requests.resume()

    def pause(self, in_flight: str = DRAIN) -> None:
        """See `RolloutEngine.pause`."""
        self._requests.pause(in_flight)

    def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._requests.resume()

    def health(self) -> Health:
        """See `RolloutEngine.health`."""
        version, running = self._requests.version, self._requests.running
        if self._llm is None or getattr(self._executor, "is_failed", False):
            return Health(DEAD, version, 0, self._refusal or "a vLLM worker process died")
        if self._loading is not None:
            return Health(PAUSED, version, running, f"the update to version {self._loading} is being loaded")
        if self._refusal:
            return Health(REFUSING, version, running, self._refusal)
        return Health(PAUSED if self._requests.paused else SERVING, version, running)

    def weights_version(self) -> int:
        """See `RolloutEngine.weights_version`."""
        return self._requests.version

    def weights_manifest(self) -> Manifest:
        """Names, shapes, dtypes and digests of the weights that the engine was last given; the checkpoint's before the first update."""
        if self._held is None:
            checkpoint = self._checkpoint()
            manifest = Manifest.of(checkpoint.items(), 0)
            with self._requests.exclusive():
                self._to_workers("sr_note", checkpoint.items(), manifest.tensors)
            self._held = manifest
        return self._held

    def weights_digest(self) -> str:
        """See `RolloutEngine.weights_digest`. Before the first update the live weights are compared with the checkpoint's files."""
        if self._refusal:
            raise WeightsUnverified(self._refusal)
        with self._requests.exclusive():
            manifest, mismatched = self.weights_manifest(), self._mismatched()
        if mismatched:
            self._refusal = (
                f"the live weights are not those of version {self.weights_version()}: {', '.join(mismatched[:4])} differ; "
                f"update the weights again"
            )
            raise WeightsUnverified(self._refusal)
        return manifest.digest

    def shutdown(self) -> None:
        """See `RolloutEngine.shutdown`. torch's default process group is kept if it existed before the engine."""
        if self._llm is None:
            return
        with vllm_environment.default_group_kept(self._group_was_there):
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        self._refusal = "the engine was shut down"

    def _checkpoint(self) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint's files, in FP16 if the engine computes in it.

        Raises ValueError when one that the model needs is in none of them.
        """
        from safetensors.torch import load_file

        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(self._directory.glob("*.safetensors")):
            tensors.update(load_file(file))
        if missing := [name for name in self._wanted if name not in tensors]:
            raise ValueError(f"{self._directory}: no .safetensors file holds {missing[:8]}")
        half = {name for name, (_, dtype) in self._wanted.items() if dtype == torch.float16}
        return {name: tensors[name].half() if name in half else tensors[name] for name in self._wanted}

    def _rpc(self, method: str, *arguments) -> list:
        """Call a method of `WeightsWorker` on every worker. Raises EngineDead when one of them is gone."""
        try:
            with self._requests.exclusive():
                return self._llm.collective_rpc(method, args=arguments)
        except Exception as error:
            if getattr(self._executor, "is_failed", False):
                raise EngineDead(
                    f"a vLLM worker process died ({error}); start a new engine and send it all weights"
                ) from error
            raise

    def _to_workers(self, method: str, tensors: Iterable[tuple[str, torch.Tensor]], records) -> None:
        """Call a method that takes tensors: workers in other processes get them through shared memory."""
        if self._workers == 1:
            self._rpc(method, tensors, records)
            return
        buffer, shared = share(list(tensors))
        try:
            self._rpc(method, shared, records)
        finally:
            buffer.close()

    def _mismatched(self) -> list[str]:
        return sorted(set().union(*self._rpc("sr_mismatched")))

    def _admit(self) -> None:
        """Raise unless the engine may generate."""
        if self._refusal:
            raise WeightsUnverified(self._refusal)

    def _check_version(self, version: int) -> None:
        if self._llm is None:
            raise UpdateRefused("the engine was shut down; build a new one")
        present = self._requests.version
        if version < present or (version == present and not self._refusal):
            raise UpdateRefused(
                f"update refused, version {present} stays: version {version} is not above the present one, {present}"
            )

    def _params(self, sampling: SamplingConfig, stop: list[int], seed: int):
        return self._sampling_params(
            n=1,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=stop,
            logprobs=0,  # of the sampled token only
            detokenize=False,
            seed=seed,
            output_kind=self._final_only,
        )

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

    def _completion(self, prompt_index: int, output, started: int, ended: int) -> Completion:
        choice = output.outputs[0]
        if choice.finish_reason not in ("stop", "length", "abort"):
            raise RuntimeError(f"vLLM ended a completion of prompt {prompt_index} with {choice.finish_reason!r}")
        tokens = list(choice.token_ids)
        logprobs = [position[token].logprob for token, position in zip(tokens, choice.logprobs or ())]
        return Completion(prompt_index, tokens, logprobs, choice.finish_reason, started, ended)


def _whole_or_failed(passing, incoming: staging.Incoming, version: int):
    """The passing tensors, up to the first one with a problem; the rest is used up."""
    for name, tensor in passing:
        if incoming.problems:
            for _ in passing:
                pass
            raise UpdateFailed(
                f"update to version {version} broke off when part of it was loaded: {incoming.problems[0]}; the engine refuses to "
                f"generate until it is given all weights again"
            )
        yield name, tensor


def _end_tokens(directory: Path, config) -> set[int]:
    """The model's end-of-sequence tokens: those of generation_config.json where it exists, else of config.json."""
    from transformers import GenerationConfig

    found = config.eos_token_id
    if (directory / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(directory).eos_token_id or found
    if found is None:
        return set()
    return set(found) if isinstance(found, (list, tuple)) else {found}
