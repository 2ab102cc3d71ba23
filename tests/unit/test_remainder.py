"""BF16 params with 16-bit remainders on CPUs; tests/unit/triton_cases.py has the GPU kernel's."""

import numpy as np
import pytest
import torch

from megatron_sr import Noise, Segment, round_to_
from megatron_sr.kernels import cpu
from megatron_sr.kernels.adamw import AdamWPlan, fused_adamw_step_
from megatron_sr.kernels.remainder import RemainderPlan, join, split_
from tests.unit.values import adversarial, bf16_patterns, bits_of, from_bits, random_patterns

LEVELS = cpu.LEVELS[: cpu.LEVELS.index(cpu.best_level()) + 1]
BACKENDS = ["reference", *LEVELS]
NOISE = Noise(seed=5, step=7, key="decoder.layers.self_attention.linear_qkv.weight")
LARGEST = 0x7F7F0000  # bits of the largest BF16 number


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are small: more threads would only wait for each other, and long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    if request.param == "reference":
        return "reference"
    monkeypatch.setenv("MEGATRON_SR_CPU_LEVEL", request.param)
    return "cpu"


def split(main: torch.Tensor, noise: Noise | None, **where) -> tuple[torch.Tensor, torch.Tensor]:
    param = torch.zeros(main.shape, dtype=torch.bfloat16)
    remainder = torch.zeros(main.shape, dtype=torch.int16)
    split_(param, remainder, main, noise=noise, **where)
    return param, remainder


def held(main: torch.Tensor) -> torch.Tensor:
    """Bits of the main params that stochastic form holds: as documented, saturated and with quiet NaN."""
    bits = bits_of(main)
    magnitude = bits & 0x7FFFFFFF
    bits = torch.where((magnitude > LARGEST) & (magnitude < 0x7F800000), bits & 0x80000000 | LARGEST, bits)
    return torch.where(magnitude > 0x7F800000, bits | 0x400000, bits)


