"""Issue 7, point 2: MasterWeights in one process. Sharded models are in test_fsdp.py, transformers.Trainer in test_trainer.py."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import megatron_sr as sr
from megatron_sr.coordinates import check_cover
from megatron_sr.fsdp.coordinates import box, names_of
from megatron_sr.megatron.fused_adam import FusedAdam
from tests.backends.sharded_model import SEED, Model, digests, keyed, make, rounded_wrongly, run

CLASSES = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "LBFGS",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def two_layers() -> nn.Module:
    model = nn.Sequential(nn.Linear(33, 17, bias=False), nn.Linear(17, 5, bias=False))
    for name, parameter in model.named_parameters():
        parameter.data.copy_(keyed(name, 0, parameter.shape) * 4)
    return model.to(torch.bfloat16)


def config(**fields) -> sr.ParamRounding:
    return sr.ParamRounding(**{"seed": SEED, **fields})


def master(model, optimizer_class=torch.optim.AdamW, rounding=None, **options) -> sr.MasterWeights:
    return sr.MasterWeights(optimizer_class, model, rounding=rounding or config(), **{"lr": 3e-4, **options})


def weights_of(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(left, right, strict=True))


# --- every optimizer class


@pytest.mark.parametrize("name", CLASSES)
def test_every_torch_optimizer_class(name):
    """The main params go exactly as the class would train an FP32 model from the same gradients; the weights are their rounding.
    Muon takes matrices alone, L-BFGS needs its closure, and AdamW is the fused step (the next test)."""
    options = dict(foreach=False) if name == "AdamW" else {}
    model, inputs = two_layers(), keyed("x", 1, (8, 33)).bfloat16() * 16
    opt = master(model, getattr(torch.optim, name), lr=1e-3, **options)
    reference = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    plain = getattr(torch.optim, name)(reference, lr=1e-3, **options)
    seen, losses, replayed = [], [], []

    def closure():
        opt.zero_grad()
        losses.append(model(inputs).float().square().mean())
        losses[-1].backward()
        seen.append([p.grad.float() for p in model.parameters()])
        return losses[-1]

    def replay():  # the same gradients once more
        for parameter, grad in zip(reference, seen[len(replayed)]):
            parameter.grad = grad
        replayed.append(True)
        return losses[len(replayed) - 1]

    for step in range(1, 4):
        opt.step(closure)
        plain.step(replay)
        assert opt.steps == step
        assert rounded_wrongly(model, opt) == []
        for main, expected in zip(opt.main_params().values(), reference, strict=True):
            assert torch.equal(main, expected)
    assert len(seen) > 3 if name == "LBFGS" else len(seen) == 3
    assert not equal(weights_of(model), weights_of(two_layers()))


def test_sparse_gradients():
    model = nn.Embedding(50, 6, sparse=True).to(torch.bfloat16)
    opt = master(model, torch.optim.SparseAdam, lr=1e-2)
    before = weights_of(model)
    model(torch.tensor([3, 4])).float().square().sum().backward()
    opt.step()
    assert rounded_wrongly(model, opt) == []
    changed = (model.weight != before[0]).any(1).nonzero().flatten().tolist()
    assert changed == [3, 4]


def test_adamw_is_the_fused_step_and_equals_torch_within_its_rounding():
    """kernels/adamw.py instead of torch's kernels: main params within 4 ulp of value or step after each step (docs/numerics.md)."""
    model = Model()
    opt = make(model)
    reference = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    plain = torch.optim.AdamW(reference, lr=3e-4, weight_decay=0.1, foreach=False)
    for step in (1, 2, 3):
        for (name, _), expected in zip(model.named_parameters(), reference):
            expected.grad = keyed(name, step, expected.shape).bfloat16().float()
        plain.step()
        run(model, opt, step)
        for main, expected in zip(opt.main_params().values(), reference):
            size = torch.maximum(expected.abs(), torch.tensor(3e-4))
            assert ((main - expected).abs() <= 8 * step * size * 2**-23).all()
    assert opt._fused is not None
    assert make(Model(), "SGD").main_params()
    for options in (dict(foreach=True), dict(fused=True), dict(amsgrad=True)):
        own = master(two_layers(), **options)
        own.main_params()
        assert own._fused is None


