"""Issue 7, point 3: FusedAdam of Transformer Engine and Apex through step hooks. The kernels need a GPU: see the stand-ins."""

import copy

import pytest
import torch

from megatron_sr import Noise, ParamRounding, Segment, round_to_
from megatron_sr.fused_adam.hooks import round_fused_adam
from megatron_sr.kernels import remainder
from megatron_sr.kernels.adamw import AdamWPlan
from tests.backends.fused_adam_stand_in import ApexStandIn, TransformerEngineStandIn
from tests.unit.values import bits_of

CONFIG = ParamRounding(seed=11)
SIZES = {"a.weight": 4001, "b.weight": 1000, "frozen.weight": 77}
SETTINGS = dict(lr=1e-4, weight_decay=0.1)


def make(kind=TransformerEngineStandIn, config=CONFIG, dtype=torch.bfloat16, **options):
    """(optimizer, {name: param}, rounding); a shard of a bigger tensor, element 100 first."""
    generator = torch.Generator().manual_seed(1)
    params = {
        name: torch.nn.Parameter((torch.randn(n, generator=generator) * 0.02).to(dtype)) for name, n in SIZES.items()
    }
    optimizer = kind(list(params.values()), **SETTINGS, **options)
    identities = {p: (name, [Segment(0, p.numel(), 100)]) for name, p in params.items()}
    return optimizer, params, round_fused_adam(optimizer, identities, config)


def remainders(**options):
    return make(store_param_remainders=True, **options)


def give_grads(params: dict, step: int) -> None:
    for number, (name, param) in enumerate(params.items()):
        generator = torch.Generator().manual_seed(100 * step + number)
        grad = (torch.randn(param.shape, generator=generator) * 1e-3).to(param.dtype)
        param.grad = None if name.startswith("frozen") else grad


def run(optimizer, params, *steps) -> None:
    for step in steps:
        give_grads(params, step)
        optimizer.step()


def main_of(optimizer, param) -> torch.Tensor:
    return optimizer.get_unscaled_state(param, "master_param")


def rounded(name: str, main: torch.Tensor, step: int, format="bf16") -> torch.Tensor:
    dtype = torch.float16 if format == "fp16" else torch.bfloat16
    out = torch.zeros(main.shape, dtype=dtype)
    return round_to_(out, main, noise=Noise(CONFIG.seed, step, name), start=100, format=format)


def assert_rounded(optimizer, params, step: int) -> None:
    for name, param in params.items():
        assert torch.equal(bits_of(param.detach()), bits_of(rounded(name, main_of(optimizer, param), step))), name


@pytest.mark.parametrize("store", [False, True], ids=["fp32 main params", "16-bit remainders"])
def test_te_params_are_the_rounding_of_the_main_params_after_every_step(store):
    optimizer, params, rounding = make(store_param_remainders=store)
    for step in (1, 2, 3):
        run(optimizer, params, step)
        assert rounding.step == step
        assert_rounded(optimizer, params, step)
    assert optimizer.state[params["a.weight"]]["master_param"].dtype == (torch.int16 if store else torch.float32)
    assert (bits_of(params["a.weight"].detach()) != bits_of(main_of(optimizer, params["a.weight"]).bfloat16())).any()


def test_te_remainders_and_fp32_main_params_train_alike_bit_for_bit():
    """Ten steps: the hooks around the remainder kernel lose nothing, and equal the plan of our own fused step."""
    both = [make(store_param_remainders=store) for store in (False, True)]
    p = {name: param.detach().clone() for name, param in both[0][1].items()}
    name = "a.weight"
    state = [p[name].float(), torch.zeros(SIZES[name]), torch.zeros(SIZES[name])]
    plan = AdamWPlan([p[name]], *([t] for t in state), [(name, [Segment(0, SIZES[name], 100)])], seed=CONFIG.seed)
    for step in range(1, 11):
        for optimizer, params, _ in both:
            run(optimizer, params, step)
        plan.step_([both[0][1][name].grad], step=step, **SETTINGS)
        for name_ in SIZES:
            (first, params, _), (second, others, _) = both
            assert torch.equal(bits_of(params[name_].detach()), bits_of(others[name_].detach()))
            assert torch.equal(bits_of(main_of(first, params[name_])), bits_of(main_of(second, others[name_])))
        assert torch.equal(bits_of(p[name]), bits_of(both[1][1][name].detach()))


