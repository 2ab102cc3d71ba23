"""Mathematical rewards: verdicts, answers that hang or crash, and the gold answers of the shared data against themselves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_sr.rl import math_pool, math_worker
from megatron_sr.rl.math_pool import Failures, MathPool
from tests.launch import ROOT


@pytest.fixture(scope="module")
def pool():
    pool = MathPool(workers=2, time_limit=0.5)
    yield pool
    pool.close()
    assert not workers()


def workers():
    """The processes of all pools here."""
    children = psutil.Process().children(recursive=True)
    return [p for p in children if p.status() != psutil.STATUS_ZOMBIE and math_worker.__name__ in p.cmdline()]


def failures_in(pool, pairs):
    before = Failures(**vars(pool.failures))
    rewards = pool.rewards(pairs)
    return rewards, pool.failures.timed_out - before.timed_out, pool.failures.crashed - before.crashed


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
        ("<think>\\boxed{8}, no</think> it is \\boxed{7}", "7", 1.0),
        ("<think>it is \\boxed{7}</think> so \\boxed{8}", "7", 0.0),
        ("<think>it is \\boxed{7}</think>", "7", 0.0),
        ("\\boxed{7} or \\boxed{8}", "7", 0.0),  # no reward for guessing
        ("so\nAnswer: 34", "34", 1.0),  # DAPO-Math-17k's form
        ("so\nAnswer: $35$", "34", 0.0),
        ("\\boxed{025}", "25", 1.0),  # AIME
        ("\ud800 \\boxed{7}", "7", 1.0),
        # five answers of MATH-1460 in other writings, and wrong ones
        ("\\boxed{30}", "30^\\circ.", 1.0),
        ("\\boxed{30^\\circ.}", "30", 1.0),
        ("\\boxed{7}", "7\\text{ hours}.", 1.0),
        ("\\boxed{\\frac{1}{29322216}}", "\\dfrac{1}{29,\\!322,\\!216}", 1.0),
        ("\\boxed{\\frac{2469}{20{,}000}}", "\\dfrac{2469}{20,\\!000}", 1.0),
        ("\\boxed{\\frac{2469}{20001}}", "\\dfrac{2469}{20,\\!000}", 0.0),
        ("\\boxed{c + a + b}", "a + b + c", 1.0),
        ("\\boxed{a + b + d}", "a + b + c", 0.0),
        ("\\boxed{(1,200)}", "1200", 0.0),
    ],
)
def test_verdicts(pool, completion, answer, reward):
    assert pool.rewards([(completion, answer)]) == [reward]


def test_hanging_and_hostile_answers_cost_only_their_own_reward(pool, tmp_path):
    """In order, with good answers between them; the pool goes on."""
    good = ("\\boxed{3}", "3")
    touch = f"__import__('os').system('touch {tmp_path / 'ran'}')"
    hanging = ["\\boxed{9^{9^{9^{9}}}}", "\\boxed{10^{10^{9}}}"]
    others = ["{" * 30_000, "\\boxed{" + "(" * 400 + "1" + ")" * 400 + "}", touch, f"\\boxed{{{touch}}}", "\x00"]
    pairs = [pair for text in hanging + others for pair in ((text, "3"), good)]
    rewards, timed_out, crashed = failures_in(pool, pairs)
    assert rewards == [0.0, 1.0] * len(hanging + others)
    assert (timed_out >= len(hanging), crashed) == (True, 0)
    assert not (tmp_path / "ran").exists()


def test_a_worker_killed_from_outside_loses_nothing(pool):
    """As the kernel does when memory runs out."""
    assert pool.rewards([("\\boxed{1}", "1")] * 4) == [1.0] * 4
    before = workers()
    assert before
    for process in before:
        process.kill()
    psutil.wait_procs(before)
    rewards, timed_out, crashed = failures_in(pool, [("\\boxed{1}", "1"), ("\\boxed{2}", "1")])
    assert (rewards, timed_out, crashed) == ([1.0, 0.0], 0, 0)


def test_a_worker_that_is_stopped_is_given_up(monkeypatch):
    """Uses no CPU time, so only the wall clock finds it."""
    monkeypatch.setattr(math_pool, "WALL_FACTOR", 0.0)
    monkeypatch.setattr(math_pool, "WALL_MORE", 0.3)
    pool = MathPool(workers=1, time_limit=0.5)
    others = {p.pid for p in workers()}
    pool._idle.get()
    pool._idle.put(math_pool._Worker(2048))
    (mine,) = [p for p in workers() if p.pid not in others]
    mine.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    assert pool.rewards([("\\boxed{1}" + " " * 10**7, "1")]) == [0.0]  # more than a socket's buffer holds
    assert time.monotonic() - started < 5
    assert pool.failures == Failures(timed_out=1)
    assert not mine.is_running()
    pool.close()


def test_workers_that_cannot_start_say_why(monkeypatch):
    monkeypatch.setattr(math_pool, "_environment", lambda: {"PATH": os.environ["PATH"], "PYTHONPATH": "/nowhere"})
    monkeypatch.setattr(math_pool.math_worker, "__name__", "no_such_module")
    with pytest.raises(RuntimeError, match="did not start .*\n.*No module named no_such_module"):
        MathPool(1, 1.0).rewards([("1", "1")])


def test_workers_import_no_torch_and_end_with_their_parent(tmp_path):
    """A parent that is killed while a worker computes: nobody is left to tell the worker."""
    program = (
        "import sys, threading, time\n"
        "from megatron_sr.rl.math_pool import MathPool\n"
        "assert 'torch' not in sys.modules\n"
        "pool = MathPool(1, 1.0)\n"
        "pool.rewards([('\\\\boxed{1}', '1')])\n"
        "threading.Thread(target=pool.rewards, args=([('\\\\boxed{9^{9^{9^{9}}}}', '1')],), daemon=True).start()\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout.readline() == "ready\n"
        children = psutil.Process(parent.pid).children()
        assert children
        for child in children:
            assert not any("torch" in m.path for m in child.memory_maps()), "a worker imports torch"
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


def test_every_gold_answer_of_the_shared_data_verifies_against_itself(pool):
    """1,460 of MATH-1460 and 30 of AIME 2024 in \\boxed{}; equal answers are checked once. Known exceptions: none."""
    folder = Path(ROOT).parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no ../shared here (a user's clone)")
    rows = [json.loads(line) for name in ("math-1460", "aime-2024") for line in (folder / f"{name}.jsonl").open()]
    assert len(rows) == 1490
    answers = sorted({row["answer"] for row in rows})
    patient = MathPool(workers=2, time_limit=5.0)
    rewards = patient.rewards([(f"Thus the answer is $\\boxed{{{answer}}}$.", answer) for answer in answers])
    assert [answer for answer, reward in zip(answers, rewards) if reward != 1.0] == []
    assert patient.failures == Failures()
    patient.close()
