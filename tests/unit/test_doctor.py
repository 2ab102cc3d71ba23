"""`megatron-sr doctor`: the report, with and without a Megatron-LM command line. One fresh interpreter for each of the latter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron_sr import cli, doctor
from megatron_sr.config import FLAGS


def test_report_of_this_machine(capsys):
    code = cli.main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert report["works"]
    assert report["problems"] == []
    assert report["versions"]["megatron-core"].startswith("0.19.")
    assert report["versions"]["transformer-engine"] is None or report["gpus"]
    assert report["kernels"]["cpu"].startswith("ok: C++, runs ")
    assert any(flag.startswith(FLAGS["save_model"]) for flag in report["flags"])
    assert "--use-megatron-fsdp" in report["unsupported"] or report["unsupported"]
    assert report["cast_site"] is None
    assert report["never_run"]


def test_text_report(capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for words in ("megatron-core", "kernels", "refused with --param-rounding stochastic", "never run on a GPU so far"):
        assert words in text
    assert text.rstrip().endswith("stochastic rounding works here")


def test_a_kernel_that_was_not_built_and_a_missing_megatron_are_problems(monkeypatch):
    monkeypatch.setenv("MEGATRON_SR_CPU_LEVEL", "avx9000")
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    report = doctor.diagnose()
    assert not report["works"]
    assert report["kernels"]["cpu"].startswith("no: MEGATRON_SR_CPU_LEVEL='avx9000'")
    assert any("megatron-core is not installed" in problem for problem in report["problems"])


@pytest.mark.parametrize(
    "flags, code, site, reason",
    [
        (
            "--bf16 --use-distributed-optimizer --param-rounding stochastic",
            0,
            "DistributedOptimizer: main shards",
            None,
        ),
        (
            "--bf16 --param-rounding stochastic --qk-clip --a-flag-of-the-script 3",
            1,
            None,
            "does not work with --qk-clip on",
        ),
    ],
    ids=["works", "refused"],
)
def test_the_cast_site_of_a_megatron_command_line(flags, code, site, reason):
    command = [sys.executable, "-W", "ignore", "-m", "megatron_sr", "doctor", "--json", "--", *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert done.returncode == code
    assert report["cast_site"]["site"] is None if site is None else report["cast_site"]["site"].startswith(site)
    assert report["cast_site"]["reason"] is None if reason is None else reason in report["cast_site"]["reason"]