def test_te_params_without_gradient_and_excluded_params():
    config = ParamRounding(seed=CONFIG.seed, exclude="b.*")
    for store in (False, True):
        optimizer, params, _ = make(config=config, store_param_remainders=store)
        run(optimizer, params, 1, 2)
        main = main_of(optimizer, params["b.weight"])
        ties = bits_of(main) & 0xFFFF == 0x8000
        assert torch.equal(bits_of(params["b.weight"].detach())[~ties], bits_of(main.bfloat16())[~ties])
        assert torch.equal(params["frozen.weight"], main_of(optimizer, params["frozen.weight"]).bfloat16())


def test_te_fp16_params_with_fp32_main_params():
    optimizer, params, rounding = make(dtype=torch.float16)
    run(optimizer, params, 1, 2)
    assert rounding.config.format == "fp16"
    for name, param in params.items():
        assert torch.equal(param.detach(), rounded(name, main_of(optimizer, param), 2, "fp16"))


def test_apex_fp32_main_params():
    optimizer, params, rounding = make(ApexStandIn)
    params.pop("frozen.weight").grad = torch.zeros(77, dtype=torch.bfloat16)
    run(optimizer, params, 1, 2)
    assert rounding.step == 2
    for param, main in zip(params.items(), optimizer.param_groups_master[0]["params"]):
        assert torch.equal(param[1].detach(), rounded(param[0], main, 2))


def test_apex_c7_a_step_that_the_grad_scaler_skips_draws_nothing():
    class Scaler:
        found_inf = 1

    optimizer, params, rounding = make(ApexStandIn)
    params["frozen.weight"].grad = torch.zeros(77, dtype=torch.bfloat16)
    del params["frozen.weight"]
    run(optimizer, params, 1)
    before = {name: param.detach().clone() for name, param in params.items()}
    optimizer.step(grad_scaler=Scaler())
    assert rounding.step == 1
    assert all(torch.equal(param, before[name]) for name, param in params.items())


# --- remainders and stochastic params are never mixed up


@pytest.mark.parametrize("store", [False, True], ids=["fp32 main params", "16-bit remainders"])
@pytest.mark.parametrize("model_first", [True, False])
def test_corruption_saving_and_loading_continues_bit_for_bit(store, model_first):
    optimizer, params, _ = make(store_param_remainders=store)
    run(optimizer, params, 1, 2)
    weights = {name: param.detach().clone() for name, param in params.items()}
    saved = copy.deepcopy(optimizer.state_dict())
    assert_rounded(optimizer, params, 2)  # saving has changed nothing
    run(optimizer, params, 3, 4)

    resumed, others, rounding = make(store_param_remainders=store)
    with torch.no_grad():
        for param in others.values():
            param.zero_()

    def load_model():
        with torch.no_grad():
            for name, param in others.items():
                param.copy_(weights[name])

    if model_first:
        load_model()
    resumed.load_state_dict(saved)
    if not model_first:
        load_model()
    assert rounding.step == 2
    assert_rounded(resumed, others, 2)
    run(resumed, others, 3, 4)
    for name in SIZES:
        assert torch.equal(bits_of(others[name].detach()), bits_of(params[name].detach()))
        assert torch.equal(bits_of(main_of(resumed, others[name])), bits_of(main_of(optimizer, params[name])))


def test_corruption_a_checkpoint_is_refused_by_plain_transformer_engine():
    """A reader that knows nearest form only would spoil a quarter of the main params. The main params are saved whole:
    FP32 where it asserts int16."""
    optimizer, params, _ = remainders()
    run(optimizer, params, 1)
    saved = optimizer.state_dict()
    assert saved["state"][0]["master_param"].dtype == torch.float32
    plain = TransformerEngineStandIn([torch.nn.Parameter(p.detach().clone()) for p in params.values()],
                                     store_param_remainders=True)  # fmt: skip
    with pytest.raises(AssertionError):
        plain.load_state_dict(saved)
    without = TransformerEngineStandIn([torch.nn.Parameter(p.detach().clone()) for p in params.values()])
    without.load_state_dict(saved)  # with FP32 main params it may go on
    assert torch.equal(without.state_dict()["state"][0]["master_param"], main_of(optimizer, params["a.weight"]))


