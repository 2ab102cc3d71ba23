"""Tasks: examples, prompts and rewards."""

import pytest
import torch
from transformers import AutoTokenizer

from megatron_sr.rl.datasets import read_problems
from megatron_sr.rl.gym_task import final_answer
from megatron_sr.rl.prompts import Prompt
from megatron_sr.rl.tasks import TaskOptions, iteration_generator, task_from_spec
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
        right = example.answer_ids
        assert task.rewards([example], [[right, right[:3], [*right[:3], (right[3] + 1) % 10]]]) == [[1.0, 0.0, 0.0]]


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
    encode = lambda text: tokenizer_with_chat.encode(text, add_special_tokens=False)
    completions = []
    for example in examples:
        prompt = tokenizer_with_chat.decode(example.prompt_ids)
        assert prompt.startswith("<|user|>")
        assert prompt.endswith("<|assistant|>")
        completions.append([encode(f"so it is \\boxed{{{example.answer}}}"), encode("\\boxed{123456789}"), []])
    assert task.rewards(examples, completions) == [[1.0, 0.0, 0.0]] * len(examples)
    assert task.failures() == {"timed_out": 0, "crashed": 0}
    task.close()


@pytest.fixture(scope="module")
def tokenizer_with_chat():
    from tests.tiny_models import byte_tokenizer

    return byte_tokenizer()


def test_too_long_problems_are_left_out_and_counted(tokenizer_with_chat, capsys):
    task = task_from_spec(f"jsonl:{PROBLEMS}", tokenizer_with_chat)
    lengths = sorted(len(e.prompt_ids) for e in task.examples)
    task.drop_long_prompts(lengths[-1] - 1, announce=True)
    assert len(task.examples) < len(lengths)
    assert f"left out {len(lengths) - len(task.examples)} of {len(lengths)}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--max-prompt-tokens 3: every problem is longer"):
        task.drop_long_prompts(3, announce=True)


def test_missing_dataset_and_unknown_task(tokenizer):
    with pytest.raises(FileNotFoundError, match="--task jsonl:no/such.jsonl: there is no such file"):
        task_from_spec("jsonl:no/such.jsonl", tokenizer)
    with pytest.raises(
        ValueError, match="--task 'chess' is not known; choose 'addition', 'jsonl:PATH', 'parquet:PATH' or 'reasoning"
    ):
        task_from_spec("chess", tokenizer)


def test_addition_refuses_a_tokenizer_without_single_characters(tokenizer_with_chat):
    class Merging:
        def encode(self, text, add_special_tokens):
            return [1, 2]

    with pytest.raises(ValueError, match="one token per character, but '0' has 2"):
        task_from_spec("addition", Merging())


# What the models' own chat templates make of one user message (with a system message where it has one), as Jinja.
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
REASON = "Please reason step by step, and put your final answer within \\boxed{}."


@pytest.mark.parametrize(
    "template, prompt, expected",
    [
        (
            QWEN,
            Prompt("none", system=REASON),
            f"<|im_start|>system\n{REASON}<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (DEEPSEEK_R1, Prompt("reason"), f"<BOS><|User|>1+1?\n{REASON}<|Assistant|><think>\n"),
        (None, Prompt(), "Problem: 1+1?\nSolve the problem. Put the final answer in \\boxed{}.\nAnswer:"),
    ],
)
def test_prompts_in_chat_templates(template, prompt, expected):
    from tests.tiny_models import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.chat_template, tokenizer.bos_token = template, "<BOS>"
    assert tokenizer.decode(prompt.ids("1+1?", tokenizer)) == expected


def test_prompt_templates_from_a_file_and_bad_ones(tmp_path, tokenizer):
    own = tmp_path / "own.txt"
    own.write_text("Q: {problem} {{ braces }} \\boxed{}\n")
    assert Prompt(f"@{own}").text == "Q: {problem} {{ braces }} \\boxed{}"
    own.write_text("no place")
    for name, error, message in (
        ("chatty", ValueError, "--prompt-template 'chatty' is not known; choose one of boxed, reason, none, or @FILE"),
        (f"@{own}", ValueError, "lacks {problem}, where the problem goes"),
        ("@missing", FileNotFoundError, "there is no file missing"),
    ):
        with pytest.raises(error, match=message):
            Prompt(name)
    with pytest.raises(ValueError, match="--system-prompt: .* no chat template"):
        Prompt("none", "be brief").ids("1+1=", tokenizer)


@pytest.mark.parametrize(
    "text, answer",
    [
        ("so \\boxed{\\frac{1}{2}} and \\boxed{f(x) = {x}} done", "f(x) = {x}"),
        ("\\boxed{never closed", "\\boxed{never closed"),
        ("x <answer>\n12 </answer> y", "12"),
        ("first\n last \n\n", "last"),
        ("", ""),
    ],
)
def test_final_answers_for_reasoning_gym(text, answer):
    assert final_answer(text) == answer


def test_reasoning_gym_says_how_to_install_it(tokenizer_with_chat, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match="pip install 'megatron-sr.reasoning-gym.'"):
        task_from_spec("reasoning-gym:chain_sum", tokenizer_with_chat)


def test_reasoning_gym_tasks(tokenizer_with_chat):
    pytest.importorskip("reasoning_gym")
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3}
    task = task_from_spec("reasoning-gym:chain_sum", tokenizer_with_chat, TaskOptions(settings=settings))
    task.drop_long_prompts(300, announce=False)
    draw = lambda iteration: task.sample(6, iteration_generator(0, iteration))
    assert draw(1) == draw(1) != draw(2)
    examples, encode = draw(1), lambda text: tokenizer_with_chat.encode(text, add_special_tokens=False)
    completions = [[encode(f"\\boxed{{{e.answer}}}"), encode(e.answer), encode(e.answer + "1")] for e in examples]
    assert task.rewards(examples, completions) == [[1.0, 1.0, 0.0]] * 6
    assert task.evaluation_set(3) == task.evaluation_set(3)
    with pytest.raises(ValueError, match="--max-prompt-tokens 5: only 0 of 64"):
        task.drop_long_prompts(5, announce=False)
    for name, options, message in (
        ("no_such", TaskOptions(), "no_such"),
        ("chain_sum", TaskOptions(settings={"min_term": 2}), "min_term"),
        ("chain_sum", TaskOptions(settings={"size": 2}), "--task-settings size: the job sets that itself"),
    ):
        with pytest.raises(ValueError, match=message):
            task_from_spec(f"reasoning-gym:{name}", tokenizer_with_chat, options)
