"""The command line: what each command imports, and what bad input answers. Fresh interpreters where imports are the point."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import megatron_sr
from megatron_sr import cli


def imported_by(*words: str) -> tuple[str, set[str]]:
    """What `megatron-sr WORDS` prints, and the modules that a fresh interpreter has imported by then."""
    code = (
        "import sys\nfrom megatron_sr import cli\n"
        f"try:\n    cli.main({list(words)!r})\nexcept SystemExit:\n    pass\n"
        "print('\\n--', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    printed, modules = done.stdout.split("\n--")
    return printed.strip(), set(modules.split())


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["run", "--help"]], ids=" ".join)
def test_version_and_help_import_neither_torch_nor_megatron(words):
    printed, modules = imported_by(*words)
    assert not modules & {"torch", "megatron", "vllm", "numpy"}
    assert printed == megatron_sr.__version__ if words == ["--version"] else "usage: megatron-sr" in printed


def test_every_command_is_a_module_with_arguments_and_an_exit_code(capsys):
    for name, (module, help) in cli.COMMANDS.items():
        loaded = importlib.import_module(module)
        assert callable(loaded.add_arguments), name
        assert callable(loaded.main), name
        with pytest.raises(SystemExit) as stopped:
            cli.main([name, "--help"])
        assert stopped.value.code == 0
        assert help


def test_run_says_which_script_is_missing(capsys):
    assert cli.main(["run", "nowhere.py"]) == 2
    assert "nowhere.py: there is no such file; give the path" in capsys.readouterr().err


def test_the_package_gives_its_public_names_on_first_use():
    for name in megatron_sr.__all__:
        assert getattr(megatron_sr, name) is not None
        assert name in dir(megatron_sr)
    from megatron_sr.noise import Noise
    from megatron_sr.rounding import RoundingPlan

    assert (megatron_sr.Noise, megatron_sr.RoundingPlan) == (Noise, RoundingPlan)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        megatron_sr.nothing  # noqa: B018


def test_verify_needs_a_checkpoint_or_an_engine(capsys):
    assert cli.main(["verify"]) == 2
    assert "give the folder of a checkpoint, or --engine URL" in capsys.readouterr().err
    assert cli.main(["verify", "--engine", "http://127.0.0.1:1"]) == 2
    assert "--engine needs --checkpoint DIR" in capsys.readouterr().err
