"""One process, real vLLM engines that hold MXFP8 (emulated on CPU). Prints "ok <family> <check>" for each check that holds."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_sr import Noise, mxfp8
from megatron_sr.rollout import mxfp8_audit
from megatron_sr.rollout.engine import UpdateRefused, WeightsUnverified
from megatron_sr.rollout.manifest import Manifest
from megatron_sr.rollout.mxfp8_checkpoint import convert
from megatron_sr.rollout.mxfp8_layout import CODES, SCALE, dequantized
from tests.rollout.engine_checks import build, results
from tests.tiny_models import make_checkpoint

FAMILIES = {"dense": ("qwen3", {"layers": 3}), "moe": ("qwen3_moe", {"layers": 2})}


def stochastic(base, step):
    """MXFP8 tensors of weights near `base`, as a trainer would send them: stochastic codes, BF16 for the rest."""
    generator, out = torch.Generator().manual_seed(step), {}
    for name, tensor in base.items():
        moved = (tensor.float() + 0.01 * torch.randn(tensor.shape, generator=generator)).bfloat16()
        if not name.endswith("_proj.weight"):
            out[name] = moved
            continue
        blocks = mxfp8.quantize(moved, noise=Noise(1, step, name, 1), min_scale=mxfp8.BF16_MIN_SCALE)
        out |= {name: blocks.data.view(CODES), name + SCALE: blocks.scale}
    return out


def hard(sent, seed):
    """The same tensors with every code but NaN, and scales over the range that BF16 follows, at random."""
    generator, out = torch.Generator().manual_seed(seed), {}
    for name, tensor in sent.items():
        if tensor.dtype == CODES:
            codes = torch.randint(0, 254, tensor.shape, generator=generator, dtype=torch.uint8)
            tensor = torch.where(codes >= 127, codes + 1, codes).view(CODES)
        elif tensor.dtype == torch.uint8:
            tensor = torch.randint(3, 240, tensor.shape, generator=generator, dtype=torch.uint8)
        out[name] = tensor
    return out


def worker(engine):
    return engine._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def read_back(engine):
    out = {}
    for view in worker(engine).sr_views():
        for name, live in zip(view.names, view.read()):
            out.setdefault(name, live)
    return out


def check_load(engine, base, folder):
    """The converted checkpoint is what the engine holds, codes and scales."""
    held = load_file(folder / "mxfp8" / "model.safetensors")
    assert {t.dtype for t in held.values()} == {torch.bfloat16, torch.uint8, CODES}
    assert engine.weights_version() == 0
    assert engine.weights_digest() == Manifest.of(held.items(), 0).digest


def check_updates(engine, base, folder):
    """Twice in a row: stochastic codes, then hard ones; read back bit for bit, element by element."""
    for version, sent in ((1, stochastic(base, 1)), (2, hard(stochastic(base, 2), 5))):
        report = engine.update_weights(iter(sent.items()), version)
        assert report.good, report.mismatched
        assert report.tensors == len(sent)
        assert report.digest == engine.weights_digest() == Manifest.of(sent.items(), version).digest
        live = read_back(engine)
        assert live.keys() == sent.keys()
        for name, tensor in sent.items():
            if name not in report.value_verified:
                same = live[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
                assert live[name].dtype == tensor.dtype, name
                assert torch.equal(*same), name
        assert not [name for name in report.value_verified if name + SCALE in sent]


def check_logprobs(engine, base, folder):
    """Difference 0.0 to a BF16 engine that holds the dequantized weights, after a live update."""
    sent = stochastic(base, 3)
    assert engine.update_weights(sent.items(), engine.weights_version() + 1).good
    mine = results(engine)
    save_file(dequantized(sent), folder / "bf16" / "model.safetensors", metadata={"format": "pt"})
    other = build(folder / "bf16")
    theirs = results(other)
    other.shutdown()
    assert [tokens for tokens, _ in mine] == [tokens for tokens, _ in theirs]
    assert max(abs(a - b) for (_, x), (_, y) in zip(mine, theirs) for a, b in zip(x, y)) == 0.0


def check_flipped_bits(engine, base, folder):
    """A scale, a value that stays on the grid and one that leaves it: found by name; no completions until a good update."""
    sent, version = stochastic(base, 4), engine.weights_version() + 1
    assert engine.update_weights(sent.items(), version).good
    modules = dict(worker(engine).model_runner.get_model().named_modules())
    layer = modules["model.layers.1.self_attn.o_proj"]
    experts = modules.get("model.layers.1.mlp.experts.routed_experts")
    damages = [
        (lambda: layer.weight_scale.data.view(-1)[3].add_(1), "layers.1.self_attn.o_proj.weight"),
        (lambda: layer.weight.data.view(-1)[70].neg_(), "layers.1.self_attn.o_proj.weight"),
        (lambda: layer.weight.data.view(torch.int16).view(-1)[70].add_(1), "layers.1.self_attn.o_proj.weight"),
    ]
    if experts is not None:
        damages.append((lambda: experts.w2_weight_scale.data.view(-1)[-1].add_(1), "mlp.experts.3.down_proj.weight"))
        damages.append((lambda: experts.w13_weight.data.view(torch.int16).view(-1)[9].add_(1), "mlp.experts.0."))
    for damage, name in damages:
        damage()
        with pytest.raises(WeightsUnverified, match="not those") as refusal:
            engine.weights_digest()
        assert name in str(refusal.value)
        with pytest.raises(WeightsUnverified, match="update the weights again"):
            results(engine)
        assert engine.update_weights(sent.items(), version).good


def check_refusals(engine, base, folder):
    """Wrong dtypes, a missing scale, NaN codes: nothing changes."""
    before, version, good = results(engine), engine.weights_version(), stochastic(base, 9)
    name = "model.layers.0.self_attn.q_proj.weight"
    nan = good[name].view(torch.uint8).clone()
    nan[0, 0] = 0x7F
    for damaged, words in (
        ({**good, name: base[name]}, (name, "bfloat16, the model torch.float8_e4m3fn")),
        ({k: v for k, v in good.items() if k != name + SCALE}, ("missing", name + SCALE)),
        ({**good, name + SCALE: good[name + SCALE].float()}, (name + SCALE, "float32")),
        ({**good, name + SCALE: good[name + SCALE][:, :1]}, (name + SCALE, "shape")),
        ({**good, name: nan.view(CODES)}, (name, "NaN")),
        ({**good, "model.norm.weight": good["model.norm.weight"].to(CODES)}, ("model.norm.weight", "float8_e4m3fn")),
    ):
        with pytest.raises(UpdateRefused) as refusal:
            engine.update_weights(damaged.items(), version + 1)
        assert all(word in str(refusal.value) for word in words), refusal.value
    assert engine.weights_version() == version
    assert results(engine) == before


def check_audit(engine, base, folder):
    """Per layer, both sides; the live modules of this engine agree with its checkpoint's layout."""
    rows = mxfp8_audit.audit_engine(worker(engine).model_runner.get_model(), worker(engine).model_config.hf_config)
    mxfp8_audit.check(rows)
    assert {row.name for row in rows} == set(base)
    quantized = {row.name for row in rows if row.engine == "mxfp8"}
    assert quantized == {name for name in base if name.endswith("_proj.weight")}
    assert mxfp8_audit.table(rows).count("mxfp8     mxfp8") == len(quantized)


