"""The fused AdamW step on CPUs; tests/unit/triton_cases.py has the GPU kernel's."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from megatron_sr import Noise, RoundingPlan, Segment, formats, round_to_
from megatron_sr.kernels import cpu
from megatron_sr.kernels.adamw import AdamWPlan, fused_adamw_step_
from megatron_sr.kernels.adamw_reference import fma
from tests.unit.values import adversarial, bits_of, from_bits, random_patterns

LEVELS = cpu.LEVELS[: cpu.LEVELS.index(cpu.best_level()) + 1]
NOISE = Noise(seed=11, step=2**33 + 4, key="decoder.layers.mlp.linear_fc1.weight")
SETTINGS = dict(step=3, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
STATE = ("main", "grad", "exp_avg", "exp_avg_sq")


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are small: more threads would only wait for each other, and long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_state(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    normal = lambda scale: torch.randn(count, generator=g) * scale
    return dict(main=normal(0.02), grad=normal(1e-3), exp_avg=normal(1e-3), exp_avg_sq=normal(1e-3).square())


def run(state, backend="reference", format="bf16", noise=NOISE, dtype=None, start=5, **settings):
    """State after one step, with the rounded param, from a copy of `state`."""
    out = {name: t.clone() for name, t in state.items()}
    out["param"] = torch.zeros(state["main"].shape, dtype=dtype or formats.get(format).storage[0])
    fused_adamw_step_(
        out["param"],
        *(out[name] for name in STATE),
        noise=noise,
        start=start,
        format=format,
        backend=backend,
        **SETTINGS | settings,
    )
    return out


def assert_same(one: dict, other: dict, what: str = "") -> None:
    """Equal bits; of NaN only that it is one, for which payload the hardware keeps is its own business."""
    for name in one:
        a, b = bits_of(one[name]), bits_of(other[name])
        nan = one[name].float().isnan()
        assert torch.equal(nan, other[name].float().isnan()), (what, name)
        assert torch.equal(a[~nan], b[~nan]), (what, name, int((a != b).sum()))


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch):
    monkeypatch.setenv("MEGATRON_SR_CPU_LEVEL", request.param)
    return request.param


def extreme_state() -> dict[str, torch.Tensor]:
    """Random bit patterns and adversarial values in every tensor: NaN, infinities, subnormals, overflow, ties."""
    count = 30_000
    main = torch.cat([random_patterns(count // 2, 1), adversarial()[: count // 2]])
    shuffled = lambda seed: main[torch.randperm(count, generator=torch.Generator().manual_seed(seed))].clone()
    return dict(main=main, grad=shuffled(2), exp_avg=shuffled(3), exp_avg_sq=shuffled(4).abs())


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.4, 0.999), (0.0, 0.5)])
def test_c1_every_cpu_level_equals_the_reference(level, betas, grad_dtype):
    for state in (make_state(10_007), extreme_state()):
        state["grad"] = state["grad"].to(grad_dtype)
        assert_same(run(state, "reference", betas=betas), run(state, "cpu", betas=betas), level)


@pytest.mark.parametrize("start", [0, 8, 2**35 - 301, 2**35 - 64, 2**35 - 8])
def test_c1_where_tiles_begin_and_the_block_counter_carries(level, start):
    state = make_state(1_000)
    assert_same(run(state, "reference", start=start), run(state, "cpu", start=start), level)


@pytest.mark.parametrize(
    "format, dtype", [("bf16", None), ("fp16", None), ("e4m3", None), ("e8m4", torch.bfloat16), ("e8m9", torch.float32)]
)
@pytest.mark.parametrize("noise", [NOISE, None], ids=["stochastic", "nearest"])
def test_the_param_is_round_to_of_the_new_main_param(level, format, dtype, noise):
    for state in (make_state(5_003), extreme_state()):
        out = run(state, "cpu", format, noise, dtype)
        expected = round_to_(torch.zeros_like(out["param"]), out["main"], noise=noise, format=format, start=5)
        assert torch.equal(bits_of(out["param"]), bits_of(expected))
        assert not torch.equal(bits_of(out["main"]), bits_of(state["main"]))


def torch_adamw(state: dict, **settings) -> dict[str, torch.Tensor]:
    """The same step by torch.optim.AdamW, one tensor at a time."""
    settings = SETTINGS | settings
    param = torch.nn.Parameter(state["main"].clone())
    param.grad = state["grad"].clone()
    optimizer = torch.optim.AdamW([param], foreach=False, **{k: v for k, v in settings.items() if k != "step"})
    optimizer.state[param] = dict(
        step=torch.tensor(settings["step"] - 1.0),
        exp_avg=state["exp_avg"].clone(),
        exp_avg_sq=state["exp_avg_sq"].clone(),
    )
    optimizer.step()
    kept = optimizer.state[param]
    return dict(main=param.detach(), exp_avg=kept["exp_avg"], exp_avg_sq=kept["exp_avg_sq"])


needs_fma = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch's lerp and addcmul fuse multiply and add only in its AVX2 and AVX-512 kernels",
)


@needs_fma
@pytest.mark.parametrize(
    "settings", [{}, dict(betas=(0.3, 0.999), lr=1e-6), dict(weight_decay=0.0, step=1), dict(step=5000, eps=1e-5)]
)
def test_equals_torch_adamw_bit_for_bit_once_its_square_root_is_exact(settings, monkeypatch):
    """The order of operations is torch's; torch.sqrt alone is not always correctly rounded (MKL)."""
    state = make_state(20_011)
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: torch.from_numpy(np.sqrt(x.numpy())))
    expected = torch_adamw(state, **settings)
    out = run(state, "cpu", **settings)
    assert_same(expected, {name: out[name] for name in expected})


