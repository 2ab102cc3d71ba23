"""Tasks: examples, rewards, and every kind of bad dataset with a message that says where."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from megatron_sr.rl.rewards import math_reward
from megatron_sr.rl.tasks import iteration_generator, read_problems, task_from_spec
from tests.launch import ROOT

PROBLEMS = ROOT / "tests" / "data" / "problems.jsonl"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "examples" / "rlvr_arithmetic" / "base")


def test_addition_examples_are_right_and_of_fixed_length(tokenizer):
    task = task_from_spec("addition", tokenizer)
    for example in task.sample(200, iteration_generator(seed=3, iteration=5)):
        left, right = tokenizer.decode(example.prompt_ids).replace(" ", "").rstrip("=").split("+")
        assert int(left) + int(right) == int(example.answer)
        assert (len(example.prompt_ids), len(example.answer_ids)) == (8, 4)
        assert task.reward(example, example.answer_ids) == 1.0
        assert task.reward(example, example.answer_ids[:3]) == 0.0
        assert task.reward(example, [*example.answer_ids[:3], (example.answer_ids[3] + 1) % 10]) == 0.0


def test_prompts_are_a_pure_function_of_seed_and_iteration(tokenizer):
    task = task_from_spec("addition", tokenizer)
    draw = lambda seed, iteration: task.sample(16, iteration_generator(seed, iteration))
    assert draw(1, 2) == draw(1, 2)
    assert draw(1, 2) != draw(1, 3)
    assert draw(1, 2) != draw(2, 2)
    assert task.evaluation_set(8) == task.evaluation_set(8)


def test_jsonl_task_reads_samples_and_rewards(tokenizer_with_chat):
    task = task_from_spec(f"jsonl:{PROBLEMS}", tokenizer_with_chat)
    examples = task.sample(len(task.examples), torch.Generator().manual_seed(0))
    assert sorted(e.answer for e in examples) == sorted(answer for _, answer in read_problems(PROBLEMS))
    for example in examples:
        prompt = tokenizer_with_chat.decode(example.prompt_ids)
        assert prompt.startswith("<|user|>")
        assert prompt.endswith("<|assistant|>")
        right = tokenizer_with_chat.encode(f"so it is \\boxed{{{example.answer}}}", add_special_tokens=False)
        assert task.reward(example, right) == 1.0
        assert task.reward(example, tokenizer_with_chat.encode("\\boxed{123456789}", add_special_tokens=False)) == 0.0
        assert task.reward(example, []) == 0.0


@pytest.fixture(scope="module")
def tokenizer_with_chat():
    from tests.tiny_models import byte_tokenizer

    return byte_tokenizer()


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("The answer is \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", 1.0),
        ("\\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("\\boxed{2}", "\\frac{1}{2}", 0.0),
        ("no number at all", "7", 0.0),
        ("\\boxed{(3, 4)}", "(3,4)", 1.0),
        ("\\boxed{", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_math_reward(completion, answer, reward):
    assert math_reward(completion, answer) == reward


def test_too_long_problems_are_left_out_and_counted(tokenizer_with_chat, capsys):
    task = task_from_spec(f"jsonl:{PROBLEMS}", tokenizer_with_chat)
    lengths = sorted(len(e.prompt_ids) for e in task.examples)
    task.drop_long_prompts(lengths[-1] - 1, announce=True)
    assert len(task.examples) < len(lengths)
    assert f"left out {len(lengths) - len(task.examples)} of {len(lengths)}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--max-prompt-tokens 3: every problem is longer"):
        task.drop_long_prompts(3, announce=True)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"problem": "1+1?", "answer": "2"}', '{"problem": "2+2?", "answer"'], "line 2: not valid JSON"),
        (['{"problem": "1+1?"}'], "line 1: needs the fields 'problem' and 'answer', found .'problem'"),
        (["", "", "[1, 2]"], "line 3: needs the fields .* found list"),
        (['{"problem": "", "answer": "2"}'], "line 1: 'problem' must be a non-empty string"),
        (['{"problem": "x", "answer": null}'], "line 1: 'answer' must be a string or a number, found NoneType"),
        (['{"problem": "x", "answer": true}'], "line 1: 'answer' must be a string or a number, found bool"),
        (['{"problem": "x", "answer": " "}'], "line 1: 'answer' is empty"),
        ([], "has no problems"),
    ],
)
def test_bad_jsonl_names_file_line_and_way_out(tmp_path, lines, message):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message) as error:
        read_problems(path)
    assert "bad.jsonl" in str(error.value)


def test_unusual_but_valid_jsonl_is_read_and_other_encodings_are_named(tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + '{"problem": "a\u2028b", "answer": 0}\r\n\n{"problem": "c", "answer": "2"}'.encode()
    )
    assert read_problems(path) == [("a\u2028b", "0"), ("c", "2")]
    path.write_bytes('{"problem": "é", "answer": "2"}'.encode("latin-1"))
    with pytest.raises(ValueError, match="odd.jsonl: not UTF-8 .byte 13.*; save the file as UTF-8"):
        read_problems(path)


def test_missing_dataset_and_unknown_task(tokenizer):
    with pytest.raises(FileNotFoundError, match="--task jsonl:no/such.jsonl: there is no such file"):
        task_from_spec("jsonl:no/such.jsonl", tokenizer)
    with pytest.raises(ValueError, match="--task 'chess' is not known; choose 'addition' or 'jsonl:PATH'"):
        task_from_spec("chess", tokenizer)


def test_addition_refuses_a_tokenizer_without_single_characters(tokenizer_with_chat):
    class Merging:
        def encode(self, text, add_special_tokens):
            return [1, 2]

    with pytest.raises(ValueError, match="one token per character, but '0' has 2"):
        task_from_spec("addition", Merging())


def test_shared_math_data_loads_where_it_is_present():
    path = Path(ROOT).parent / "shared" / "data" / "math-1460.jsonl"
    if not path.exists():
        pytest.skip("no ../shared here (a user's clone)")
    assert len(read_problems(path)) == 1460
    assert json.loads(path.read_text().splitlines()[0]).keys() >= {"problem", "answer"}
