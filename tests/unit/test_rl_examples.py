"""examples/math: the exact command lines through the job's parser, checks and loaders, with rows of the data sets' layouts."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron_sr.rl import options, task_options
from tests.launch import ROOT
from tests.tiny_models import byte_tokenizer
from tests.unit.test_rl_datasets import DAPO

FOLDER = ROOT / "examples" / "math"
REASON = "Please reason step by step, and put your final answer within \\boxed{}."


def arguments(script, folder, *more, data):
    """The parsed and checked flags of the job that the script would start."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "aime.jsonl").write_text('{"problem": "1+1?", "answer": "002"}')
    environment = {
        "PATH": os.environ["PATH"],
        "DRY_RUN": "1",
        "MODEL": str(folder / "model"),
        "SAVE": str(folder / "save"),
    }
    environment |= {"DATA": str(data), "EVAL": str(folder / "aime.jsonl")}
    done = subprocess.run(["bash", FOLDER / script, *more], env=environment, capture_output=True, text=True, check=True)
    words = shlex.split(done.stdout)
    args = options.parser().parse_args(words[words.index("megatron_sr.rl.train") + 1 :])
    options.check(args, int(words[words.index("--nproc-per-node") + 1]))
    return args


def prompts(args):
    """(first training prompt, first evaluation prompt) with the byte tokenizer's chat template, and the answers."""
    tokenizer = byte_tokenizer()
    tasks = task_options.build_tasks(args, tokenizer, announce=True)
    examples = [task.examples[0] for task in tasks]
    return [tokenizer.decode(e.prompt_ids) for e in examples], [e.answer for e in examples]


def test_math_1460(tmp_path):
    shared = Path(ROOT).parent / "shared" / "data" / "math-1460.jsonl"
    data = shared if shared.exists() else ROOT / "tests" / "data" / "problems.jsonl"
    args = arguments("math_1460.sh", tmp_path, data=data)
    assert (args.prompts, args.completions, args.mini_batches, args.eval_samples) == (64, 8, 4, 32)
    problem = json.loads(data.read_text().splitlines()[0])["problem"]
    texts, answers = prompts(args)
    assert texts == [f"<|user|>{p}\n{REASON}<|end|><|assistant|>" for p in (problem, "1+1?")]
    assert answers[1] == "002"


def test_math_1460_in_fp16_with_a_system_prompt(tmp_path):
    more = ["--prompt-template", "none", "--system-prompt", REASON, "--fp16", "--param-rounding", "nearest"]
    args = arguments("math_1460.sh", tmp_path, *more, data=ROOT / "tests" / "data" / "problems.jsonl")
    assert (args.fp16, args.param_rounding) == (True, "nearest")
    texts, _ = prompts(args)
    assert texts[1] == f"<|system|>{REASON}<|end|><|user|>1+1?<|end|><|assistant|>"


def test_dapo_math_17k(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([DAPO] * 3), tmp_path / "dapo.parquet")
    args = arguments("dapo_math_17k.sh", tmp_path, data=tmp_path / "dapo.parquet")
    texts, answers = prompts(args)
    assert texts == [
        f"<|user|>{DAPO['prompt'][0]['content']}<|end|><|assistant|>", f"<|user|>1+1?\n{REASON}<|end|><|assistant|>",
    ]  # fmt: skip
    assert answers == ["34", "002"]


@pytest.mark.parametrize("script", ["math_1460.sh", "dapo_math_17k.sh"])
def test_flags_are_explained_and_settings_named(script):
    lines = (FOLDER / script).read_text().splitlines()
    flags = [line for line in lines if line.startswith("  --")]
    assert len(flags) > 5
    assert [line for line in flags if not re.search(r"  # \S", line)] == []
    environment = {"PATH": os.environ["PATH"], "DRY_RUN": "1", "MODEL": "/m", "DATA": "/d", "SAVE": "/s"}
    done = subprocess.run(["bash", FOLDER / script], env=environment, capture_output=True, text=True)
    assert (done.returncode, "set EVAL: " in done.stderr) == (2, True)