@needs_fma
@pytest.mark.parametrize("settings", [{}, dict(lr=1e-6), dict(lr=2e-4, betas=(0.9, 0.999), step=100)])
def test_equals_torch_adamw_to_one_ulp(settings):
    """Moments bit for bit. Main params to 1 ulp where the step is below an eighth of the value, and everywhere to 4 ulp of
    the larger of the two: torch's square root is up to 1 ulp off, which a large step carries over."""
    state = make_state(200_003)
    expected, out = torch_adamw(state, **settings), run(state, "cpu", **settings)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(bits_of(expected[name]), bits_of(out[name]))
    old, new, other = (x.double() for x in (state["main"], out["main"], expected["main"]))
    size = torch.maximum(old.abs(), (new - old).abs())
    ulp = torch.from_numpy(np.spacing(size.float().numpy())).double()
    assert ((new - other).abs() <= 4 * ulp).all()
    small = (new - old).abs() < old.abs() / 8
    assert small.float().mean() > 0.5
    assert (bits_of(out["main"]) - bits_of(expected["main"])).abs()[small].max() <= 1


def test_the_reference_fma_rounds_once():
    rng = np.random.default_rng(3)
    a, b = (from_bits(rng.integers(0x20000000, 0x5F000000, 3000, dtype=np.uint32)) for _ in range(2))
    exact = -(a.double() * b.double()).float()
    c = torch.stack([exact, from_bits(rng.integers(0, 0x7F000000, 3000, dtype=np.uint32))])
    c = c.view(torch.int32).add(torch.from_numpy(rng.integers(-2, 3, c.shape, dtype=np.int32))).view(torch.float32)
    for addend in c:  # one row cancels to the last bits, the other has any exponent
        fused = fma(a, b, addend)
        for x, y, z, result in zip(a.tolist(), b.tolist(), addend.tolist(), fused.tolist()):
            assert result == nearest_fp32(Fraction(x) * Fraction(y) + Fraction(z))
    # The exact sum lies below a tie of FP32 by less than a double can tell: rounding twice would go up to 1 + 2**-22.
    odd = torch.tensor([1 + 2.0**-23])
    product = odd, torch.tensor([(1 - 2.0**-23) * 2.0**-24])
    assert (product[0].double() * product[1].double() + odd.double()).float().item() == 1 + 2.0**-22
    assert fma(*product, odd).item() == 1 + 2.0**-23


def nearest_fp32(x: Fraction) -> float:
    """The FP32 number nearest to x, ties to even, by exact comparison with its neighbours."""
    guess = np.float32(float(x))
    if np.isinf(guess):
        return float(guess)
    candidates = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    candidates = [c for c in candidates if np.isfinite(c)]
    return float(min(candidates, key=lambda c: (abs(Fraction(float(c)) - x), int(c.view(np.uint32)) & 1)))


