"""Checkpoints of real Megatron jobs: model params verified, recomputed or left out, rounding turned on and off, other layouts.

One launch on two gloo ranks serves all tests here; those of `megatron-sr verify` read the checkpoints that it leaves.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_sr import cli
from megatron_sr.megatron.checkpoint_reader import CheckpointReader, Chunk
from tests.launch import ROOT, torchrun

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    torchrun(
        2,
        ROOT / "tests/distributed/run_ranks.py",
        "tests.distributed.resume_ranks",
        folder / "results.json",
        folder / "checkpoints",
        timeout=400,
    )
    return folder


@pytest.fixture(scope="module")
def results(folder) -> dict:
    return json.loads((folder / "results.json").read_text())


def equal(resumed: dict) -> None:
    assert resumed["loaded"]
    assert resumed["continued"]
    assert resumed["step"] == 2


RESUMED = [
    "full, fully_reshardable", "full, dp_reshardable", "full, MoE fully_reshardable", "full, MoE dp_reshardable",
    "TP2, buckets", "PP2, buckets", "simulated", "mxfp8, fully_reshardable", "mxfp8, dp_reshardable",
]  # fmt: skip


@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case.replace(", ", "-"))
def test_resume_is_equal_bit_for_bit(results, case):
    equal(results[case])
    assert results[case]["printed"] == ""  # nothing to say: the bits are as recomputed


@pytest.mark.parametrize("sharding", ["fully_reshardable", "dp_reshardable"])
@pytest.mark.parametrize("model", ["save none", "save none, MoE"])
def test_save_model_none_recomputes_every_bit(results, model, sharding):
    equal(results[model][sharding])
    assert "model params are recomputed from main params at step 2" in results[model][sharding]["printed"]


@pytest.mark.parametrize("case", ["overlap", "fp16", "not distributed"])
def test_save_model_none_with_overlap_fp16_and_without_the_distributed_optimizer(results, case):
    equal(results[f"none, {case}"])


def stored(path: Path) -> dict[str, TensorStorageMetadata]:
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


@pytest.mark.parametrize("sharding", ["fully_reshardable", "dp_reshardable"])
def test_save_model_none_writes_no_model_params_at_all(results, folder, sharding):
    """2 bytes a parameter less: everything that is left is FP32."""
    tensors = stored(folder / "checkpoints" / f"none {sharding}")
    assert {entry.properties.dtype for entry in tensors.values()} == {torch.float32}
    full = stored(folder / "checkpoints" / "full")
    model = {key: entry for key, entry in full.items() if entry.properties.dtype == torch.bfloat16}
    assert len(model) == 10
    assert not model.keys() & tensors.keys()


def test_save_model_none_needs_content_metadata(results):
    assert results["needs metadata"].startswith(
        "--param-rounding-save-model none needs a checkpoint with content metadata"
    )


def test_weights_alone_cannot_be_loaded_from_a_checkpoint_without_them(results):
    message = results["weights alone from none"]
    assert (
        "holds no model params (--param-rounding-save-model none): they are recomputed from its main params" in message
    )
    assert "save once more with --param-rounding-save-model full" in message


FC2 = "decoder.layers.mlp.linear_fc2.weight"
EXPERTS = "decoder.layers.mlp.experts.experts.linear_fc1.weight"


@pytest.mark.parametrize("case", ["edited", "edited, not distributed"])
def test_an_edited_model_param_stops_the_load_and_is_named(results, case):
    for message in results[case]["messages"]:  # on both ranks
        assert message.startswith("the checkpoint's model params are not the rounding of its main params at step 2: ")
        assert f"{FC2} (1 of " in message
        assert "--param-rounding-on-mismatch recompute" in message


@pytest.mark.parametrize("sharding", ["fully_reshardable", "dp_reshardable"])
def test_an_edited_expert_is_named_by_the_rank_that_holds_it(results, sharding):
    first, second = results[f"edited, MoE {sharding}"]["messages"]
    assert first is None
    assert f"{EXPERTS} (1 of " in second


@pytest.mark.parametrize(
    "case", ["edited", "edited, not distributed", "edited, MoE fully_reshardable", "edited, MoE dp_reshardable"]
)
def test_on_mismatch_recompute_restores_the_saved_bits_and_says_so(results, case):
    assert results[case]["recomputed"]
    speaks = 1 if "MoE" in case else 0  # one of the ranks that hold the tensor
    words = f"rank {speaks}: model params are recomputed from main params at step 2; the checkpoint's differed"
    assert words in results[case]["printed"][speaks]


def test_a_mixed_checkpoint_is_refused(results):
    assert results["mixed"].startswith(
        "the checkpoint's model params are not the rounding of its main params at step 3"
    )


@pytest.mark.parametrize(
    "setting, start, changed",
    [
        ("seed", "--param-rounding-seed 6 differs from the checkpoint's 5", "--param-rounding-seed 5 -> 6"),
        ("noise", "--param-rounding-noise fixed differs from the checkpoint's step", "--param-rounding-noise step -> fixed"),
        ("format", "--param-rounding-format e8m5 differs from the checkpoint's bf16", "--param-rounding-format bf16 -> e8m5"),
        ("exclude", "--param-rounding-exclude *norm* embedding* differs from the checkpoint's (none)", "--param-rounding-exclude"),
    ],
)  # fmt: skip
def test_changed_settings_are_an_error_or_with_recompute_announced(results, setting, start, changed):
    result = results["changed settings"][setting]
    assert result["message"].startswith(start)
    assert "--param-rounding-on-mismatch recompute" in result["message"]
    assert "rounded anew at step 2, with other settings" in result["printed"]
    assert changed in result["printed"]
    assert result["step"] == 2
    assert result["rounded anew"] == []  # against the torch reference, from the gathered main params
    assert result["changed"]


def test_rounding_is_turned_on_for_a_nearest_checkpoint_and_says_so(results):
    on = results["on and off"]
    assert on["step"] == 2  # the optimizer's own count: no noise is drawn twice
    assert on["rounded at load"] == []
    assert on["unlike nearest"]
    assert "--param-rounding stochastic (seed 5) from step 2 on: this checkpoint was saved without it" in on["on says"]


def test_rounding_is_turned_off_again_and_says_so(results):
    off = results["on and off"]
    assert off["off loads the same"]
    assert off["off is nearest"]
    assert "--param-rounding nearest: rounding was stochastic (seed 5) up to step 3" in off["off says"]
    assert off["on again at step"] == 4  # no stale state was left behind
    assert "from step 4 on" in off["on again says"]


@pytest.mark.parametrize("kind", ["full", "none fully_reshardable"], ids=["full", "none"])
@pytest.mark.parametrize("layouts", ["DP2 -> TP2", "DP2 -> PP2"])
def test_c2_another_layout_goes_on_bit_for_bit(results, layouts, kind):
    assert results[f"{layouts}, {kind}"] == {"step": 2, "weights": True, "main params": True, "continued": True}


@pytest.mark.parametrize("layouts", ["TP2 -> PP2", "TP2 -> DP2", "PP2 -> DP2"])
def test_c2_another_layout_goes_on_bit_for_bit_from_tp_and_pp(results, layouts):
    assert results[f"{layouts}, full"] == {"step": 2, "weights": True, "main params": True, "continued": True}


# megatron-sr verify CHECKPOINT

WHOLE = [
    "full", "float16 full", "simulated", "nearest", "turned on", "TP2", "PP2", "TP2 buckets", "PP2 buckets",
    "moe fully_reshardable", "moe dp_reshardable", "mxfp8 fully_reshardable", "mxfp8 dp_reshardable",
]  # fmt: skip


def verify(path: Path, capsys, *flags) -> tuple[int, dict]:
    capsys.readouterr()
    code = cli.main(["verify", str(path), "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", WHOLE)
def test_verify_finds_every_bit_in_order_in_any_layout(folder, capsys, name):
    code, result = verify(folder / "checkpoints" / name, capsys)
    assert code == 0
    assert result["mismatches"] == []
    assert result["unmatched"] == []
    model = [
        entry for entry in stored(folder / "checkpoints" / name).values() if entry.properties.dtype == torch.bfloat16
    ]
    assert result["tensors"] == len(model)
    assert result["elements"] >= sum(entry.size.numel() for entry in model)  # replicas of main params count too
    assert (result["rounding"] is None) == (name == "nearest")


def test_verify_takes_the_newest_checkpoint_of_a_save_folder(folder, tmp_path, capsys):
    (tmp_path / "iter_0000002").symlink_to(folder / "checkpoints" / "full")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2\n")
    code, result = verify(tmp_path, capsys)
    assert code == 0
    assert result["checkpoint"].endswith("iter_0000002")


def test_verify_says_that_a_checkpoint_holds_no_model_params(folder, capsys):
    code, result = verify(folder / "checkpoints" / "none dp_reshardable", capsys)
    assert code == 0
    assert not result["model_params"]
    assert cli.main(["verify", str(folder / "checkpoints" / "none dp_reshardable")]) == 0
    assert "holds no model params" in capsys.readouterr().out


def change_a_byte(path: Path, key: str, chunk: Chunk | None = None) -> None:
    """In the middle of a stored chunk, which its values nearly fill."""
    reader = CheckpointReader(path)
    chunk = chunk or reader.tensors[key].chunks[-1]
    info = reader._storage[key, chunk.offset]
    file = path / info.relative_path
    content = bytearray(file.read_bytes())
    content[info.offset + info.length // 2] ^= 2
    file.write_bytes(content)


@pytest.mark.parametrize("name, key", [("full", FC2), ("PP2 buckets", FC2), ("moe dp_reshardable", EXPERTS)])
def test_verify_names_an_edited_tensor_and_counts(folder, tmp_path, capsys, name, key):
    shutil.copytree(folder / "checkpoints" / name, tmp_path / "edited")
    change_a_byte(tmp_path / "edited", key)
    code, result = verify(tmp_path / "edited", capsys)
    assert code == 1
    assert [(m["tensor"], m["differing"]) for m in result["mismatches"]] == [(key, 1)]
    assert cli.main(["verify", str(tmp_path / "edited")]) == 1
    assert f"{key}: 1 of " in capsys.readouterr().out


def test_verify_notices_files_that_are_missing_or_cut_off(folder, tmp_path, capsys):
    for name in ("missing", "cut off"):
        shutil.copytree(folder / "checkpoints" / "TP2", tmp_path / name)
    next((tmp_path / "missing").glob("__1_*.distcp")).unlink()
    code, result = verify(tmp_path / "missing", capsys)
    assert (code, "is missing" in result["error"]) == (1, True)
    file = next((tmp_path / "cut off").glob("__0_*.distcp"))
    file.write_bytes(file.read_bytes()[:-1000])
    code, result = verify(tmp_path / "cut off", capsys)
    assert (code, "ends too early" in result["error"]) == (1, True)


def test_verify_with_another_seed_would_fail(folder, tmp_path, capsys, monkeypatch):
    """The comparison is not vacuous: under another seed nearly half of all weights would be others."""
    from megatron_sr.megatron import checkpoint_pieces

    read = checkpoint_pieces.read_state
    monkeypatch.setattr(
        checkpoint_pieces,
        "read_state",
        lambda reader: read(reader)._replace(rounding=read(reader).rounding | {"seed": 6}),
    )
    code, result = verify(folder / "checkpoints" / "full", capsys)
    assert code == 1
    assert len(result["mismatches"]) == result["tensors"]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: path / "nothing", "there is no such folder"),
        (lambda path: path, "not a distributed checkpoint (no .metadata in it)"),
    ],
)
def test_verify_bad_input(tmp_path, capsys, make, message):
    code, result = verify(make(tmp_path), capsys)
    assert code == 2
    assert message in result["error"]


def test_verify_reads_without_megatron_and_without_running_what_is_pickled(folder):
    """In a fresh interpreter: neither Megatron nor an object's own code is imported."""
    import subprocess
    import sys

    code = (
        "import sys\nfrom megatron_sr import cli\n"
        f"code = cli.main(['verify', {str(folder / 'checkpoints' / 'full')!r}])\n"
        "print([name for name in sys.modules if name.startswith('megatron.')], code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"