def check_substring_trap(folder):
    """vLLM would take `mlp.gate` for `mlp.gate_up_proj` too: refused before the engine is built."""
    config = json.loads((folder / "mxfp8" / "config.json").read_text())
    config["quantization_config"]["ignore"].append("model.layers.1.mlp.gate")
    (folder / "mxfp8" / "config.json").write_text(json.dumps(config))
    words = "ignores 'model.layers.1.mlp.gate', which names no module above model.layers.1.mlp.gate_proj.weight"
    with pytest.raises(ValueError, match=words):
        build(folder / "mxfp8")


def check_bf16_layers(folder):
    """First and last layer in BF16: the engine leaves exactly those alone."""
    convert(folder / "base", folder / "ends", bf16_layers={0, 2})
    engine = build(folder / "ends")
    held = load_file(folder / "ends" / "model.safetensors")
    assert {int(n.split(".")[2]) for n, t in held.items() if t.dtype == CODES} == {1}
    assert engine.weights_digest() == Manifest.of(held.items(), 0).digest
    engine.shutdown()


def check_family(family, folder):
    kind, arguments = FAMILIES[family]
    make_checkpoint(folder / "base", kind, **arguments)
    make_checkpoint(folder / "bf16", kind, **arguments)
    base = load_file(folder / "base" / "model.safetensors")
    convert(folder / "base", folder / "mxfp8")
    engine = build(folder / "mxfp8")
    for check in (check_load, check_audit, check_updates, check_flipped_bits, check_refusals, check_logprobs):
        check(engine, base, folder)
        print(f"ok {family} {check.__name__.removeprefix('check_').replace('_', '-')}", flush=True)
    engine.shutdown()
    if family == "dense":
        check_bf16_layers(folder)
        print(f"ok {family} bf16-layers", flush=True)
        check_substring_trap(folder)
        print(f"ok {family} substring-trap", flush=True)


def main():
    torch.set_num_threads(1)
    for family in sys.argv[2:]:
        check_family(family, Path(sys.argv[1]) / family)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
