"""The place of model params by itself: what a copy into it does. Needs no DeepSpeed."""

import pytest
import torch

import megatron_sr as sr
from megatron_sr.coordinates import Segment
from megatron_sr.deepspeed.place import PartitionRounding, RoundedPlace

CONFIG = sr.ParamRounding(seed=3, format="bf16", exclude=("bias",))
PIECES = [("weight", [Segment(0, 60, 40)]), ("bias", [Segment(60, 30, 0)])]  # the last 10 elements are padding


def place(staged=None, step=5):
    flat, main = torch.full((100,), 7.0, dtype=torch.bfloat16), torch.linspace(0.1, 0.9, 100)
    rounding = PartitionRounding(flat, main, PIECES, CONFIG, lambda: step, staged)
    return RoundedPlace.of(flat, rounding.write), flat, main, rounding


def expected(main):
    weight = torch.empty(60, dtype=torch.bfloat16)
    sr.round_to_(weight, main[:60].contiguous(), noise=sr.Noise(3, 5, "weight"), start=40, backend="reference")
    return torch.cat([weight, main[60:90].bfloat16()])


@pytest.mark.parametrize("staged", [False, True], ids=["one device", "two devices"])
def test_a_copy_of_main_params_is_rounded(staged):
    # Two devices: the same path as CPU offload takes with a GPU, here with both of them the CPU.
    there, flat, main, rounding = place(staged)
    there.data.copy_(main.data, non_blocking=True)
    assert torch.equal(flat[:90], expected(main))
    assert not torch.equal(flat[:60], main[:60].bfloat16())
    assert rounding.written == 5
    if not staged:
        assert (flat[90:] == 7).all()  # padding is left alone


def test_a_copy_of_saved_model_params_is_a_copy():
    there, flat, _, rounding = place()
    saved = torch.rand(100).bfloat16()
    there.data.copy_(saved)
    assert torch.equal(flat, saved)
    assert rounding.written is None


def test_to_everything_else_it_is_the_tensor():
    there, flat, _, _ = place()
    assert there.data_ptr() == flat.data_ptr()
    results = [
        there.narrow(0, 3, 4),
        there.detach().clone().float(),
        there.to(torch.float64),
        there.view(-1),
        there + 0,
    ]
    assert {type(result) for result in results} == {torch.Tensor}
    parts = torch._utils._unflatten_dense_tensors(there, [torch.empty(50), torch.empty(50)])
    assert {type(part) for part in parts} == {torch.Tensor}
    parts[1].zero_()
    assert (flat[50:] == 0).all()


def test_main_params_whose_storage_moves_are_followed():
    there, flat, main, _ = place()
    main.data = (main * 2).clone()
    there.data.copy_(main.data)
    assert torch.equal(flat[:90], expected(main))


def test_other_values_than_its_main_params_are_refused():
    there, _, main, _ = place()
    with pytest.raises(RuntimeError, match="from something else than its FP32 main params"):
        there.data.copy_(main.clone())