def test_equals_the_public_functions_for_the_same_name_seed_and_step():
    """The key rule: what Megatron, DeepSpeed or anybody else gets for the same name, seed and step, also by given identities."""
    model = two_layers()
    identities = {
        p: (f"decoder.layers.{i}.weight", [sr.Segment(0, p.numel(), 1000)]) for i, p in enumerate(model.parameters())
    }
    opt = master(model, identities=identities)
    run(model, opt, 1, 2)
    for (param, main), (key, _) in zip(opt.main_params().items(), identities.values()):
        expected = sr.round_to_(torch.empty_like(param), main, noise=sr.Noise(SEED, 2, key), start=1000)
        assert torch.equal(expected, param)


# --- modes


def test_c4_nearest_is_torchs_cast():
    model = Model()
    opt = make(model, mode="nearest")
    run(model, opt, 1, 2)
    assert all(torch.equal(main.bfloat16(), p) for p, main in opt.main_params().items())


def test_include_exclude_fixed_noise_and_formats():
    model = Model()
    opt = make(model, exclude="*norm*")
    run(model, opt, 1, 2, 3)
    assert set(rounded_wrongly(model, opt)) <= {"norm.weight", "norm.bias"}
    assert torch.equal(model.norm.weight, opt.main_params()[model.norm.weight].bfloat16())

    model = two_layers()
    opt = master(model, rounding=config(noise="fixed", format="e8m4"))
    run(model, opt, 1, 2)
    for (name, param), main in zip(model.named_parameters(), opt.main_params().values()):
        expected = sr.round_to_(torch.empty_like(param), main, noise=sr.Noise(SEED, 0, name), format="e8m4")
        assert torch.equal(expected, param)

    model = two_layers().half()
    opt = master(model)
    run(model, opt, 1)
    for (name, param), main in zip(model.named_parameters(), opt.main_params().values()):
        expected = sr.round_to_(torch.empty_like(param), main, noise=sr.Noise(SEED, 1, name), format="fp16")
        assert torch.equal(expected, param)


def test_fp32_params_of_the_model_are_trained_as_they_are():
    model = Model()
    model.norm.float()
    opt, plain = make(model), make(Model())
    run(model, opt, 1, 2)
    assert model.norm.weight.dtype == torch.float32
    mains = opt.main_params()
    assert mains[model.norm.weight] is model.norm.weight
    assert (model.norm.weight != model.norm.weight.bfloat16()).any()
    run(plain._model, plain, 1, 2)
    others = {n: p for n, p in plain._model.named_parameters() if "norm" not in n}
    assert all(torch.equal(dict(model.named_parameters())[n], p) for n, p in others.items())


# --- training loops


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradient_accumulation_and_set_to_none(set_to_none):
    """Two micro-batches: FP32 gradients (torch's `grad_dtype`) or BF16, as the param has them."""
    model = two_layers()
    model[0].weight.grad_dtype = torch.float32
    opt = master(model)
    for _ in (1, 2):
        for micro in (1, 2):
            model(keyed("x", micro, (8, 33)).bfloat16()).float().square().mean().backward()
        assert model[0].weight.grad.dtype == torch.float32
        opt.step()
        opt.zero_grad(set_to_none=set_to_none)
        assert all((p.grad is None) == set_to_none for p in model.parameters())
        assert rounded_wrongly(model, opt) == []
    assert opt.steps == 2


def test_params_without_gradient_are_rounded_anew_and_not_trained():
    """As every main param at every step: what a rank holds of the others does not matter."""
    model, other = Model(), Model()
    opt, plain = make(model), make(other)
    for step in (1, 2, 3):
        for name, parameter in model.named_parameters():
            parameter.grad = None if "down" in name and step > 1 else keyed(name, step, parameter.shape).bfloat16()
        opt.step()
    run(other, plain, 1)
    assert torch.equal(opt.main_params()[model.down.weight], plain.main_params()[other.down.weight])
    assert rounded_wrongly(model, opt) == []


