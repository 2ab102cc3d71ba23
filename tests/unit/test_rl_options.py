"""Bad input to the post-training job: a message with the flag, the value and the way out."""

import pytest

from megatron_sr.rl import options
from tests.launch import ROOT

BASE = str(ROOT / "examples" / "rlvr_arithmetic" / "base")


def checked(*flags, world_size=2, model=BASE):
    args = options.parser().parse_args(["--model", model, *map(str, flags)])
    options.check(args, world_size)
    return args


def test_defaults_pass():
    args = checked("--param-rounding", "stochastic")
    assert (args.prompts, args.completions, args.lr) == (64, 8, 1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--param-rounding", "random"], "--param-rounding='random' is not known; choose one of: nearest, stochastic"),
        (["--param-rounding-seed", -1], "--param-rounding-seed=-1 is out of range; choose a whole number from 0"),
        (["--param-rounding-seed", 2**64], f"--param-rounding-seed={2**64} is out of range"),
        (["--param-rounding", "stochastic", "--no-bf16"], "--no-bf16 with --param-rounding stochastic.*drop --no-bf16"),
        (
            ["--tensor-model-parallel-size", 4],
            "--tensor-model-parallel-size 4 .* needs a multiple of 4 ranks, but there are 2",
        ),
        (["--expert-model-parallel-size", 4], "--expert-model-parallel-size 4 does not divide the 2 ranks"),
        (
            ["--prompts", 12],
            "--prompts 12 cannot be shared by --mini-batches 4 x 2 data-parallel ranks; choose a multiple of 8",
        ),
        (["--micro-batch-size", 48], "--micro-batch-size 48 does not divide the 64 sequences"),
        (["--completions", 1], "--completions 1: the advantage needs at least 2"),
        (["--iterations", 0], "--iterations 0 must be at least 1"),
        (["--seed", -3], "--seed=-3 is out of range; choose a whole number from 0"),
        (["--lr", "nan"], "--lr nan must be a finite number above 0"),
        (["--lr", -1], "--lr -1.0 must be a finite number above 0"),
        (["--clip-grad", "inf"], "--clip-grad inf must be a finite number, at least 0"),
        (["--dual-clip", 0.5], "--dual-clip 0.5 must be a finite number above 1"),
        (["--save", "/dev/null/x"], "--save /dev/null/x cannot be written .Not a directory.; choose another place"),
        (["--metrics", "/dev/null/x/m"], "--metrics /dev/null/x/m cannot be written"),
        (["--save-interval", 2], "--save-interval 2 needs --save FOLDER"),
        (["--save-hf", "/dev/null/x"], "--save-hf /dev/null/x cannot be written"),
        (["--save-hf", ROOT], "--save-hf .* exists and is not empty; choose a new folder"),
        (["--max-staleness", -1], "--max-staleness -1 must be at least 0"),
        (
            ["--in-flight", "keep"],
            "--in-flight keep has no effect without rollouts that run ahead; add --max-staleness K",
        ),
        (["--delta-zstd"], "--delta-zstd compresses deltas; add --weight-sync delta"),
        (
            ["--numerical-parity", "--tensor-model-parallel-size", 2],
            "--numerical-parity with --tensor-model-parallel-size 2: .*use 1",
        ),
        (
            ["--numerical-parity", "--pipeline-model-parallel-size", 2],
            "--numerical-parity with --pipeline-model-parallel-size 2",
        ),
        (
            ["--numerical-parity", "--expert-model-parallel-size", 2],
            "--numerical-parity with --expert-model-parallel-size 2",
        ),
        (
            ["--numerical-parity", "--max-staleness", 1],
            "--numerical-parity with --max-staleness 1: older weights .*use 0",
        ),
        (
            ["--numerical-parity", "--param-rounding", "stochastic", "--param-rounding-format", "mxfp8"],
            "--numerical-parity with --param-rounding-format mxfp8",
        ),
        (
            ["--fp16", "--numerical-parity"],
            "--numerical-parity with --fp16: the engine's arithmetic is known for BF16 only",
        ),
        (["--fp16", "--param-rounding-format", "mxfp8"], "--param-rounding-format mxfp8 does not fit into float16"),
        (["--fp16", "--initial-loss-scale", "inf"], "--initial-loss-scale inf must be finite"),
        (
            ["--fp16", "--initial-loss-scale", 2, "--min-loss-scale", 4],
            "2 must be finite and at least --min-loss-scale 4",
        ),
        (["--fp16", "--hysteresis", 0], "--hysteresis 0 must be at least 1"),
        (["--importance-ratio-cap", 0.9], "--importance-ratio-cap 0.9 must be a finite number, at least 1"),
        (["--eval-samples", 0], "--eval-samples 0 must be at least 1"),
        (["--eval-temperature", 0], "--eval-temperature 0.0 must be a finite number above 0"),
        (["--reward-workers", 0], "--reward-workers 0 must be at least 1"),
        (["--reward-time-limit", "nan"], "--reward-time-limit nan must be a finite number above 0"),
        (["--task-settings", "{"], "--task-settings {: not valid JSON"),
        (["--task-settings", "[]"], "must be a JSON object"),
        (["--prompt-template", "chatty"], "--prompt-template 'chatty' is not known"),
        (
            ["--eval-task", "addition", "--rollout-engine", "ray", "--max-staleness", 1],
            "--eval-task with --rollout-engine ray and --max-staleness",
        ),
        (["--load", "no/such/folder"], "--load no/such/folder: no checkpoint there"),
    ],
)
def test_bad_flags(flags, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        checked(*flags)


def test_missing_base():
    with pytest.raises(FileNotFoundError, match="--model no/base: no config.json there; .*make_base.py --out no/base"):
        checked(model="no/base")


def test_fp16_brings_megatrons_loss_scale_with_megatrons_defaults():
    args = checked("--fp16", "--param-rounding", "stochastic", "--loss-scale-window", 50)
    assert options.loss_scale(args) == {
        "initial_loss_scale": 2.0**32, "min_loss_scale": 1.0, "loss_scale_window": 50, "hysteresis": 2,
    }  # fmt: skip
    assert options.loss_scale(checked()) == {}


def test_fp16_base_is_rounded_once_and_must_be_finite(tmp_path):
    import torch
    from safetensors.torch import save_file

    from megatron_sr.rl.base import load_base

    weights = torch.tensor([1.0078125, 2.0**-24, 2.0**-26, -3.0]).bfloat16()
    save_file({"w": weights}, tmp_path / "model.safetensors")
    assert load_base(tmp_path, torch.float16)["w"].tolist() == [1.0078125, 2.0**-24, 0.0, -3.0]
    assert load_base(tmp_path)["w"].dtype == torch.bfloat16
    save_file({"w": weights.half()}, tmp_path / "model.safetensors")
    assert torch.equal(load_base(tmp_path, torch.float16)["w"], weights.half())
    with pytest.raises(ValueError, match="w is float16, not bfloat16"):
        load_base(tmp_path)
    save_file({"w": (65536 * weights)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match="w has elements that are not finite in float16; train in BF16, without --fp16"
    ):
        load_base(tmp_path, torch.float16)


def test_lengths_default_to_the_task_s():
    assert (checked().max_prompt_tokens, checked().max_completion_tokens) == (16, 4)
    text = checked("--task", "jsonl:x", "--max-completion-tokens", 77)
    assert (text.max_prompt_tokens, text.max_completion_tokens) == (1024, 77)


@pytest.mark.parametrize(
    ("tracker", "state", "message"),
    [
        ("x", "{}", "latest_checkpointed_iteration.txt or the loop_state.json .* is damaged .*use an older checkpoint"),
        ("3", "{", "is damaged"),
        ("4", "{}", "is damaged"),  # a folder that is not there
        ("3", '{"iteration": 3}', "loop_state.json lacks digests, parity, seed, settings, task"),
    ],
)
def test_damaged_checkpoints_name_the_file(tmp_path, tracker, state, message):
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "iter_0000003" / "loop_state.json").write_text(state)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    with pytest.raises(ValueError, match=message):
        checked("--load", tmp_path)
