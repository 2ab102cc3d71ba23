"""tools/patch.py: which state a tree is in, all or nothing, back to the very bytes. On copies of the installed Megatron-LM's files."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_sr.megatron import source_patch
from tests.launch import ROOT

TOOL = ROOT / "tools/patch.py"
FILES = ("megatron/training/arguments.py", "megatron/training/training.py")
RELEASES = sorted((ROOT / "patches/megatron-lm").iterdir())


@pytest.fixture
def tree(tmp_path) -> Path:
    """A folder with the installed Megatron-LM's files that the patch and its version check touch."""
    installed = next(
        Path(found)
        for found in importlib.util.find_spec("megatron").submodule_search_locations
        if (Path(found) / "training/arguments.py").is_file()
    )
    for name in (*FILES, "megatron/core/package_info.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed.parent / name, tmp_path / name)
    return tmp_path


def patch(action: str, tree: Path, *more: str, env: dict | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, str(TOOL), action, "--target", str(tree), *more]
    return subprocess.run(command, capture_output=True, text=True, env=env)


def contents(tree: Path) -> list[bytes]:
    return [(tree / name).read_bytes() for name in FILES]


def test_apply_and_revert_give_back_the_very_bytes(tree):
    before = contents(tree)
    check = patch("check", tree)
    assert (check.returncode, "not applied; it fits" in check.stdout) == (0, True)
    assert patch("apply", tree).returncode == 0
    assert all(old != new for old, new in zip(before, contents(tree)))
    assert patch("check", tree).stdout.endswith(": applied\n")
    assert patch("revert", tree).returncode == 0
    assert contents(tree) == before


def test_doing_it_twice_changes_nothing_and_says_so(tree):
    assert "nothing to revert" in patch("revert", tree).stdout
    patch("apply", tree)
    patched = contents(tree)
    again = patch("apply", tree)
    assert (again.returncode, "applied already, nothing to do" in again.stdout) == (0, True)
    assert contents(tree) == patched


@pytest.mark.parametrize("part", ["one file", "one line"])
@pytest.mark.parametrize("action", ["check", "apply", "revert"])
def test_a_partly_patched_tree_is_named_and_left_alone(tree, part, action):
    original = contents(tree)
    patch("apply", tree)
    if part == "one file":
        (tree / FILES[1]).write_bytes(original[1])
        named = [f"{FILES[0]}: patched", f"{FILES[1]}: not patched"]
    else:
        text = (tree / FILES[0]).read_text()
        (tree / FILES[0]).write_text(text.replace("    source_patch.check_arguments(args)\n", ""))
        named = [f"{FILES[0]}: has some of the patch's lines, not all", f"{FILES[1]}: patched"]
    before = contents(tree)
    done = patch(action, tree)
    assert done.returncode == 1
    assert "partially applied" in done.stderr
    assert all(words in done.stderr for words in named)
    assert contents(tree) == before


@pytest.mark.parametrize("action", ["check", "apply", "revert"])
def test_a_tree_that_it_does_not_fit_is_left_alone(tree, action):
    text = (tree / FILES[0]).read_text()
    (tree / FILES[0]).write_text(text.replace("    parser = _add_fault_injector_args(parser)\n", ""))
    before = contents(tree)
    done = patch(action, tree)
    assert done.returncode == 1
    assert "does not fit" in done.stderr
    assert f"{FILES[0]}: differs from the release" in done.stderr
    assert "import megatron_sr.megatron.plugin" in done.stderr
    assert contents(tree) == before


def test_it_works_inside_another_repository(tree):
    """As for the site-packages of a project's .venv: git would pass over files that the outer repository ignores."""
    inner = tree / "project/.venv"
    inner.mkdir(parents=True)
    shutil.move(tree / "megatron", inner / "megatron")
    subprocess.run(["git", "init", "-q"], cwd=inner.parent, check=True)
    (inner.parent / ".gitignore").write_text(".venv\n")
    before = contents(inner)
    assert patch("apply", inner).returncode == 0
    assert contents(inner) != before


@pytest.mark.parametrize(
    "more, words",
    [
        (["--target", "/nowhere"], "give a Megatron-LM checkout"),
        (["--release", "core_v0.1.x"], "there is no patch for core_v0.1.x, only for core_v0.19.x"),
    ],
)
def test_bad_input_is_refused_with_the_way_out(tree, more, words):
    done = patch("check", tree, *more)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_release_without_a_patch_is_refused(tree):
    (tree / "megatron/core/package_info.py").write_text("MAJOR = 0\nMINOR = 12\n")
    assert "there is no patch for core_v0.12.x" in patch("check", tree).stderr


def test_without_git_it_says_so(tree):
    done = patch("check", tree, env={**os.environ, "PATH": "/nowhere"})
    assert (done.returncode, "git is not on the PATH" in done.stderr) == (2, True)


@pytest.mark.parametrize("release", RELEASES, ids=lambda folder: folder.name)
def test_patches_only_call_us(release):
    """Every line that a patch adds is an import or a call of source_patch, each function once; it removes none."""
    lines = (release / "param_rounding.patch").read_text().splitlines()
    added = [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert not [line for line in lines if line.startswith("-") and not line.startswith("---")]
    called = sorted(name for line in added for name in re.findall(r"source_patch\.(\w+)\(", line))
    assert called == ["add_arguments", "check_arguments", "round_params"]
    assert all(inspect.isfunction(getattr(source_patch, name)) for name in called)
    imports = [line for line in added if line.startswith("from megatron_sr.megatron import source_patch")]
    assert len(added) == len(called) + len(imports) == 5