def test_schedulers_and_param_groups():
    model = two_layers()
    opt = master(
        model, params=[{"params": [model[0].weight], "lr": 1e-2}, {"params": [model[1].weight], "weight_decay": 0.0}]
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
    for step in range(3):
        assert [group["lr"] for group in opt.param_groups] == [1e-2 * 0.5**step, 3e-4 * 0.5**step]
        run(model, opt, step)
        assert [group["lr"] for group in opt._inner.param_groups] == [1e-2 * 0.5**step, 3e-4 * 0.5**step]
        scheduler.step()
    assert opt.param_groups[0]["params"][0] is model[0].weight
    assert [group["weight_decay"] for group in opt._inner.param_groups] == [0.01, 0.0]


def test_add_param_group_keeps_the_others_state():
    model, other = two_layers(), two_layers()
    opt, plain = master(model, params=[model[0].weight]), master(other, params=[other[0].weight])
    for m, o in ((model, opt), (other, plain)):
        run(m, o, 1)
    opt.add_param_group({"params": [model[1].weight]})
    for m, o in ((model, opt), (other, plain)):
        run(m, o, 2)
    assert torch.equal(model[0].weight, other[0].weight)
    assert not torch.equal(model[1].weight, other[1].weight)


def test_torch_compile_of_model_and_step():
    """Names lose the wrapper's part; the step, in a compiled function or not, gives the same bits."""
    model, other = Model(), Model()
    compiled = torch.compile(model, backend="eager")
    assert set(names_of(compiled).values()) == {name for name, _ in model.named_parameters()}
    opt, plain = make(compiled), make(other)
    tokens = torch.arange(24).view(4, 6)
    step = torch.compile(lambda: opt.step(), backend="eager")
    for _ in range(2):
        for m, stepping in ((compiled, step), (other, plain.step)):
            m(tokens).float().square().mean().backward()
            stepping()
            m.zero_grad()
    assert opt.steps == 2
    assert digests(model, opt) == digests(other, plain)


def test_tied_parameters_and_checkpoint_wrappers_keep_their_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Model()
    model.head.weight = model.embed.weight
    model.up = checkpoint_wrapper(model.up)
    names = set(names_of(model).values())
    assert "up.weight" in names
    assert "head.weight" not in names
    opt = make(model)
    model(torch.arange(24).view(4, 6)).float().square().mean().backward()
    opt.step()
    assert model.head.weight is model.embed.weight


# --- checkpoints


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("model_first", [True, False])
def test_state_dict_continues_bit_for_bit(optimizer, model_first):
    model = Model()
    opt = make(model, optimizer)
    run(model, opt, 1, 2)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    run(model, opt, 3, 4)
    other = Model()
    resumed = make(other, optimizer)
    if model_first:
        other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert all(torch.equal(p, saved["model"][name]) for name, p in other.named_parameters())
    if not model_first:
        other.load_state_dict(saved["model"])
    assert resumed.steps == 2
    run(other, resumed, 3, 4)
    assert digests(other, resumed) == digests(model, opt)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoint_of_one_process(optimizer, flat, tmp_path):
    """`get_state_dict` asks a new optimizer for its state by a step without gradients: that one is not counted."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = Model()
    opt = make(model, optimizer)
    run(model, opt, 1, 2)
    weights, state = get_state_dict(model, opt, options=options)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    run(model, opt, 3)
    other = Model()
    resumed = make(other, optimizer)
    weights, state = get_state_dict(other, resumed, options=options)
    assert resumed.steps == 0
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state, options=options)
    assert resumed.steps == 2
    run(other, resumed, 3)
    assert digests(other, resumed) == digests(model, opt)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "FusedAdam"])
def test_asking_a_new_optimizer_for_its_state_changes_nothing(optimizer):
    """FusedAdam counts its steps by param group."""
    kind = FusedAdam if optimizer == "FusedAdam" else getattr(torch.optim, optimizer)
    models = [two_layers(), two_layers()]
    asked, plain = (master(model, kind) for model in models)
    get_optimizer_state_dict(models[0], asked)
    for model, opt in zip(models, (asked, plain)):
        run(model, opt, 1, 2)
    assert asked.steps == 2
    assert digests(models[0], asked) == digests(models[1], plain)


def test_weights_loaded_after_the_optimizer_was_made_are_trained():
    model, other = Model(), Model()
    opt = make(model)
    loaded = {name: p * 2 for name, p in other.state_dict().items()}
    model.load_state_dict(loaded)
    other.load_state_dict(loaded)
    plain = make(other)
    run(model, opt, 1)
    run(other, plain, 1)
    assert digests(model, opt) == digests(other, plain)


def test_weights_overwritten_between_steps_are_noticed():
    model = Model()
    opt = make(model)
    run(model, opt, 1)
    with torch.no_grad():
        model.up.weight.copy_(model.up.weight.clone())  # the same bits: nothing has happened
    run(model, opt, 2)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    with torch.no_grad():
        model.up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="1 params, up.weight first, have been changed since the last step"):
        run(model, opt, 3)
    opt.recompute()
    assert rounded_wrongly(model, opt) == []
    with torch.no_grad():
        model.up.weight.mul_(2)
    opt.reload_model_params()
    assert torch.equal(opt.main_params()[model.up.weight], model.up.weight.float())
    run(model, opt, 3)


def test_recompute_gives_the_same_bits_however_often():
    model = Model()
    opt = make(model)
    run(model, opt, 1, 2)
    before = weights_of(model)
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        opt.recompute()
        assert equal(weights_of(model), before)


# --- refusals


def test_c6_what_cannot_be_honoured_is_refused():
    def refused(words, attempt, error=ValueError):
        with pytest.raises(error, match=words):
            attempt()

    refused("found none; convert the model", lambda: master(two_layers().float()))
    mixed = two_layers()
    mixed[0].half()
    refused("of one dtype, but found", lambda: master(mixed))
    refused("model must be a torch.nn.Module", lambda: master(list(two_layers().parameters())), TypeError)
    refused("MXFP8 is Megatron's", lambda: master(two_layers(), rounding=config(format="mxfp8")))
    for field, value in (("log_interval", 5), ("verify_interval", 5), ("save_model", "none")):
        refused("is not for MasterWeights", lambda f=field, v=value: master(two_layers(), rounding=config(**{f: v})))
    refused("match no parameter; names are such as 0.weight",
            lambda: master(two_layers(), rounding=config(exclude="*nrom*")))  # fmt: skip
    other = two_layers()
    refused("is not in the model", lambda: master(two_layers(), params=list(other.parameters())))
    channels_last = nn.Conv2d(3, 4, 3, bias=False).to(torch.bfloat16, memory_format=torch.channels_last)
    refused("parameter weight is not contiguous", lambda: master(channels_last).main_params())
    refused("Invalid learning rate", lambda: master(two_layers(), lr=-1.0))


def test_c6_states_of_others_are_refused():
    model = Model()
    opt = make(model)
    run(model, opt, 1)
    saved = opt.state_dict()
    with pytest.raises(ValueError, match="22 differs from the checkpoint's 21"):
        make(Model(), seed=22).load_state_dict(saved)
    other = Model()
    resumed = make(other, seed=22, on_mismatch="recompute")
    resumed.load_state_dict(saved)
    assert torch.equal(resumed.main_params()[other.up.weight], opt.main_params()[model.up.weight])
    assert not torch.equal(other.up.weight, model.up.weight)
    plain = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="saved by another optimizer than MasterWeights"):
        opt.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="this optimizer of .2.; build it with the same params"):
        master(two_layers()).load_state_dict(saved)
    spoiled = copy.deepcopy(saved)
    del spoiled["state"][3]["main_param"]
    with pytest.raises(ValueError, match="param 3 .of 10. has no main_param"):
        make(Model()).load_state_dict(spoiled)


# --- coordinates


@st.composite
def boxes(draw):
    """A shape and, for each dimension, what a rank may hold of it: up to three separate runs of indices."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    held = [sorted(draw(st.sets(st.integers(0, n - 1), max_size=n))) for n in shape]
    full = [draw(st.booleans()) for _ in shape]
    return shape, [list(range(n)) if whole else indices for n, indices, whole in zip(shape, held, full)]


@settings(max_examples=150, deadline=None)
@given(boxes())
def test_coordinates_of_any_product_of_index_sets(case):
    shape, held = case
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    expected = whole[torch.meshgrid(*map(torch.tensor, held), indexing="ij")].flatten().tolist() if all(held) else []
    runs = []
    for indices in held:
        starts = [i for i, index in enumerate(indices) if i == 0 or index != indices[i - 1] + 1]
        runs.append([(a, b - a, indices[a]) for a, b in zip(starts, [*starts[1:], len(indices)])])
    segments = box(shape, runs)
    check_cover(segments, len(expected), "box")
    found = [s.global_index(i) for s in sorted(segments) for i in range(s.length)]
    assert found == expected