def transformer_engine_split(main: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """adam.cu, `AdamFunctorMasterParamRemainder`: the halves of an FP32, then `if (rem < 0) p++`."""
    halves = main.numpy().view(np.int16).reshape(-1, 2)
    remainder, param = halves[:, 0].copy(), halves[:, 1].copy()
    param[remainder < 0] += 1
    return torch.from_numpy(param).view(torch.bfloat16), torch.from_numpy(remainder)


def transformer_engine_join(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """adam.cu: `if (rem < 0) p--`, then both halves."""
    high, low = param.view(torch.int16).numpy().copy(), remainder.numpy()
    high[low < 0] -= 1
    return torch.from_numpy(np.stack([low, high], 1).reshape(-1).view(np.float32).copy())


def test_c3_stochastic_form_gives_every_main_param_back():
    """Every BF16 value with ten remainders each, all adversarial values, and random patterns."""
    low = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, *np.random.default_rng(0).integers(0, 65536, 4).tolist()]
    main = torch.cat([(bf16_patterns().view(torch.int32) | x).view(torch.float32) for x in low])
    main = torch.cat([main, adversarial(), random_patterns(100_000, 1)])
    for noise in (NOISE, Noise(0, 0, ""), Noise(2**64 - 1, 2**64 - 1, "w", 3)):
        param, remainder = split(main, noise)
        assert torch.equal(bits_of(join(param, remainder, noise=noise)), held(main))
        kept = held(main).to(torch.int32).view(torch.float32)
        assert torch.equal(bits_of(param), bits_of(round_to_(torch.zeros_like(param), kept, noise=noise)))
        assert torch.equal(bits_of(param), bits_of(round_to_(torch.zeros_like(param), main, noise=noise)))


def test_c3_every_remainder_meets_both_decisions_and_is_undone():
    """All 65,536 remainders, with draws on which each is rounded up and down somewhere."""
    main = (torch.arange(65536, dtype=torch.int32) | 0x3F800000).view(torch.float32)
    ups = torch.zeros(65536, dtype=torch.int64)
    for step in range(40):
        noise = Noise(1, step, "w")
        param, remainder = split(main, noise)
        ups += bits_of(param) - 0x3F80
        assert torch.equal(bits_of(join(param, remainder, noise=noise)), bits_of(main))
    # A remainder between a quarter and three quarters goes always or never up with P <= 2 * 0.75**40 = 2.1e-5. Of 32,768 such
    # remainders 0.7 are expected to; more than 32 would be a false alarm of probability below 1e-40.
    middle = ups[16384:49152]
    assert ((middle == 0) | (middle == 40)).sum() <= 32


def test_nearest_form_is_transformer_engines_and_without_loss():
    main = torch.cat([adversarial(), random_patterns(100_000, 2), bf16_patterns()])
    param, remainder = split(main, None)
    expected = transformer_engine_split(main)
    assert torch.equal(bits_of(param), bits_of(expected[0]))
    assert torch.equal(remainder, expected[1])
    assert torch.equal(bits_of(join(param, remainder)), bits_of(main))
    assert torch.equal(bits_of(transformer_engine_join(param, remainder)), bits_of(main))
    finite = main[main.isfinite()]
    ties = bits_of(finite) & 0xFFFF == 0x8000  # Transformer Engine rounds them away from zero, torch to even
    assert torch.equal(bits_of(split(finite, None)[0])[~ties], bits_of(finite.bfloat16())[~ties])


def test_reading_stochastic_form_as_nearest_spoils_a_quarter():
    """Why the two forms must never be mixed. n = 200,000, p = 1/4: six standard deviations are 0.0058, false alarm 2e-9."""
    main = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    wrong = bits_of(join(*split(main, NOISE))) != bits_of(main)
    assert abs(wrong.float().mean().item() - 0.25) < 0.0058


def test_recode_turns_forms_into_each_other_and_into_other_steps(backend):
    """Around a step of Transformer Engine's FusedAdam: stochastic -> nearest -> stochastic, as one launch."""
    mains = [torch.cat([adversarial()[::5], random_patterns(5000, 3)]), random_patterns(10_007, 4)]
    where = [
        ("a", [Segment(0, len(mains[0]), 2**35 - 5000)]),
        ("b", [Segment(0, 7, 1), Segment(7, 10_000, 50, 300, 25)]),
    ]
    noise = lambda key, step: Noise(NOISE.seed, step, key)
    pairs = [split(m, noise(key, 7), segments=s) for m, (key, s) in zip(mains, where)]
    params, remainders = ([pair[i] for pair in pairs] for i in (0, 1))
    plan = RemainderPlan(params, remainders, where, seed=NOISE.seed, backend=backend)

    plan.to_nearest_(7)
    for main, param, remainder in zip(mains, params, remainders):
        kept = held(main).to(torch.int32).view(torch.float32)
        expected = transformer_engine_split(kept)
        assert torch.equal(bits_of(param), bits_of(expected[0]))
        assert torch.equal(remainder, expected[1])
        assert torch.equal(bits_of(transformer_engine_join(param, remainder)), held(main))
    for step, last in ((8, None), (9, 8), (2**64 - 1, 9)):
        plan.to_stochastic_(step, last)
        for main, param, remainder, (key, segments) in zip(mains, params, remainders, where):
            expected = split(held(main).to(torch.int32).view(torch.float32), noise(key, step), segments=segments)
            assert torch.equal(bits_of(param), bits_of(expected[0]))
            assert torch.equal(remainder, expected[1])


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [5, None], ids=["stochastic", "nearest"])
def test_adamw_with_remainders_equals_adamw_with_fp32_main_params(backend, seed, grad_dtype):
    """Ten steps from a fresh BF16 model with zero remainders: main params, moments and params, bit for bit."""
    count, generator = 4001, torch.Generator().manual_seed(2)
    param = (torch.randn(count, generator=generator) * 0.02).bfloat16()
    other, remainder = param.clone(), torch.zeros(count, dtype=torch.int16)
    main = param.float()
    where = [("w", [Segment(0, 1001, 3), Segment(1001, 3000, 1004, 400, 100)])]
    moments = [[torch.zeros(count)] for _ in range(4)]
    with_main = AdamWPlan([param], [main], moments[0], moments[1], where, seed=seed, backend=backend)
    with_remainder = AdamWPlan([other], [remainder], moments[2], moments[3], where, seed=seed, backend=backend)
    for step in range(1, 11):
        grad = (torch.randn(count, generator=generator) * 1e-3).to(grad_dtype)
        settings = dict(step=step, lr=1e-4, weight_decay=0.1, noise_step=step + 100)
        with_main.step_([grad], **settings)
        last = step + 99 if seed is not None and step > 1 else None  # fresh params are in nearest form
        with_remainder.step_([grad], **settings, last_noise_step=last)
        noise = None if seed is None else Noise(seed, step + 100, "w")
        assert torch.equal(bits_of(join(other, remainder, noise=noise, segments=where[0][1])), bits_of(main))
        ties = bits_of(main) & 0xFFFF == 0x8000 if seed is None else torch.zeros(count, dtype=torch.bool)
        assert torch.equal(bits_of(other)[~ties], bits_of(param)[~ties])  # nearest: ties away from zero, not to even
        assert torch.equal(bits_of(moments[0][0]), bits_of(moments[2][0]))
        assert torch.equal(bits_of(moments[1][0]), bits_of(moments[3][0]))
    assert (bits_of(param) != bits_of(main.bfloat16())).any() == (seed is not None)


