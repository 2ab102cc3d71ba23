"""Point 4 of the MXFP8 mode: names, shapes, dtypes and formats, without an engine."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_sr.rollout import mxfp8_audit, mxfp8_layout
from megatron_sr.rollout.manifest import Manifest, compare
from megatron_sr.rollout.mxfp8_checkpoint import convert
from megatron_sr.rollout.mxfp8_layout import CODES, expected_tensors, quantization_config
from tests.tiny_models import hf_config, make_checkpoint


def mxfp8_config(family="qwen3", bf16_layers=frozenset(), **sizes):
    config = hf_config(family, **sizes)
    config.quantization_config = quantization_config(config, bf16_layers)
    return config


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_point4_mxfp8_expected_tensors(family):
    plain, quantized = expected_tensors(hf_config(family)), expected_tensors(mxfp8_config(family))
    assert {dtype for _, dtype in plain.values()} == {torch.bfloat16}
    weights = {name for name, (_, dtype) in quantized.items() if dtype == CODES}
    assert weights == {name for name in plain if name.endswith("_proj.weight")}
    assert quantized.keys() == plain.keys() | {name + "_scale" for name in weights}
    for name in weights:
        rows, columns = plain[name][0]
        assert quantized[name][0] == (rows, columns)
        assert quantized[name + "_scale"] == ((rows, columns // 32), torch.uint8)


def test_point4_mxfp8_bf16_layers_are_whole_names():
    """Twelve layers: layer 1 in BF16 must not take layers 10 and 11 with it."""
    config = mxfp8_config(layers=12, bf16_layers={1})
    numbers = {int(name.split(".")[2]) for name, (_, dtype) in expected_tensors(config).items() if dtype == CODES}
    assert numbers == set(range(12)) - {1}
    mxfp8_layout.check_ignore(config)
    moe = mxfp8_config("qwen3_moe", bf16_layers={0})
    ignore = moe.quantization_config["ignore"]
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "model.layers.0.mlp.experts"} <= set(
        ignore
    )
    assert not [entry for entry in ignore if "experts." in entry]
    mxfp8_layout.check_ignore(moe)


@pytest.mark.parametrize("entry", ["mlp.gate", "model.layers.1.mlp.gate", "layers.1", "_proj", "k"])
def test_point4_mxfp8_pieces_of_names_are_refused(entry):
    config = mxfp8_config()
    config.quantization_config["ignore"].append(entry)
    with pytest.raises(ValueError, match="write whole names of modules"):
        mxfp8_layout.check_ignore(config)


def test_point4_mxfp8_other_quantizations_and_sizes_are_refused():
    config = hf_config()
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match="quantization 'fp8'"):
        expected_tensors(config)
    narrow = mxfp8_config()
    narrow.intermediate_size = 48
    with pytest.raises(ValueError, match="down_proj.weight has 48 columns"):
        expected_tensors(narrow)


def test_point4_mxfp8_audit_names_every_difference():
    trainer = {"a.weight": "mxfp8", "b.weight": "bfloat16", "c.weight": "mxfp8"}
    rows = mxfp8_audit.audit(trainer, {"a.weight": "mxfp8", "b.weight": "mxfp8", "d.weight": "bfloat16"})
    assert mxfp8_audit.table(rows).count("<-- differs") == 3
    with pytest.raises(
        ValueError, match="3 weights have different formats: b.weight is bfloat16 in the trainer, mxfp8 in"
    ):
        mxfp8_audit.check(rows)
    mxfp8_audit.check(mxfp8_audit.audit(trainer, dict(trainer)))


def test_point4_mxfp8_conversion(tmp_path):
    source = make_checkpoint(tmp_path / "bf16", "qwen3_moe")
    base = load_file(source / "model.safetensors")
    names = sorted(base)
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({name: base[name] for name in part}, source / f"part-{i}.safetensors")
    (source / "model.safetensors").unlink()
    target = convert(source, tmp_path / "mxfp8", bf16_layers={1})
    held = {}
    for file in target.glob("*.safetensors"):
        held |= load_file(file)
    config = json.loads((target / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "MXFP8"
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == held.keys()
    assert {n for n, t in held.items() if t.dtype == CODES} == {
        n for n in base if n.startswith("model.layers.0.") and n.endswith("_proj.weight")
    }
    with pytest.raises(ValueError, match="is quantized already"):
        convert(target, tmp_path / "twice")
    (source / "part-1.safetensors").unlink()
    with pytest.raises(ValueError, match="no .safetensors file holds"):
        convert(source, tmp_path / "broken")
    assert not (tmp_path / "broken").exists()
    with pytest.raises(FileNotFoundError, match=r"no config.json and \*.safetensors"):
        convert(tmp_path, tmp_path / "nowhere")


def test_point6_mxfp8_digests_cover_codes_and_scales():
    """One bit of a code or of a scale changes the manifest, by name."""
    weights = {
        "w": torch.randint(0, 120, (8, 64), dtype=torch.uint8).view(CODES),
        "w_scale": torch.full((8, 2), 120, dtype=torch.uint8),
    }
    sent = Manifest.of(weights.items(), 1)
    for name in weights:
        changed = {key: tensor.clone() for key, tensor in weights.items()}
        changed[name].view(torch.uint8)[3, 1] ^= 1
        (difference,) = compare(sent, Manifest.of(changed.items(), 1))
        assert difference.startswith(f"{name}: bits differ")
    assert sent.tensors["w"].dtype == "float8_e4m3fn"
