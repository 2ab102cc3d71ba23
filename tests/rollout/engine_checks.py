"""One process, real vLLM engines: dense, tied with biases, and MoE. Prints "ok <family> <check>" for each check that holds.

A script of its own because vLLM changes the process that it runs in (threads, process groups).
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_sr.rollout import vllm_faults
from megatron_sr.rollout.engine import SamplingConfig, UpdateRefused, WeightsUnverified
from megatron_sr.rollout.manifest import Manifest
from megatron_sr.rollout.packing import count_indistinct, values_only
from megatron_sr.rollout.vllm import VLLMEngine
from megatron_sr.rollout.vllm_readback import live_views
from tests.rollout.bits import hard_weights, shuffled
from tests.tiny_models import make_checkpoint

FAMILIES = {
    "dense": ("qwen3", {}),
    "tied-bias": ("qwen2", {"tied": True, "hidden": 128, "vocab": 250}),  # 250: vLLM pads the vocabulary to 256
    "moe": ("qwen3_moe", {}),
    "moe-padded": ("qwen3_moe", {"moe_width": 48}),  # 48: vLLM pads the experts to 64
}
SAMPLING = SamplingConfig(n=3, temperature=1.0, max_tokens=8, min_tokens=8, ignore_eos=True)
PROMPTS, SEEDS = [[1, 2, 3], [7, 8, 9, 10, 11], [i % 199 for i in range(300)]], [0, 10, 20]


class NotHere(Exception):
    """This machine's processor lacks what a check is about."""


def build(directory, **options):
    return VLLMEngine(directory, max_model_len=320, max_num_seqs=16, max_num_batched_tokens=1024, **options)


def results(engine):
    completions = [c for group in engine.generate(PROMPTS, SAMPLING, SEEDS) for c in group]
    return [(c.token_ids, c.logprobs) for c in completions]


def worker(engine):
    return engine._executor.driver_worker.worker


def model_of(engine):
    return worker(engine).model_runner.get_model()


def views(engine):
    return worker(engine).sr_views()


def module(engine, suffix):
    return next(m for path, m in model_of(engine).named_modules() if path.endswith(suffix))


def check_checkpoint(engine, base):
    assert engine.weights_version() == 0
    assert engine.weights_digest() == Manifest.of(base.items(), 0).digest


def check_updates(engine, base):
    """Twice in a row, in shuffled order, hard bit patterns; read back and compared element by element, not only by digest."""
    for version in (1, 2):
        weights = hard_weights(base, version)
        report = engine.update_weights(iter(shuffled(weights, version)), version)
        assert report.good, report.mismatched
        assert report.tensors == len(base)
        assert report.digest == engine.weights_digest() == Manifest.of(weights.items(), version).digest
        assert engine.weights_version() == report.version == version
        by_value = {name for view in views(engine) if not view.bits for name in view.names}
        assert set(report.value_verified) == by_value
        assert report.indistinct == sum(count_indistinct(weights[name]) for name in by_value)
        for view in views(engine):
            for name, live in zip(view.names, view.read()):
                sent = weights[name]
                if not view.bits:
                    sent, live = values_only(sent), values_only(live)
                assert torch.equal(live.contiguous().view(torch.int16), sent.view(torch.int16)), name
        assert all(c.version == version for group in engine.generate(PROMPTS, SAMPLING, SEEDS) for c in group)


def check_refusals(engine, base):
    """A wrong update changes nothing: the same completions and logprobs afterwards."""
    before, version, good = results(engine), engine.weights_version(), hard_weights(base, 99)
    name = "model.norm.weight"
    broken = good[name].clone()
    broken[0] = float("inf")
    for damaged, number, words in (
        ({k: v for k, v in good.items() if k != name}, version + 1, ("missing", name)),
        ({**good, "model.extra.weight": good[name]}, version + 1, ("not a tensor of the model", "model.extra.weight")),
        ({**good, name: good[name][:-1]}, version + 1, (name, "shape")),
        ({**good, name: good[name].float()}, version + 1, (name, "float32")),
        ({**good, name: broken}, version + 1, (name, "infinite")),
        (good, version, (f"version {version} ", "above")),
    ):
        consumed = iter(damaged.items())
        with pytest.raises(UpdateRefused, match=words[0]) as refusal:
            engine.update_weights(consumed, number)
        assert words[1] in str(refusal.value)
        assert next(consumed, None) is None, "a collective export would hang: the iterable was not used up"
    with pytest.raises(UpdateRefused, match="twice"):
        engine.update_weights([*good.items(), (name, good[name])], version + 1)
    assert engine.weights_version() == version
    assert results(engine) == before