def test_one_tensor_with_remainders(backend):
    main = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    grad, zeros = torch.randn(1000, generator=torch.Generator().manual_seed(2)), lambda: torch.zeros(1000)
    param, remainder = split(main, NOISE, segments=[Segment(0, 1000, 77)])
    now = Noise(NOISE.seed, NOISE.step + 1, NOISE.key)
    settings = dict(step=1, lr=1e-3, noise=now, start=77, backend=backend)
    fused_adamw_step_(param, remainder, grad, zeros(), zeros(), last_noise=NOISE, **settings)
    expected = torch.zeros_like(param)
    fused_adamw_step_(expected, main, grad, zeros(), zeros(), **settings)
    assert torch.equal(bits_of(param), bits_of(expected))
    assert torch.equal(bits_of(join(param, remainder, noise=now, segments=[Segment(0, 1000, 77)])), bits_of(main))


def test_c6_bad_input_says_what_is_wrong():
    param, remainder, main = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int16), torch.zeros(8)
    where = [("w", [Segment(0, 8, 0)])]
    with pytest.raises(TypeError, match="pair 0 has dtypes torch.bfloat16 and torch.float32"):
        RemainderPlan([param], [main], where, seed=1)
    with pytest.raises(ValueError, match="1 params, 1 remainders and 0 entries"):
        RemainderPlan([param], [remainder], [], seed=1)
    with pytest.raises(ValueError, match=r"param \(8,\) on cpu and remainder \(7,\) on cpu must be equally large"):
        RemainderPlan([param], [remainder[:7]], where, seed=1)
    with pytest.raises(ValueError, match="segments cover 7 of 8 local elements"):
        join(param, remainder, segments=[Segment(0, 7, 0)])
    with pytest.raises(TypeError, match="main_param has dtype torch.bfloat16"):
        split_(param, remainder, param)
    with pytest.raises(TypeError, match="noise must be a Noise or None"):
        join(param, remainder, noise=7)
    with pytest.raises(ValueError, match="last_step is -1"):
        RemainderPlan([param], [remainder], where, seed=1).to_nearest_(-1)
    plan = AdamWPlan([param], [remainder], [main], [main.clone()], where, seed=None)
    with pytest.raises(ValueError, match="the plan has no seed: it rounds to nearest"):
        plan.step_([main.clone()], step=1, lr=1e-3, last_noise_step=4)
    RemainderPlan([], [], [], seed=1).to_nearest_(0)


def test_signalling_nan_and_infinities():
    main = from_bits([0x7F800001, 0xFF800001, 0x7FC00005, 0x7F800000, 0xFF800000])
    param, remainder = split(main, NOISE)
    assert bits_of(join(param, remainder, noise=NOISE)).tolist() == [
        0x7FC00001,
        0xFFC00001,
        0x7FC00005,
        0x7F800000,
        0xFF800000,
    ]
    assert param[:3].isnan().all()
    assert param[3:].tolist() == [float("inf"), -float("inf")]