def test_corruption_remainders_without_main_params_cannot_be_stepped_or_saved():
    """As Megatron's placeholders that no main param has replaced."""
    optimizer, params, _ = remainders()
    run(optimizer, params, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["master_param"] = optimizer.state[params["a.weight"]]["master_param"].clone()
    resumed, others, _ = remainders()
    resumed.load_state_dict(saved)
    for attempt in (lambda: run(resumed, others, 2), resumed.state_dict):
        with pytest.raises(RuntimeError, match="remainders of 1 params were loaded without their main params"):
            attempt()
    resumed.set_scaled_state(others["a.weight"], "master_param", main_of(optimizer, params["a.weight"]))
    run(resumed, others, 2)
    run(optimizer, params, 2)
    assert torch.equal(others["a.weight"], params["a.weight"])
    resumed.set_scaled_state(others["a.weight"], "master_param", torch.zeros(4001, dtype=torch.int16))
    with pytest.raises(RuntimeError, match="without their main params"):
        run(resumed, others, 3)


@pytest.mark.parametrize("failing", [0, 1], ids=["before the first param", "in the middle"])
def test_corruption_an_exception_between_the_hooks_loses_nothing(failing):
    optimizer, params, rounding = remainders()
    run(optimizer, params, 1)
    before = {name: main_of(optimizer, param) for name, param in params.items()}
    optimizer.fail_after = failing
    with pytest.raises(RuntimeError, match="the kernel failed"):
        run(optimizer, params, 2)
    assert (rounding.step, rounding.form) == (1, None)  # nearest form, and it knows
    changed = [name for name, param in params.items() if not torch.equal(main_of(optimizer, param), before[name])]
    assert changed == (["a.weight"] if failing else [])
    state = optimizer.state_dict()  # saved in between: still the right main params
    for number, name in enumerate(SIZES):
        assert torch.equal(state["state"][number]["master_param"], main_of(optimizer, params[name]))
    rounding.recompute()
    assert_rounded(optimizer, params, 1)
    optimizer.fail_after = None
    run(optimizer, params, 3)
    assert_rounded(optimizer, params, 2)


def test_corruption_to_nearest_and_back_as_often_as_one_likes():
    optimizer, params, rounding = remainders()
    run(optimizer, params, 1, 2)
    weights = {name: param.detach().clone() for name, param in params.items()}
    mains = {name: main_of(optimizer, param) for name, param in params.items()}
    for _ in range(2):
        rounding.to_nearest()
        rounding.to_nearest()
        assert all(torch.equal(main_of(optimizer, params[name]), mains[name]) for name in SIZES)
        rounding.recompute()
        rounding.recompute()
        assert all(torch.equal(params[name], weights[name]) for name in SIZES)
    rounding.set_step(9)
    assert all(torch.equal(main_of(optimizer, params[name]), mains[name]) for name in SIZES)
    assert_rounded(optimizer, params, 9)


def test_corruption_a_closure_would_see_other_weights_and_is_refused():
    optimizer, params, _ = remainders()
    give_grads(params, 1)
    with pytest.raises(ValueError, match="evaluate the loss before the step"):
        optimizer.step(lambda: 0.0)


# --- refusals


def test_c6_what_cannot_be_rounded_is_refused():
    class DistributedFusedAdam(TransformerEngineStandIn):
        pass

    params = [torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))]
    identity = {params[0]: ("w", [Segment(0, 4, 0)])}

    def refused(optimizer, words, identities=identity, config=CONFIG):
        with pytest.raises(ValueError, match=words):
            round_fused_adam(optimizer, identities, config)

    refused(DistributedFusedAdam(params), "starts its param all-gathers within step()")
    refused(torch.optim.AdamW(params), "wrap a torch optimizer in megatron_sr.MasterWeights")
    refused(TransformerEngineStandIn(params, master_weights=False), "pass master_weights=True")
    refused(
        TransformerEngineStandIn(params, master_weight_dtype=torch.float16), "pass master_weight_dtype=torch.float32"
    )
    refused(TransformerEngineStandIn(params), "a bfloat16 param of shape .4,. has no identity", identities={})
    refused(TransformerEngineStandIn([torch.nn.Parameter(torch.zeros(4))]), "holds no BF16 or FP16 params")
    remainders = TransformerEngineStandIn(params, store_param_remainders=True)
    refused(remainders, "16-bit remainders complete BF16 params, not e8m4", config=ParamRounding(format="e8m4"))
    refused(TransformerEngineStandIn(params), "MXFP8 is Megatron's", config=ParamRounding(format="mxfp8"))
    twice = TransformerEngineStandIn(params)
    round_fused_adam(twice, identity, CONFIG)
    refused(twice, "only once")


