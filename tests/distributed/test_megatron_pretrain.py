"""A Megatron-LM style pretrain script that knows nothing of us, through `megatron.training.pretrain`: four launches, two at a time."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.launch import ROOT, torchrun

pytestmark = pytest.mark.distributed
SCRIPT = ROOT / "tests/distributed/pretrain_gpt_like.py"
FLAGS = shlex.split("""
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --kv-channels 16
    --group-query-attention --num-query-groups 2 --qk-layernorm --seq-length 32 --max-position-embeddings 32
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine
    --lr-warmup-iters 1 --weight-decay 0.1 --clip-grad 1.0 --bf16 --use-distributed-optimizer
    --mock-data --tokenizer-type NullTokenizer --vocab-size 250 --make-vocab-size-divisible-by 64 --split 90,5,5
    --transformer-impl local --distributed-backend gloo --use-cpu-initialization --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --no-rope-fusion --log-interval 1 --eval-iters 0 --eval-interval 100 --num-workers 0 --save-interval 2
    --dist-ckpt-optim-fully-reshardable
""")
STOCHASTIC = ["--param-rounding", "stochastic", "--param-rounding-seed", "11"]


LAUNCHER = ("megatron_sr", "run")  # python -m megatron_sr run SCRIPT
PLUGIN = (ROOT / "tests/distributed/pretrain_with_plugin.py",)  # import megatron_sr.megatron.plugin


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict:
    """What each run printed, and the folder with their checkpoints."""
    folder = tmp_path_factory.mktemp("pretrain")

    def pretrain(name: str, way_in: tuple, *flags):
        return torchrun(1, *way_in, SCRIPT, *FLAGS, "--save", folder / name, *flags)

    resume = ["--load", folder / "stochastic", "--ckpt-step", "2"]
    with ThreadPoolExecutor(2) as pool:
        nearest = pool.submit(pretrain, "nearest", PLUGIN)
        watched = ["--param-rounding-log-interval", "2", "--param-rounding-verify-interval", "1"]
        writer = ["--tensorboard-dir", folder / "tensorboard", "--tensorboard-log-interval", "1"]
        stochastic = pool.submit(pretrain, "stochastic", LAUNCHER, *STOCHASTIC, *watched, *writer)
        runs = {"nearest": nearest.result(), "stochastic": stochastic.result()}
        resumed = pool.submit(pretrain, "resumed", PLUGIN, *resume, *STOCHASTIC)
        refused = pool.submit(without_torchrun, *resume, *STOCHASTIC[:3], "12")
        runs |= {"resumed": resumed.result(), "refused": refused.result()}
    return {"folder": folder, **runs}


def without_torchrun(*flags) -> subprocess.CompletedProcess:
    """`python -m megatron_sr run SCRIPT ...`: a world of one rank."""
    command = [sys.executable, "-m", *LAUNCHER, SCRIPT, *FLAGS, *flags]
    rendezvous = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in rendezvous} | {
        "OMP_NUM_THREADS": "1"
    }
    return subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )


def losses(run) -> dict[int, float]:
    found = re.findall(r"iteration +(\d+)/.*? lm loss: (\S+)", run.stdout)
    return {int(iteration): float(loss) for iteration, loss in found}


def checkpoint(folder, name: str, iteration: int = 4) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint: BF16 weights, main params, Adam's moments."""
    path = folder / name / f"iter_{iteration:07d}"
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=path)
    return tensors


def test_an_unmodified_script_trains_with_finite_loss(outputs):
    for name in ("nearest", "stochastic"):
        assert sorted(losses(outputs[name])) == [1, 2, 3, 4]
        assert all(0 < loss < 10 for loss in losses(outputs[name]).values())


def test_one_line_at_start_says_what_is_rounded(outputs):
    assert outputs["nearest"].stdout.count("--param-rounding nearest (Megatron's own cast)") == 1
    assert outputs["stochastic"].stdout.count("--param-rounding stochastic, seed 11, format bf16, noise step") == 1


def test_the_table_at_start_shows_flags_and_cast_sites(outputs):
    table = outputs["stochastic"].stdout
    assert len(re.findall(r"^  --param-rounding-log-interval +2$", table, re.MULTILINE)) == 1
    assert (
        len(re.findall(r"cast site DistributedOptimizer: 1 ranks, [\d,]+ elements stochastic, 0 to nearest", table))
        == 1
    )


def test_metrics_are_in_the_log_and_where_megatrons_own_curves_are(outputs):
    """At steps 2 and 4 of 4, under Megatron's iteration."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = re.findall(r"megatron-sr: step (\d+) \| weights changed: (\S+) %", outputs["stochastic"].stdout)
    assert [step for step, _ in lines] == ["2", "4"]
    events = EventAccumulator(str(outputs["folder"] / "tensorboard"))
    events.Reload()
    for name in ("changed", "unchanged", "rms", "relative"):
        assert [event.step for event in events.Scalars(f"param-rounding/{name}")] == [2, 4]
    changed = [event.value for event in events.Scalars("param-rounding/changed")]
    assert changed == pytest.approx([float(percent) / 100 for _, percent in lines], abs=1e-6)
    assert all(0 < value < 1 for value in changed)


def test_the_flag_changes_the_weights(outputs):
    nearest, stochastic = (checkpoint(outputs["folder"], name) for name in ("nearest", "stochastic"))
    weights = [key for key, value in stochastic.items() if value.dtype == torch.bfloat16]
    assert len(weights) == 11
    matrices = [key for key in weights if stochastic[key].numel() > 1000]
    assert [key for key in matrices if torch.equal(nearest[key], stochastic[key])] == []


def test_save_and_load_resume_bit_for_bit(outputs):
    whole, resumed = (checkpoint(outputs["folder"], name) for name in ("stochastic", "resumed"))
    assert whole.keys() == resumed.keys()
    assert [key for key in whole if not torch.equal(whole[key], resumed[key])] == []
    # Megatron's second log line after a start averages over the first two iterations, so only the first can be compared.
    assert losses(outputs["resumed"])[3] == losses(outputs["stochastic"])[3]


def test_c6_another_seed_ends_the_run_with_the_reason(outputs):
    assert outputs["refused"].returncode != 0
    assert "--param-rounding-seed 12 differs from the checkpoint's 11" in outputs["refused"].stderr
