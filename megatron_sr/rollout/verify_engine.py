"""Is the policy that an engine serves the one in a checkpoint? `megatron-sr verify --engine URL --checkpoint DIR`.

The engine reads its live weights back and answers with their digest; the checkpoint is read tensor by tensor. It is a Hugging Face
folder (safetensors), or a Megatron distributed checkpoint (`torch_dist`) of a Qwen2, Qwen3 or Qwen3-MoE model in any layout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

SHOWN = 8  # tensors listed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `megatron-sr verify --engine`."""
    group = parser.add_argument_group("a live rollout engine")
    group.add_argument("--engine", metavar="URL", help="of a rollout engine's server, http://host:port")
    group.add_argument(
        "--checkpoint", dest="engine_checkpoint", type=Path, metavar="DIR", help="the policy that it should serve"
    )
    group.add_argument(
        "--model", type=Path, metavar="DIR", help="folder with the model's config.json, if the checkpoint has none"
    )
    group.add_argument("--token-file", type=Path, metavar="FILE", help="with the token that the server asks for")


def main(args: argparse.Namespace) -> int:
    """Exit code 0: the engine serves the checkpoint's bits, 1: it does not, 2: bad input or no answer."""
    from megatron_sr.rollout.engine import EngineDead

    try:
        if args.engine_checkpoint is None:
            raise ValueError("--engine needs --checkpoint DIR, the policy to compare with")
        token = args.token_file.read_text().strip() if args.token_file else None
        result = verify_engine(args.engine, args.engine_checkpoint, model=args.model, token=token)
    except (ValueError, OSError, EngineDead, PermissionError) as error:
        if args.json:
            print(json.dumps({"engine": args.engine, "error": str(error)}))
        print(f"megatron-sr verify: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=1) if args.json else _text(result))
    return 0 if result["same"] else 1


def verify_engine(url: str, checkpoint: Path, *, model: Path | None = None, token: str | None = None) -> dict:
    """engine, checkpoint, state, version, engine_digest, checkpoint_digest, tensors, differences (readable, one a tensor), same.

    engine_digest is None when the engine itself says that its live weights are not those it was given (`reason` has its words).
    Raises ValueError or OSError for a checkpoint that cannot be read, EngineDead when the engine does not answer.
    """
    from megatron_sr.rollout.client import RemoteEngine
    from megatron_sr.rollout.engine import DEAD, EngineDead, WeightsUnverified
    from megatron_sr.rollout.manifest import Manifest, compare

    engine = RemoteEngine(url, token=token)
    health = engine.health()
    if health.state == DEAD:
        raise EngineDead(f"{url} does not answer: {health.reason}")
    expected = Manifest.of(checkpoint_tensors(checkpoint, model), 0)
    result = {
        "engine": url,
        "checkpoint": str(checkpoint),
        "state": health.state,
        "version": health.version,
        "tensors": len(expected.tensors),
        "checkpoint_digest": expected.digest,
    }
    try:
        digest, reason = engine.weights_digest(), health.reason
        differences = [] if digest == expected.digest else compare(expected, engine.weights_manifest())
    except WeightsUnverified as error:
        digest, reason, differences = None, str(error), []
    same = digest == expected.digest
    return result | {"engine_digest": digest, "reason": reason, "differences": differences, "same": same}


def checkpoint_tensors(path: Path, model: Path | None = None) -> Iterator[tuple[str, object]]:
    """(Hugging Face name, tensor) of each model tensor, one after the other. Raises ValueError or OSError as `verify_engine`."""
    if any(path.glob("*.safetensors")):
        return _safetensors(path)
    return _megatron(path, model)


def _safetensors(path: Path):
    from safetensors import safe_open

    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                yield name, opened.get_tensor(name)


def _megatron(path: Path, model: Path | None):
    from megatron_sr.megatron.checkpoint_reader import CheckpointReader
    from megatron_sr.rollout import names, shards

    reader = CheckpointReader(path)
    keys = [key for key in reader.tensors if key.startswith(("embedding.", "decoder.", "output_layer."))]
    if not keys:
        raise ValueError(
            f"{reader.path}: no model params in it (--param-rounding-save-model none); load it and write a Hugging Face folder "
            f"(--save-hf), or compare with a checkpoint that has them"
        )
    hf = _config(reader.path, model)
    for key in keys:
        for name, offset, shape in _parts(key, reader.tensors[key].shape):
            entry = names.entry(name)
            if entry.hf == ("lm_head.weight",) and hf.tie_word_embeddings:
                continue
            block = reader.region(key, offset, shape)
            tensor = block.view(shape[1 if name != key else 0 :][1 if entry.expert else 0 :])
            yield from zip(entry.hf, shards.join(entry, [tensor], hf))


def _parts(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(parameter's name, offset, shape of the block) of the parameters that a stored tensor stacks: by layer, and by expert."""
    if not key.startswith("decoder.layers."):
        yield key, (0,) * len(shape), shape
        return
    inside = key.removeprefix("decoder.layers.")
    stacked = 2 if ".experts.experts." in key else 1
    for layer in range(shape[0]):
        if stacked == 1:
            yield f"decoder.layers.{layer}.{inside}", (layer, *(0,) * (len(shape) - 1)), (1, *shape[1:])
            continue
        for expert in range(shape[1]):
            name = f"decoder.layers.{layer}.{inside.replace('.experts.experts.', f'.experts.local_experts.{expert}.')}"
            yield name, (layer, expert, *(0,) * (len(shape) - 2)), (1, 1, *shape[2:])


def _config(path: Path, model: Path | None):
    """The model's Hugging Face config: of `model`, or as the post-training job stored it."""
    from transformers import AutoConfig

    if model is not None:
        return AutoConfig.from_pretrained(model)
    state = path / "loop_state.json"
    stored = json.loads(state.read_text()).get("hf_config") if state.is_file() else None
    if stored is None:
        raise ValueError(f"{path} does not say which model it is; add --model DIR, the folder with its config.json")
    return AutoConfig.for_model(**stored)


def _text(result: dict) -> str:
    lines = [
        f"engine      {result['engine']}  version {result['version']}, {result['state']}",
        f"  digest    {result['engine_digest'] or 'none: ' + result['reason']}",
        f"checkpoint  {result['checkpoint']}  {result['tensors']} tensors",
        f"  digest    {result['checkpoint_digest']}",
    ]
    lines += [f"  {difference}" for difference in result["differences"][:SHOWN]]
    if len(result["differences"]) > SHOWN:
        lines.append(f"  and {len(result['differences']) - SHOWN} more tensors")
    if result["same"]:
        lines.append("ok: the engine serves exactly this policy (read back from its live weights now)")
    else:
        lines.append("MISMATCH: the engine does not serve this policy")
    return "\n".join(lines)