def check_prefix_cache(engine, base):
    """The long prompt's cached keys and values are those of the old weights until the cache is reset."""
    version, weights = engine.weights_version(), hard_weights(base, 50)
    reset, engine._requests.forget_cache = engine._requests.forget_cache, lambda: None
    results(engine)  # fills the cache
    engine.update_weights(weights.items(), version + 1)
    stale = results(engine)
    engine._requests.forget_cache = reset
    engine.update_weights(weights.items(), version + 2)
    assert results(engine) != stale, "the cache was not used, so this check proves nothing"
    return weights  # the fresh engine must agree with the results after the reset


def check_flipped_bits(engine, base):
    """One bit of one live tensor: found by name; no completions until a good update, which may carry the same version."""
    weights = hard_weights(base, 60)
    version = engine.weights_version() + 1
    assert engine.update_weights(weights.items(), version).good
    for damage, names in damages(engine):
        damage()
        with pytest.raises(WeightsUnverified, match="not those") as refusal:
            engine.weights_digest()
        assert any(name in str(refusal.value) for name in names), refusal.value
        with pytest.raises(WeightsUnverified, match="update the weights again"):
            engine.generate(PROMPTS, SAMPLING, SEEDS)
        assert engine.update_weights(weights.items(), version).good
        assert engine.weights_version() == version
        results(engine)


def damages(engine):
    norm, table = module(engine, "layers.1.input_layernorm"), module(engine, "embed_tokens")
    yield lambda: flip(norm.weight, 5, 0), ["layers.1.input_layernorm.weight"]
    yield lambda: flip(table.weight, 77, 15), ["embed_tokens.weight"]
    yield lambda: damage_linear(module(engine, "layers.0.self_attn.o_proj")), ["layers.0.self_attn.o_proj.weight"]
    if any(path.endswith("routed_experts") for path, _ in model_of(engine).named_modules()):
        experts = module(engine, "layers.1.mlp.experts.routed_experts")
        yield (
            lambda: flip(experts.w13_weight, 3, 7),
            [f"layers.1.mlp.experts.0.{x}_proj.weight" for x in ("gate", "up")],
        )
        yield lambda: flip(experts.w2_weight, -1, 1), ["layers.1.mlp.experts.3.down_proj.weight"]


def flip(parameter, element, bit):
    bits = parameter.data.view(torch.int16).view(-1)
    bits[element] ^= -0x8000 if bit == 15 else 1 << bit


