"""Skipped steps and refusals on real Megatron optimizers and gloo ranks. One launch serves all tests here."""

from __future__ import annotations

import json

import pytest

from tests.launch import ROOT, torchrun

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("steps")
    ranks = ROOT / "tests/distributed/run_ranks.py"
    torchrun(2, ranks, "tests.distributed.steps_ranks", folder / "results.json", timeout=600)
    return json.loads((folder / "results.json").read_text())


def test_c4_nearest_is_megatrons_own_path(results):
    nearest = results["nearest"]
    assert nearest["replaced"] == []
    assert nearest["step hooks"] == 0
    assert nearest["keys added to checkpoints"] == []
    assert nearest["equal"]
    assert (nearest["mode"], nearest["step"]) == ("nearest", 0)


@pytest.mark.parametrize("optimizer", ["dense", "chained"])
@pytest.mark.parametrize("how", ["inf", "nan", "norm"])
def test_c7_a_skipped_step_draws_nothing(results, optimizer, how):
    skipped = results[f"skipped, {optimizer}"][how]
    assert not skipped["successful"]
    assert skipped["unchanged"]
    assert skipped["step"] == 1
    assert skipped["later equal"]  # the next step draws what it would have drawn without the skipped one
    assert skipped["changed"]


@pytest.mark.parametrize("optimizer", ["dense", "chained"])
def test_c1_copying_main_to_model_params_again_gives_the_same_bits(results, optimizer):
    assert all(skipped["copied again"] for skipped in results[f"skipped, {optimizer}"].values())


def test_fixed_noise_leaves_the_step_out(results):
    assert results["fixed noise"] == {"equal": True, "step": 9}


def test_stepping_one_of_chained_optimizers_is_noticed(results):
    assert "step the whole optimizer" in results["one part stepped"]


def test_weights_alone_start_a_stochastic_run(results):
    assert results["weights only"] == {"exact": True, "stepped": True, "step": 1}


@pytest.mark.parametrize(
    "case, words",
    [
        ("fp32", "--bf16 off"),
        ("twice", "only once"),
        ("another model", "pass every model chunk"),
        ("uncovered", "parameter decoder.final_layernorm.weight is not in the model's sharded_state_dict()"),
    ],
)
def test_c6_refused_optimizers_and_models(results, case, words):
    assert words in results["refused optimizers"][case]


@pytest.mark.parametrize(
    "flags, start, way_out",
    [
        ("--param-rounding sideways", "--param-rounding='sideways'", "choose one of: nearest, stochastic"),
        ("--param-rounding-seed -1", "--param-rounding-seed=-1", "choose a whole number from 0"),
        ("--param-rounding-format fp8", "--param-rounding-format='fp8'", "choose one of: bf16, fp16, e8m4"),
        ("--param-rounding-log-interval -1", "--param-rounding-log-interval=-1", "choose a whole number from 0"),
        (f"--param-rounding-seed {2**64}", f"--param-rounding-seed={2**64}", "choose a whole number from 0"),
    ],
)
def test_c6_bad_values_of_our_flags(results, flags, start, way_out):
    message = results["refused flags"]["cases"][flags]
    assert message.startswith(start)
    assert way_out in message


@pytest.mark.parametrize(
    "flags, named, way_out",
    [
        ("--param-rounding stochastic --use-distributed-optimizer", "--bf16 off", "add --bf16 or --fp16"),
        ("--optimizer-cuda-graph", "--optimizer-cuda-graph on", "leave it out"),
        ("--use-megatron-fsdp", "--use-megatron-fsdp on", "leave it out"),
        ("--use-torch-fsdp2", "--use-torch-fsdp2 on", "use --use-distributed-optimizer instead"),
        ("--fp8-format e4m3", "--fp8-format e4m3", "leave it out"),
        ("--fp8-param-gather", "--fp8-param-gather on", "leave it out"),
        ("--fp4-format e2m1", "--fp4-format e2m1", "leave it out"),
        ("--fp4-param-gather", "--fp4-param-gather on", "leave it out"),
        ("--qk-clip", "--qk-clip on", "leave it out"),
    ],
)
def test_c6_unsupported_flags_are_refused_by_megatrons_parser(results, flags, named, way_out):
    """The cases without `--param-rounding` are added to `--param-rounding stochastic --bf16 --use-distributed-optimizer`."""
    message = results["refused flags"]["cases"][flags]
    assert message.startswith(f"--param-rounding stochastic does not work with {named}: ")
    assert f"{way_out}, or use --param-rounding nearest" in message


def test_the_seed_is_megatrons_unless_given(results):
    assert results["refused flags"]["default seed"] == 42


def test_c6_a_yaml_configuration_without_our_settings_is_refused(results):
    assert "--yaml-cfg" in results["refused flags"]["yaml"]
