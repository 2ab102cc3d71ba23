"""What tests/unit/test_triton.py checks of the GPU kernels, in Triton's interpreter: `python -m tests.unit.triton_cases`.

In a process of its own, because TRITON_INTERPRET must be set before a kernel is defined. Prints one JSON object: for each
case (a function whose name begins with `case_`) null, or the traceback of its failure.
"""

import json
import sys
import traceback

import torch

from megatron_sr import Noise, RoundingPlan, Segment, formats, round_segments_, round_to_
from megatron_sr.kernels.gpu_chunks import CHUNK
from tests.unit.values import adversarial, bits_of, random_patterns

KEY = "decoder.layers.mlp.linear_fc1.weight"
NOISE = Noise(seed=2**63 + 9, step=2**40 + 1, key=KEY, stream=1)


def inputs(count: int) -> torch.Tensor:
    """Random FP32 patterns with NaN, infinities and subnormals among them, and adversarial ones."""
    half = count // 2
    return torch.cat([random_patterns(count - half, 1), adversarial()[:: len(adversarial()) // half][:half]])


def assert_equal(one: torch.Tensor, other: torch.Tensor, what: object = "") -> None:
    different = (bits_of(one) != bits_of(other)).nonzero().flatten()
    assert not len(different), (what, len(different), different[:5].tolist())


def check_format(name: str) -> None:
    """Stochastic and nearest, in every storage, over whole chunks and from inside a Philox block."""
    format, src = formats.get(name), inputs(10_000)
    for dtype in format.storage:
        for noise, start in ((NOISE, 0), (NOISE, 2**35 - 5003), (None, 0)):
            expected, dst = torch.zeros(len(src), dtype=dtype), torch.zeros(len(src), dtype=dtype)
            round_to_(expected, src, noise=noise, format=format, start=start, backend="reference")
            round_to_(dst, src, noise=noise, format=format, start=start, backend="triton")
            assert_equal(dst, expected, (dtype, noise, start))


def case_c1_bf16():
    check_format("bf16")


def case_c1_fp16():
    check_format("fp16")


def case_c1_e4m3():
    check_format("e4m3")


def case_c1_e8m4_in_bf16_and_float32():
    check_format("e8m4")


def case_c1_e8m10():
    check_format("e8m10")


PIECES = [
    [Segment(0, 9000, 16, 96, 48), Segment(9000, 300, 7)],  # rows made of whole Philox blocks; a start inside one
    [Segment(0, 5000, 3, 100, 25), Segment(5010, 40, 2**64 - 40)],  # rows that are not; the last elements that exist
    [Segment(3, 1, 9), Segment(5, 20_000, 2**40, 30_000, 10_000)],  # one element; rows longer than a chunk
    [Segment(1, 30, 0, 3, 1), Segment(31, 33, 8, 0, 8)],  # every third element; the same row again and again
]


def case_c1_segments_of_many_tensors_in_one_launch():
    """Any alignment of addresses and Philox blocks, and a step for each tensor. What no segment names stays."""
    for name in ("bf16", "e4m3"):
        sizes = [9300, 5050, 20_010, 70]
        src = [inputs(size + 1)[i % 2 :][:size] for i, size in enumerate(sizes)]  # some at odd addresses
        where = [(Noise(1, 3 + i, f"t{i}"), pieces) for i, pieces in enumerate(PIECES)]
        out = {}
        for backend in ("reference", "triton"):
            dst = [torch.full((size,), 1.5).to(formats.get(name).storage[0]) for size in sizes]
            round_segments_(dst, src, where, format=name, backend=backend)
            out[backend] = dst
        for a, b in zip(out["triton"], out["reference"]):
            assert_equal(a, b, name)


def case_c1_random_pieces():
    """Rows of any length and distance, from anywhere, up to the largest indices, in pieces of up to two chunks."""
    generator = torch.Generator().manual_seed(0)
    any_of = lambda *values: values[torch.randint(len(values), (1,), generator=generator).item()]
    src = inputs(3 * CHUNK)
    for name in ("bf16", "e4m3"):
        segments = [Segment(1, CHUNK, 3), Segment(0, CHUNK, 2**63 + 1)]  # a cut group, which takes a second chunk
        for _ in range(15):
            run = any_of(1, 3, 4, 8, 24, 100, 8192, 9001)
            start = any_of(0, 8, 2**35 - 16, 2**63 - 4, 2**64 - 2**31) + any_of(0, 3, 4, 8)
            length = any_of(1, 60, 1000, CHUNK, CHUNK + 900)
            segments.append(Segment(any_of(0, 1, 4, 11), length, start, run + any_of(0, 5, 8, 4000), run))
        for segment in segments:
            out = {}
            for backend in ("reference", "triton"):
                out[backend] = torch.zeros(len(src), dtype=formats.get(name).storage[0])
                round_segments_(out[backend], src, [(NOISE, segment)], format=name, backend=backend)
            assert_equal(out["triton"], out["reference"], (name, segment))


def case_c1_plan_follows_steps_and_moved_storage():
    src = [inputs(9000), inputs(500)]
    where = [(KEY, [Segment(0, 9000, 5)]), ("b", [Segment(0, 500, 0, 40, 20)])]
    plans = {}
    for backend in ("reference", "triton"):
        dst = [torch.zeros(len(s), dtype=torch.bfloat16) for s in src]
        plans[backend] = dst, RoundingPlan(dst, src, where, seed=4, backend=backend)
    for step in (0, 1, 2**63 + 5):
        if step == 1:
            src[0].data = src[0].flip(0).contiguous()
        for _, plan in plans.values():
            plan.run_(step)
        for a, b in zip(plans["triton"][0], plans["reference"][0]):
            assert_equal(a, b, step)


def case_c1_one_plan_in_different_dtypes():
    """e8m5 stored in BF16 and in FP32: one kernel launch for each."""
    src = [inputs(900), inputs(700), inputs(100)]
    where = [(NOISE, Segment(0, len(s), 5)) for s in src]
    out = {}
    for backend in ("reference", "triton"):
        out[backend] = [
            torch.zeros(len(s), dtype=d) for s, d in zip(src, (torch.bfloat16, torch.float32, torch.bfloat16))
        ]
        round_segments_(out[backend], src, where, format="e8m5", backend=backend)
    for a, b in zip(out["triton"], out["reference"]):
        assert_equal(a, b)


def case_c1_dst_may_be_src():
    src = inputs(3000)
    expected, dst = torch.zeros_like(src), src.clone()
    round_to_(expected, src, noise=NOISE, format="e8m9", backend="reference")
    round_to_(dst, dst, noise=NOISE, format="e8m9", backend="triton")
    assert_equal(dst, expected)


def case_c1_mxfp8_quantize():
    """Through round_segments_: codes and scales of both axes, from FP32 and BF16."""
    from megatron_sr import mxfp8

    x = inputs(4096).view(64, 64)
    for value, axis in ((x, -1), (x.bfloat16(), 0)):
        one, other = (mxfp8.quantize(value, noise=NOISE, axis=axis, backend=b) for b in ("triton", "reference"))
        assert_equal(one.data, other.data, axis)
        assert_equal(one.scale, other.scale, axis)


def case_c1_adamw():
    """FP32 and BF16 gradients, stochastic and nearest, pieces of every kind; state and params."""
    from megatron_sr.kernels.adamw import AdamWPlan
    from tests.unit.test_adamw import make_state

    sizes, where = [9300, 5050], [(f"t{i}", pieces) for i, pieces in enumerate(PIECES[:2])]
    for seed, grad_dtype, betas, format in (
        (3, torch.float32, (0.9, 0.95), "bf16"),
        (3, torch.bfloat16, (0.3, 0.999), "bf16"),
        (None, torch.float32, (0.9, 0.95), "bf16"),
        (3, torch.float32, (0.9, 0.95), "e4m3"),
    ):
        results = []
        for backend in ("reference", "triton"):
            states = [make_state(size, size) for size in sizes]
            column = lambda name, states=states: [s[name] for s in states]
            params = [torch.zeros(size, dtype=formats.get(format).storage[0]) for size in sizes]
            lists = params, column("main"), column("exp_avg"), column("exp_avg_sq")
            plan = AdamWPlan(*lists, where, seed=seed, format=format, backend=backend)
            for step in (1, 2):
                plan.step_([g.to(grad_dtype) * step for g in column("grad")], step=step, lr=1e-3, betas=betas)
            results.append([t for tensors in lists for t in tensors])
        for a, b in zip(*results):
            assert_equal(a, b, (seed, grad_dtype, betas))


def case_c1_adamw_with_remainders():
    from megatron_sr.kernels.adamw import AdamWPlan
    from tests.unit.test_adamw import make_state

    size, where = 9300, [("t", PIECES[0])]
    for seed in (3, None):
        results = []
        for backend in ("reference", "triton"):
            state = make_state(size)
            param, remainder = state["main"].bfloat16(), torch.zeros(size, dtype=torch.int16)
            lists = [param], [remainder], [state["exp_avg"]], [state["exp_avg_sq"]]
            plan = AdamWPlan(*lists, where, seed=seed, backend=backend)
            for step, last in ((1, None), (2, 1), (3, 2)):
                plan.step_([state["grad"]], step=step, lr=1e-3, last_noise_step=last if seed else None)
            results.append([t for tensors in lists for t in tensors])
        for a, b in zip(*results):
            assert_equal(a, b, seed)


def case_c1_recode_of_remainders():
    """Every form into the other, on extreme values."""
    from megatron_sr.kernels.remainder import RemainderPlan

    size, where = 9300, [("t", PIECES[0])]
    pairs = {}
    for backend in ("reference", "triton"):
        bits = inputs(size).view(torch.int16).view(-1, 2)
        pairs[backend] = bits[:, 1].clone().view(torch.bfloat16), bits[:, 0].clone()
    plans = {b: RemainderPlan([p], [r], where, seed=3, backend=b) for b, (p, r) in pairs.items()}
    for recode in (
        lambda plan: plan.to_stochastic_(1),
        lambda plan: plan.to_stochastic_(2, 1),
        lambda plan: plan.to_nearest_(2),
    ):
        for plan in plans.values():
            recode(plan)
        for a, b in zip(pairs["triton"], pairs["reference"]):
            assert_equal(a, b)


def round_fma_once() -> None:
    """The interpreter's fused multiply-add rounds twice; the machine's does not."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from megatron_sr.kernels.adamw_reference import fma

    def create_fma(self, x, y, z):
        a, b, c = (torch.from_numpy(t.data.copy()) for t in (x, y, z))
        return TensorHandle(fma(a, b, c).numpy(), z.dtype.scalar)

    InterpreterBuilder.create_fma = create_fma


def main() -> int:
    torch.set_num_threads(1)
    round_fma_once()
    outcome = {}
    for name, case in sorted(globals().items()):
        if name.startswith("case_"):
            try:
                case()
                outcome[name] = None
            except Exception:
                outcome[name] = traceback.format_exc()
    print(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
