"""Point 5 of the MXFP8 mode: the post-training job on real gloo ranks, Megatron trains in MXFP8, vLLM generates in MXFP8."""

import pytest

from tests.distributed.test_post_training import job

pytestmark = [pytest.mark.distributed, pytest.mark.rollout]


def test_point5_mxfp8_job_hands_codes_and_scales_to_vllm(tmp_path):
    """The engine holds the trainer's codes and scales after every sync; the low-precision policy is close to its main params."""
    records = job(
        "--param-rounding", "stochastic", "--param-rounding-format", "mxfp8", "--iterations", 1, metrics=tmp_path / "m.jsonl"
    )  # fmt: skip
    # 2 syncs x (25 tensors + the scales of 2 layers x 7 linear weights) x 2 ranks
    assert records[-1]["parity"] == {"syncs": 2, "tensors": 156, "mismatched_tensors": 0}
    # Every step draws anew: most of the quantized weights change value.
    assert all(0.2 < fraction < 0.9 for _, fraction in records[1]["unchanged_after_steps"])
    assert 0 < records[1]["logprob_gap_mean"] < 0.02
    for r in records:
        assert r["exact_reward"] == pytest.approx(r["exact_reward_main_params"], abs=0.03)
        assert r["exact_reward"] != r["exact_reward_main_params"]