def test_a_plan_rounds_shards_as_the_whole_tensor(level):
    """Column-parallel pieces, cut in the middle of rows, in several tensors; twice, with new gradients each time."""
    rows, columns = 60, 96
    whole, shards = make_state(rows * columns, 1), []
    for half in range(2):
        piece = {name: t.view(rows, columns)[:, half * 48 : half * 48 + 48].reshape(-1) for name, t in whole.items()}
        for at in (slice(0, 1001), slice(1001, None)):
            shards.append({name: t[at].clone() for name, t in piece.items()})
    segments = []
    for half in range(2):
        first, at = [], half * 48
        first.append(Segment(0, 20 * 48, at, columns, 48))
        first.append(Segment(20 * 48, 41, 20 * columns + at))
        rest = [Segment(0, 7, 20 * columns + at + 41), Segment(7, 39 * 48, 21 * columns + at, columns, 48)]
        segments += [first, rest]
    params = [torch.zeros(len(s["main"]), dtype=torch.bfloat16) for s in shards]
    column = lambda name: [s[name] for s in shards]
    plan = AdamWPlan(
        params,
        column("main"),
        column("exp_avg"),
        column("exp_avg_sq"),
        [(NOISE.key, s) for s in segments],
        seed=NOISE.seed,
        backend="cpu",
    )
    settings = {k: v for k, v in SETTINGS.items() if k != "step"}
    for step in (1, 2):
        expected = run(whole, "reference", noise=Noise(NOISE.seed, step, NOISE.key), start=0, step=step)
        plan.step_(column("grad"), step=step, **settings)
        for half in range(2):
            for name in ("main", "exp_avg", "exp_avg_sq", "param"):
                parts = params if name == "param" else column(name)
                joined = torch.cat(parts[2 * half : 2 * half + 2])
                part = expected[name].view(rows, columns)[:, half * 48 : half * 48 + 48].reshape(-1)
                assert torch.equal(bits_of(joined), bits_of(part)), (step, half, name)
        grad = torch.randn(rows * columns, generator=torch.Generator().manual_seed(step)) * 1e-3
        whole = {name: expected[name] for name in STATE} | dict(grad=grad)
        for half in range(2):
            piece = grad.view(rows, columns)[:, half * 48 : half * 48 + 48].reshape(-1)
            shards[2 * half]["grad"], shards[2 * half + 1]["grad"] = piece[:1001].clone(), piece[1001:].clone()
    again = [torch.zeros_like(p) for p in params]
    RoundingPlan(again, column("main"), [(NOISE.key, s) for s in segments], seed=NOISE.seed).run_(2)
    assert all(torch.equal(bits_of(a), bits_of(p)) for a, p in zip(again, params))


def test_threads_do_not_matter():
    state = make_state(300_007)
    one = run(state, "cpu")
    torch.set_num_threads(3)
    assert_same(one, run(state, "cpu"))


def test_one_plan_may_store_a_format_in_different_dtypes():
    """e8m5 in BF16, FP32, BF16: each tensor as it would be alone."""
    states = [make_state(500 + i, i) for i in range(3)]
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16]
    alone = [run(s, "cpu", "e8m5", Noise(1, 3, "w"), d, start=0) for s, d in zip(states, dtypes)]
    params = [torch.zeros(len(s["main"]), dtype=d) for s, d in zip(states, dtypes)]
    lists = params, *([s[name] for s in states] for name in ("main", "exp_avg", "exp_avg_sq"))
    where = [("w", [Segment(0, len(p), 0)]) for p in params]
    AdamWPlan(*lists, where, seed=1, format="e8m5").step_([s["grad"] for s in states], **SETTINGS)
    for i, expected in enumerate(alone):
        assert_same(dict(param=params[i]) | states[i], expected)


def test_elements_outside_the_segments_are_left_alone():
    state, param = make_state(100), torch.zeros(100, dtype=torch.bfloat16)
    before = {name: t.clone() for name, t in state.items()}
    lists = [[param], [state["main"]], [state["exp_avg"]], [state["exp_avg_sq"]]]
    AdamWPlan(*lists, [("w", [Segment(10, 20, 0)])], seed=1).step_([state["grad"]], step=1, lr=1e-3)
    for name in ("main", "exp_avg", "exp_avg_sq"):
        changed = (state[name] != before[name]).nonzero().flatten().tolist()
        assert changed == list(range(10, 30)), name
    assert param.nonzero().flatten().tolist() == list(range(10, 30))
    assert torch.equal(state["grad"], before["grad"])