def damage_linear(linear):
    """The weight sits behind the kernel's handle: give the layer a kernel built from the weight with one bit flipped."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.utils import replace_parameter

    from megatron_sr.rollout.packing import probe_linear

    held = linear.weight
    width = linear.input_size_per_partition
    weight = probe_linear(lambda x: linear.cpu_linear(x, held, None), width).contiguous()
    flip(torch.nn.Parameter(weight), 1000, 3)
    replace_parameter(linear, "weight", weight)
    dispatch_cpu_unquantized_gemm(linear, remove_weight=True)


def check_aborted_update(engine, base):
    """An update that dies half-way: no completions from the mixture; the next update is whole again."""
    weights, version, model = hard_weights(base, 70), engine.weights_version(), model_of(engine)
    load = type(model).load_weights

    def dies(self, tensors):
        load(self, iter(list(tensors)[: len(weights) // 2]))
        raise OSError("lost the connection")

    type(model).load_weights = dies
    with pytest.raises(OSError, match="lost the connection"):
        engine.update_weights(weights.items(), version + 1)
    type(model).load_weights = load
    assert engine.weights_version() == version
    with pytest.raises(WeightsUnverified, match="did not finish"):
        engine.generate(PROMPTS, SAMPLING, SEEDS)
    assert engine.update_weights(weights.items(), version + 1).good


def check_faults_are_seen(engine, base, family):
    """Without the workarounds of `vllm_faults` the read-back must name what vLLM gets wrong; this proves that it can fail."""
    weights, version = hard_weights(base, 80), engine.weights_version()
    if family == "moe":
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
            UnquantizedFusedMoEMethod as Method,
        )

        fixed, Method._setup_kernel = Method._setup_kernel, Method._setup_kernel.__wrapped__
        report = engine.update_weights(weights.items(), version + 1)
        Method._setup_kernel = fixed
        assert report.mismatched == sorted(name for name in weights if ".mlp.experts." in name), report.mismatched
    else:
        if not model_of(engine).lm_head.cpu_linear.__closure__:
            raise NotHere("without oneDNN for BF16 a tied head keeps no packed copy, so vLLM gets it right")
        find, vllm_faults._tied_head = vllm_faults._tied_head, lambda model: None
        report = engine.update_weights(weights.items(), version + 1)
        vllm_faults._tied_head = find
        assert report.mismatched == ["model.embed_tokens.weight"], report.mismatched
    assert not report.good
    assert engine.weights_version() == version
    with pytest.raises(WeightsUnverified, match="does not hold the trainer's bits"):
        engine.generate(PROMPTS, SAMPLING, SEEDS)
    assert engine.update_weights(weights.items(), version + 1).good


def check_sampling(engine):
    """Seeds, stop tokens, greedy, prompts that do not fit; a completion's logprobs are those of its tokens."""
    with pytest.raises(ValueError, match="keep the seeds at least n=3 apart"):
        engine.generate(PROMPTS[:2], SAMPLING, [5, 7])
    for prompts, words in (([[]], "empty"), ([[0] * 313], "max_model_len=320"), ([[256]], "outside 0..255")):
        with pytest.raises(ValueError, match=words):
            engine.generate(prompts, SAMPLING, [0])
    assert engine.generate([], SAMPLING, []) == []
    group = engine.generate([[1, 2, 3]], SamplingConfig(n=4, max_tokens=64), [100])[0]
    again = engine.generate([[9], [1, 2, 3]], SamplingConfig(n=4, max_tokens=64), [0, 100])[1]
    assert [c.token_ids for c in group] == [c.token_ids for c in again], "completions must follow the seed alone"
    assert len({tuple(c.token_ids) for c in group}) == 4
    assert [c.prompt_index for c in again] == [1] * 4
    for c in group:
        assert len(c.logprobs) == len(c.token_ids)
        assert all(p < 0 for p in c.logprobs)
    first = group[0].token_ids
    stop = first[3]
    stopped = engine.generate([[1, 2, 3]], SamplingConfig(n=1, max_tokens=64, stop_token_ids=(stop,)), [100])[0][0]
    assert stopped.token_ids == first[: first.index(stop) + 1]
    assert stopped.finish_reason == "stop"
    later = SamplingConfig(n=1, max_tokens=64, min_tokens=60, stop_token_ids=tuple(range(200)))
    assert len(engine.generate([[1, 2, 3]], later, [100])[0][0].token_ids) >= 60
    greedy = SamplingConfig(n=1, temperature=0.0, max_tokens=5, ignore_eos=True)
    assert engine.generate([[1, 2, 3]], greedy, [1]) == engine.generate([[1, 2, 3]], greedy, [2])
    ends = SamplingConfig(n=48, max_tokens=250), SamplingConfig(n=48, max_tokens=250, ignore_eos=True)
    stopping, going_on = (engine.generate([[1, 2, 3]], sampling, [0])[0] for sampling in ends)
    assert {c.finish_reason for c in stopping} == {"stop", "length"}
    assert all(
        (c.token_ids[-1] == 255) == (c.finish_reason == "stop") and 255 not in c.token_ids[:-1] for c in stopping
    )
    assert all(len(c.token_ids) == 250 for c in going_on)
    assert any(255 in c.token_ids for c in going_on)


