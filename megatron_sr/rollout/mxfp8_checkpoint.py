"""A BF16 Hugging Face checkpoint -> an MXFP8 one that vLLM loads (`modelopt_mxfp8`), file by file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from megatron_sr import mxfp8
from megatron_sr.rollout.mxfp8_layout import CODES, SCALE, expected_tensors, quantization_config

_COPIED = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.jinja")


def convert(source: Path, target: Path, bf16_layers: set[int] = frozenset()) -> Path:
    """Write an MXFP8 version of the checkpoint folder `source` to the new folder `target`, and return `target`.

    Weights are rounded to nearest; a rollout engine replaces them at the first update. Memory: one safetensors file.
    bf16_layers: layers, counted from 0, that stay BF16.
    Raises FileNotFoundError, FileExistsError, ValueError (family, sizes, missing tensors, a source that is quantized already).
    """
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    source, target = Path(source), Path(target)
    files = sorted(source.glob("*.safetensors"))
    if not files or not (source / "config.json").is_file():
        raise FileNotFoundError(
            f"{source}: no config.json and *.safetensors there; give a Hugging Face checkpoint folder"
        )
    hf_config = AutoConfig.from_pretrained(source)
    if getattr(hf_config, "quantization_config", None):
        raise ValueError(f"{source} is quantized already; convert the BF16 checkpoint that it came from")
    hf_config.quantization_config = quantization_config(hf_config, bf16_layers)
    expected = expected_tensors(hf_config)

    target.mkdir(parents=True)
    written: dict[str, str] = {}
    for file in files:
        tensors = {}
        for name, tensor in load_file(file).items():
            tensors |= _quantized(name, tensor) if name + SCALE in expected else {name: tensor}
        save_file(tensors, target / file.name, metadata={"format": "pt"})
        written |= dict.fromkeys(tensors, file.name)
    if missing := [name for name in expected if name not in written]:
        shutil.rmtree(target)
        raise ValueError(f"{source}: no .safetensors file holds {missing[:8]} ({len(missing)} missing)")
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": written}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
    raw = json.loads((source / "config.json").read_text())
    raw["quantization_config"] = hf_config.quantization_config
    (target / "config.json").write_text(json.dumps(raw, indent=1))
    for pattern in _COPIED:
        for file in source.glob(pattern):
            shutil.copy(file, target)
    return target


def _quantized(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    blocks = mxfp8.quantize(tensor, min_scale=mxfp8.BF16_MIN_SCALE)
    return {name: blocks.data.view(CODES), name + SCALE: blocks.scale}
