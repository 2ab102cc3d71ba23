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
        (["--load", "no/such/folder"], "--load no/such/folder: no checkpoint there"),
    ],
)
def test_bad_flags(flags, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        checked(*flags)


def test_missing_base():
    with pytest.raises(FileNotFoundError, match="--model no/base: no config.json there; .*make_base.py --out no/base"):
        checked(model="no/base")


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