def check_amx_layouts(engine):
    """What vLLM does on CPUs with AMX: its packers run here too, its kernels do not. All bit patterns come back."""
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.model_executor.layers import utils

    if not hasattr(torch.ops._C, "convert_weight_packed"):
        raise NotHere("vLLM's packers for AMX come with its AVX-512 build only")

    def random_bits(*shape):
        return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)

    def tree(path, leaf):
        """A module that holds `leaf` at `path`."""
        for part in reversed(path.split(".")):
            parent = torch.nn.Module()
            parent.add_module(part, leaf)
            leaf = parent
        return leaf

    use_amx, utils.check_cpu_sgl_kernel = utils.check_cpu_sgl_kernel, lambda n, k, dtype: True
    for name, shape in (("self_attn.o_proj", (96, 64)), ("mlp.gate", (4, 64))):  # under 16 rows: transposed, FP32
        linear, weight = torch.nn.Module(), random_bits(*shape)
        if shape[0] < 16:  # FP32 does not keep the bits of a NaN
            weight = torch.where(weight.isfinite(), weight, torch.ones_like(weight))
        linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        utils.dispatch_cpu_unquantized_gemm(linear, remove_weight=True)
        assert linear.weight.numel() == 0
        (view,) = live_views(tree(f"model.layers.0.{name}", linear), {f"model.layers.0.{name}.weight": shape})
        assert view.bits
        assert torch.equal(view.read()[0].contiguous().view(torch.int16), weight.view(torch.int16)), name
    utils.check_cpu_sgl_kernel = use_amx

    width, padded, hidden = 48, 64, 96
    w13, w2 = random_bits(2, 2 * padded, hidden), random_bits(2, hidden, padded)
    for padding in (w13[:, width:padded], w13[:, padded + width :], w2[:, :, width:]):
        padding.zero_()
    experts = torch.nn.Module()
    experts.w13_weight = torch.nn.Parameter(cpu_prepack_moe_weight(w13, "amx"), requires_grad=False)
    experts.w2_weight = torch.nn.Parameter(cpu_prepack_moe_weight(w2, "amx"), requires_grad=False)
    experts.quant_method = SimpleNamespace(
        unquantized_backend=SimpleNamespace(name="CPU"),
        moe_kernel=SimpleNamespace(fused_experts=SimpleNamespace(isa="amx", _use_zentorch=False)),
    )
    prefix = "model.layers.0.mlp.experts"
    expected = {}
    for e in (0, 1):
        expected[f"{prefix}.{e}.gate_proj.weight"] = w13[e, :width]
        expected[f"{prefix}.{e}.up_proj.weight"] = w13[e, padded : padded + width]
        expected[f"{prefix}.{e}.down_proj.weight"] = w2[e, :, :width]
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    found = live_views(tree(f"{prefix}.routed_experts", experts), shapes)
    for view in found:
        for name, live in zip(view.names, view.read()):
            assert torch.equal(live.contiguous().view(torch.int16), expected[name].contiguous().view(torch.int16)), name
    experts.quant_method.unquantized_backend.name = "FLASHINFER_TRTLLM"
    with pytest.raises(ValueError, match="FLASHINFER_TRTLLM MoE backend, which cannot be read back; choose the Triton"):
        live_views(tree(f"{prefix}.routed_experts", experts), shapes)