def test_autograd_sees_the_change_and_no_tensors_are_no_work():
    state, param = make_state(8), torch.zeros(8, dtype=torch.bfloat16)
    version = param._version
    fused_adamw_step_(param, *(state[n] for n in STATE), step=1, lr=1e-3)
    assert param._version > version
    assert state["main"]._version > 0
    AdamWPlan([], [], [], [], [], seed=1).step_([], step=1, lr=1e-3)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(step=0), ValueError, "step is 0; AdamW counts its steps from 1"),
        (dict(lr=float("nan")), ValueError, "lr is nan; it must be finite and at least 0"),
        (dict(weight_decay=-0.1), ValueError, "weight_decay is -0.1"),
        (dict(betas=(0.9, 1.0)), ValueError, r"betas is \(0.9, 1.0\); both must lie in 0 <= beta < 1"),
        (dict(grad=torch.zeros(8, dtype=torch.float16)), TypeError, r"grads\[0\] must be a float32 or bfloat16 tensor, not torch.float16"),
        (dict(grad=torch.zeros(7)), ValueError, r"grads\[0\] has 7 elements, main_params\[0\] 8"),
        (dict(grad=None), TypeError, r"grads\[0\] must be a float32 or bfloat16 tensor, not NoneType"),
        (dict(main=torch.zeros(8, dtype=torch.bfloat16)), TypeError, r"main_params\[0\] has dtype torch.bfloat16"),
        (dict(exp_avg=torch.zeros(8, dtype=torch.bfloat16)), TypeError, r"exp_avgs\[0\] has dtype torch.bfloat16"),
        (dict(exp_avg_sq=torch.zeros(2, 8)[:, ::2]), ValueError, r"exp_avg_sqs\[0\] is not contiguous"),
        (dict(param=torch.zeros(8)), TypeError, r"params\[0\] has dtype torch.float32, but format 'bf16'"),
        (dict(last_noise=NOISE), ValueError, "last_noise is given without noise"),
        (dict(noise=NOISE, last_noise=NOISE), ValueError, "the main params are FP32: only int16 remainders need it"),
        (dict(noise=NOISE, last_noise=Noise(12, 3, "w")), ValueError, "may only differ in their step"),
        (dict(format="e4m3", main=torch.zeros(8, dtype=torch.int16)), TypeError, "int16 remainders need format 'bf16'"),
        (dict(backend="gpu"), ValueError, "backend 'gpu' is not known"),
    ],
)  # fmt: skip
def test_c6_bad_input_says_what_is_wrong(changes, error, message):
    state = make_state(8) | dict(param=torch.zeros(8, dtype=torch.bfloat16))
    tensors = [changes.pop(name) if name in changes else state[name] for name in ("param", *STATE)]
    with pytest.raises(error, match=message):
        fused_adamw_step_(*tensors, **dict(step=1, lr=1e-3) | changes)


def test_c6_a_plan_checks_its_lists():
    state, param = make_state(8), torch.zeros(8, dtype=torch.bfloat16)
    lists = [[param], [state["main"]], [state["exp_avg"]], [state["exp_avg_sq"]]]
    where = [("w", [Segment(0, 8, 0)])]
    with pytest.raises(ValueError, match="lists must be equally long.*'exp_avgs': 2"):
        AdamWPlan(*lists[:2], lists[2] * 2, lists[3], where, seed=1)
    with pytest.raises(ValueError, match="leaves its 8 elements"):
        AdamWPlan(*lists, [("w", [Segment(0, 9, 0)])], seed=1)
    plan = AdamWPlan(*lists, where, seed=1)
    with pytest.raises(ValueError, match="0 grads were given for 1 params"):
        plan.step_([], step=1, lr=1e-3)
    state["main"].data = torch.zeros(9)
    with pytest.raises(RuntimeError, match=r"src\[0\] has changed since the plan was made"):
        plan.step_([torch.zeros(9)], step=1, lr=1e-3)
