"""The source patch (patches/megatron-lm/): applied to a copy of the installed Megatron-LM it trains as the plugin does, bit for bit."""

from __future__ import annotations

import filecmp
import importlib.util
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.distributed.test_megatron_pretrain import FLAGS, PLUGIN, SCRIPT, STOCHASTIC, checkpoint, losses
from tests.launch import ROOT, torchrun

pytestmark = pytest.mark.distributed
SOURCE = (ROOT / "tests/distributed/pretrain_with_patch.py",)


def installed() -> Path:
    """The installed `megatron` folder with the training package."""
    found = map(Path, importlib.util.find_spec("megatron").submodule_search_locations)
    return next(folder for folder in found if (folder / "training/arguments.py").is_file())


def patch(action: str, tree: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools/patch.py", action, "--target", tree], check=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict:
    """A patched copy of the installed package, what training with it and with the plugin printed, and their checkpoints' folder."""
    folder = tmp_path_factory.mktemp("patch")
    tree = folder / "tree"
    shutil.copytree(installed(), tree / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    patch("apply", tree)

    def pretrain(name: str, way_in: tuple, paths: list, *flags):
        env = {"PYTHONPATH": ":".join(map(str, paths)), "TREE_REPORT": str(folder / "report.json")}
        return torchrun(1, *way_in, SCRIPT, *FLAGS, "--save", folder / name, *flags, env=env)

    with ThreadPoolExecutor(2) as pool:
        patched = pool.submit(pretrain, "patched", SOURCE, [tree, ROOT], *STOCHASTIC)
        plugin = pool.submit(pretrain, "plugin", PLUGIN, [ROOT], *STOCHASTIC)
        done = {"patched": patched.result(), "plugin": plugin.result()}
    return {"folder": folder, "tree": tree, "report": json.loads((folder / "report.json").read_text()), **done}


def test_the_patched_source_is_what_trained(runs):
    assert runs["report"]["source"] == str(runs["tree"] / "megatron/training/arguments.py")
    assert runs["report"]["wrapped"] == []


def test_three_ways_in_one_behaviour_patch_equals_plugin_bit_for_bit(runs):
    patched, plugin = (checkpoint(runs["folder"], name) for name in ("patched", "plugin"))
    assert patched.keys() == plugin.keys()
    assert len([key for key, value in patched.items() if value.dtype == torch.bfloat16]) == 11
    assert [key for key in plugin if not torch.equal(patched[key], plugin[key])] == []
    assert losses(runs["patched"]) == losses(runs["plugin"])


def test_the_patched_source_says_once_what_is_rounded(runs):
    def announced(name: str) -> list[str]:
        return [line for line in runs[name].stdout.splitlines() if line.startswith("megatron-sr")]

    assert announced("patched") == announced("plugin") != []


def test_c6_the_patched_source_refuses_an_unsupported_flag(runs):
    assert runs["report"]["refused"].startswith("--param-rounding stochastic does not work with --qk-clip on")


def test_reverting_gives_back_the_installed_package(runs):
    patch("revert", runs["tree"])
    names = [str(path.relative_to(runs["tree"] / "megatron")) for path in (runs["tree"] / "megatron").rglob("*.py")]
    same, different, missing = filecmp.cmpfiles(runs["tree"] / "megatron", installed(), names, shallow=False)
    assert (different, missing, len(same) > 300) == ([], [], True)