def check_large_linears(engine):
    """Linears too large to be probed stay plain. FP32, which oneDNN has on every processor; the limit lowered to a small layer's."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    def linear(rows, columns):
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(torch.randn(rows, columns), requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        return layer

    limit, vllm_faults.PROBE_LIMIT = vllm_faults.PROBE_LIMIT, 64 * 64 * 32
    packed, plain = linear(32, 64), linear(33, 64)
    vllm_faults.PROBE_LIMIT = limit
    assert packed.cpu_linear.__closure__, "oneDNN was not used, so this proves nothing"
    assert not packed.weight.numel()
    assert not plain.cpu_linear.__closure__
    assert plain.weight.shape == (33, 64)


def check_fresh_engine(directory, weights, after_update):
    """Logprobs after live updates equal those of an engine that loaded the same weights from disk: difference 0.0."""
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    engine = build(directory)
    assert engine.weights_digest() == Manifest.of(weights.items(), 0).digest
    fresh = results(engine)
    assert [tokens for tokens, _ in fresh] == [tokens for tokens, _ in after_update]
    assert max(abs(a - b) for (_, x), (_, y) in zip(fresh, after_update) for a, b in zip(x, y)) == 0.0
    engine.shutdown()


def check_fp16(directory):
    """An FP16 engine: its weights are the checkpoint's, cast; then every finite pattern of bits, subnormals and -0.0 too, read back."""
    base = {name: tensor.half() for name, tensor in load_file(directory / "model.safetensors").items()}
    engine = build(directory, dtype="float16")
    assert engine.weights_digest() == Manifest.of(base.items(), 0).digest
    generator = torch.Generator().manual_seed(16)
    bits = {name: torch.randint(-0x8000, 0x7C00, tensor.shape, generator=generator) for name, tensor in base.items()}
    bits = {
        name: torch.where(b < -0x400, b.clamp(max=-0x401), b.clamp(min=0)) for name, b in bits.items()
    }  # no Inf, no NaN
    weights = {name: b.to(torch.int16).view(torch.float16) for name, b in bits.items()}
    report = engine.update_weights(weights.items(), 1)
    assert report.good, report.mismatched
    assert report.digest == engine.weights_digest() == Manifest.of(weights.items(), 1).digest
    by_value = [name for view in views(engine) if not view.bits for name in view.names]
    assert report.indistinct == sum(int((bits[name] == -0x8000).sum()) for name in by_value), "only -0.0 may hide"
    with pytest.raises(UpdateRefused, match="bfloat16, the model torch.float16"):
        engine.update_weights(((name, w.bfloat16()) for name, w in weights.items()), 2)
    assert engine.update_weights(base.items(), 2).good
    assert all(len(tokens) == 8 for tokens, _ in results(engine))
    engine.shutdown()


def check_family(family, directory):
    kind, arguments = FAMILIES[family]
    make_checkpoint(directory, kind, **arguments)
    base = load_file(directory / "model.safetensors")
    torch.manual_seed(3)
    state, set_num_threads = torch.get_rng_state(), torch.set_num_threads
    engine = build(directory)
    assert torch.equal(state, torch.get_rng_state()), "building an engine moved the trainer's random state"
    assert torch.set_num_threads is set_num_threads, "building an engine replaced torch.set_num_threads"

    def holds(check, *arguments):
        name = check.__name__.removeprefix("check_").replace("_", "-")
        try:
            result = check(engine, *arguments)
        except NotHere as reason:
            print(f"skip {family} {name}: {reason}", flush=True)
        else:
            print(f"ok {family} {name}", flush=True)
            return result

    holds(check_checkpoint, base)
    if family == "dense":
        holds(check_sampling)
        holds(check_amx_layouts)
        holds(check_large_linears)
    for check in (check_updates, check_flipped_bits):
        holds(check, base)
    if family != "moe-padded":
        holds(check_refusals, base)
        holds(check_aborted_update, base)
    if family in ("tied-bias", "moe"):
        holds(check_faults_are_seen, base, family)
    weights = holds(check_prefix_cache, base)
    after_update = results(engine)
    engine.shutdown()
    with pytest.raises(WeightsUnverified, match="shut down"):
        engine.generate(PROMPTS, SAMPLING, SEEDS)
    with pytest.raises(UpdateRefused, match="shut down"):
        engine.update_weights(base.items(), 100)
    engine = None
    if family == "tied-bias":
        check_fp16(directory)
        print(f"ok {family} fp16", flush=True)
    check_fresh_engine(directory, weights, after_update)
    print(f"ok {family} fresh-engine", flush=True)


def main():
    torch.set_num_threads(1)
    for family in sys.argv[2:]:
        check_family(family, Path(sys.argv[1]) / family)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