@pytest.mark.parametrize("store", [False, True], ids=["fp32 main params", "16-bit remainders"])
def test_c6_states_of_other_settings(store):
    """Refused, or with on_mismatch="recompute" taken up with the new noise: the main params are the same."""
    optimizer, params, _ = make(store_param_remainders=store)
    run(optimizer, params, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="12 differs from the checkpoint's 11"):
        make(config=ParamRounding(seed=12), store_param_remainders=store)[0].load_state_dict(saved)
    config = ParamRounding(seed=12, on_mismatch="recompute")
    other, others, rounding = make(config=config, store_param_remainders=store)
    other.load_state_dict(saved)
    rounding.recompute()
    for name in SIZES:
        assert torch.equal(main_of(other, others[name]), main_of(optimizer, params[name]))
    expected = round_to_(
        torch.zeros(4001).bfloat16(), main_of(other, others["a.weight"]), noise=Noise(12, 1, "a.weight"), start=100
    )
    assert torch.equal(others["a.weight"].detach(), expected)


def test_a_nearest_run_goes_on_stochastically():
    """Transformer Engine's own state, remainders in nearest form, with its model params."""
    plain = make(config=ParamRounding(mode="nearest"), store_param_remainders=True)
    run(*plain[:2], 1, 2)
    optimizer, params, _ = remainders()
    with torch.no_grad():
        for name in SIZES:
            params[name].copy_(plain[1][name])
    optimizer.load_state_dict(copy.deepcopy(plain[0].state_dict()))
    run(*plain[:2], 3)
    run(optimizer, params, 3)
    for name in SIZES:
        expected = remainder.join(plain[1][name], plain[0].state[plain[1][name]]["master_param"])
        assert torch.equal(main_of(optimizer, params[name]), expected)
    assert_rounded(optimizer, params, 3)
    with pytest.raises(ValueError, match="load its weights alone"):  # Megatron's checkpoints do not tell the two apart
        optimizer.set_scaled_state(params["a.weight"], "master_param", torch.zeros(4001))


def test_c4_nearest_installs_nothing():
    optimizer, params, rounding = make(config=ParamRounding(mode="nearest"), store_param_remainders=True)
    plain = TransformerEngineStandIn([torch.nn.Parameter(p.detach().clone()) for p in params.values()],
                                     store_param_remainders=True, **SETTINGS)  # fmt: skip
    run(optimizer, params, 1, 2)
    others = dict(zip(params, plain.param_groups[0]["params"]))
    run(plain, others, 1, 2)
    assert rounding.step == 0
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert all(torch.equal(params[name], others[name]) for name in SIZES)
    assert optimizer.state_dict()["state"][0]["master_param"].dtype == torch.int16


# --- the real ones


@pytest.mark.parametrize(
    "module, options",
    [
        ("transformer_engine.pytorch.optimizers", {}),
        ("transformer_engine.pytorch.optimizers", {"store_param_remainders": True}),
        ("apex.optimizers", {"capturable": True}),
    ],
    ids=["te, fp32 main params", "te, 16-bit remainders", "apex"],
)
def test_the_real_fused_adam_on_a_gpu(module, options):
    if not torch.cuda.is_available():
        pytest.skip("the kernels of FusedAdam need a GPU")
    kind = pytest.importorskip(module, reason="is not installed").FusedAdam
    generator = torch.Generator().manual_seed(1)
    params = {
        name: torch.nn.Parameter((torch.randn(n, generator=generator) * 0.02).bfloat16().cuda())
        for name, n in SIZES.items()
    }
    optimizer = kind(list(params.values()), master_weights=True, **options, **SETTINGS)
    rounding = round_fused_adam(optimizer, {p: (n, [Segment(0, p.numel(), 100)]) for n, p in params.items()}, CONFIG)
    for step in (1, 2, 3):
        for param in params.values():
            param.grad = torch.full_like(param, 1e-3)
        optimizer.step()
        mains = dict(zip(params, optimizer.param_groups_master[0]["params"])) if module.startswith("apex") else None
        for name, param in params.items():
            main = main_of(optimizer, param) if mains is None else mains[name]
            assert torch.equal(param.detach().cpu(), rounded(name, main.cpu(), step))
    assert rounding.step == 3
