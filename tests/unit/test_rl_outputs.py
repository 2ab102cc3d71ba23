"""What the job writes: a Hugging Face folder, and metrics that a resumed run goes on with."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megatron_sr.rl import save_hf
from megatron_sr.rl.metrics import MetricsLog, read_metrics
from tests.tiny_models import make_checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("base"), "qwen3", tied=True)


@pytest.mark.parametrize("shard_bytes", [10**9, 40_000], ids=["one file", "shards"])
def test_save_hf_loads_in_transformers(base, tmp_path, shard_bytes):
    from transformers import AutoModelForCausalLM

    tensors = {name: tensor + 1 for name, tensor in load_file(base / "model.safetensors").items()}
    out = tmp_path / "out"
    save_hf.check_new(out)
    save_hf.write(out, tensors.items(), base, shard_bytes)
    files = sorted(f.name for f in out.iterdir())
    assert not [name for name in files if "partial" in name]
    if shard_bytes < 10**9:
        assert "model.safetensors" not in files
        assert max(f.stat().st_size for f in out.glob("*.safetensors")) < 45_000
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == tensors.keys()
        assert set(index["weight_map"].values()) == {name for name in files if name.endswith(".safetensors")}
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


def test_save_hf_copies_everything_but_the_base_s_weights(base, tmp_path):
    (base / "tokenizer.json").write_text("{}")
    (base / "model.safetensors.index.json").write_text("{}")
    save_hf.write(tmp_path / "out", [("w", torch.zeros(2, dtype=torch.bfloat16))], base)
    (base / "model.safetensors.index.json").unlink()
    names = {f.name for f in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "config.json", "model.safetensors"} <= names
    assert "model.safetensors.index.json" not in names
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"w"}


def test_save_hf_takes_values_not_views(tmp_path, base):
    """A yielded tensor may be a view of a live parameter, or not contiguous."""
    live = torch.arange(6, dtype=torch.bfloat16).view(2, 3)

    def export():
        yield "a", live.t()
        live.zero_()
        yield "b", live

    save_hf.write(tmp_path / "out", export(), base)
    assert load_file(tmp_path / "out" / "model.safetensors")["a"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_save_hf_refuses_a_folder_with_something_in_it(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match="exists and is not empty; choose a new folder"):
            save_hf.check_new(path)
    with pytest.raises(ValueError, match="--save-hf /dev/null/x cannot be written"):
        save_hf.check_new(save_hf.Path("/dev/null/x"))


def test_a_rank_that_does_not_write_consumes_the_export():
    tensors = iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])
    save_hf.write(None, tensors, None)
    assert next(tensors, None) is None


def test_resumed_metrics_hold_every_iteration_once(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl")
    for rounding, count in (("nearest", 4), ("stochastic", 4)):
        for i in range(count):
            log.write({"rounding": rounding, "seed": 0, "iteration": i})
    with log.path.open("a") as file:
        file.write('{"rounding": "stoch')  # cut off by a kill
    assert MetricsLog(log.path).rewind(2, rounding="stochastic", seed=0) == 1
    assert [(r["rounding"], r["iteration"]) for r in read_metrics(log.path)] == [
        *(("nearest", i) for i in range(4)), *(("stochastic", i) for i in range(3)),
    ]  # fmt: skip
    assert MetricsLog(log.path).rewind(0, rounding="stochastic", seed=1) == 0
    assert MetricsLog(tmp_path / "none.jsonl").rewind(0) == 0


def test_metrics_damaged_in_the_middle_are_not_passed_over(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"iteration": 1}\n{"iter\n{"iteration": 2}\n')
    with pytest.raises(json.JSONDecodeError):
        read_metrics(tmp_path / "m.jsonl")
