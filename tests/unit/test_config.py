"""ParamRounding: what is refused, and how; the flags; which tensors it rounds."""

import argparse
import json

import pytest
import torch

from megatron_sr.config import FLAGS, SEED_MAX, ParamRounding, add_flags, from_flags


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"mode": "up"}, "--param-rounding='up' is not known; choose one of: nearest, stochastic"),
        ({"format": "int4"}, "--param-rounding-format='int4' is not known; choose one of: bf16, fp16, e8m4"),
        ({"noise": "pink"}, "--param-rounding-noise='pink' is not known"),
        ({"seed": -1}, "--param-rounding-seed=-1 is out of range"),
        ({"seed": SEED_MAX + 1}, "out of range; choose a whole number from 0 to 18446744073709551615"),
        ({"seed": 1.5}, "--param-rounding-seed=1.5 must be a whole number"),
        ({"seed": True}, "--param-rounding-seed=True must be a whole number"),
        ({"stream": 2**32}, "=4294967296 is out of range"),
        ({"include": ("*.weight", "")}, "--param-rounding-include='' is not a glob"),
        ({"exclude": [3]}, "--param-rounding-exclude=3 is not a glob"),
        ({"log_interval": -5}, "--param-rounding-log-interval=-5 is out of range"),
        ({"verify_interval": "often"}, "--param-rounding-verify-interval='often' must be a whole number"),
        ({"on_mismatch": "ignore"}, "--param-rounding-on-mismatch='ignore' is not known; choose one of: error, recompute"),
        ({"save_model": "some"}, "--param-rounding-save-model='some' is not known; choose one of: full, none"),
        ({"mode": "nearest", "save_model": "none"}, "--param-rounding-save-model none .* needs --param-rounding stochastic"),
        ({"mxfp8_columnwise": "up"}, "--param-rounding-mxfp8-columnwise='up' is not known"),
    ],
)  # fmt: skip
def test_c6_bad_values_name_flag_value_and_way_out(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ParamRounding(**kwargs)


def parse(*flags: str) -> ParamRounding:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=7)
    add_flags(parser)
    return from_flags(parser.parse_args(flags))


def test_flags_default_to_nearest_and_to_the_job_s_seed():
    assert parse() == ParamRounding(mode="nearest", seed=7)
    flags = ["--param-rounding", "stochastic", "--param-rounding-seed", str(SEED_MAX)]
    assert parse(*flags) == ParamRounding(mode="stochastic", seed=SEED_MAX)


def test_every_field_but_the_stream_has_a_flag_that_sets_it():
    chosen = dict(
        mode="stochastic", seed=3, format="e8m5", noise="fixed", include=("*.weight", "*bias"), exclude=("*norm*",),
        log_interval=10, verify_interval=20, on_mismatch="recompute", save_model="none", mxfp8_columnwise="nearest",
        mxfp8_scaling="2d",
    )  # fmt: skip
    words = []
    for field, value in chosen.items():
        words += [FLAGS[field], *(value if isinstance(value, tuple) else [str(value)])]
    assert parse(*words) == ParamRounding(**chosen)
    assert set(FLAGS) - set(chosen) == {"stream"}
    assert set(FLAGS) == set(ParamRounding().to_dict())


def test_to_dict_comes_back_also_through_json():
    config = ParamRounding(seed=SEED_MAX, include="*.weight", exclude=["*norm*", "*router*"])
    assert config.include == ("*.weight",)
    assert ParamRounding(**config.to_dict()) == config
    assert ParamRounding(**json.loads(json.dumps(config.to_dict()))) == config


def test_the_format_is_that_of_the_dtype_unless_chosen():
    assert ParamRounding().for_dtype(torch.bfloat16).format == "bf16"
    assert ParamRounding().for_dtype(torch.float16).format == "fp16"
    assert ParamRounding(format="e8m4").for_dtype(torch.bfloat16) == ParamRounding(format="e8m4")


@pytest.mark.parametrize(
    ("format", "dtype", "message"),
    [
        ("fp16", torch.bfloat16, "--param-rounding-format fp16 does not fit into bfloat16 model params"),
        ("bf16", torch.float16, "--param-rounding-format bf16 does not fit into float16 model params, which hold fp16"),
        ("e8m8", torch.bfloat16, "--param-rounding-format e8m8 does not fit into bfloat16"),
        (None, torch.float32, r"model params are float32, .*; train in BF16 \(--bf16\) or FP16"),
    ],
)
def test_c6_formats_that_the_model_params_cannot_hold_are_refused(format, dtype, message):
    with pytest.raises(ValueError, match=message):
        ParamRounding(format=format).for_dtype(dtype)


def test_include_and_exclude_choose_tensors_by_name():
    router, norm, fc1 = "layers.mlp.router.weight", "layers.input_layernorm.weight", "layers.mlp.linear_fc1.weight"
    assert all(ParamRounding().rounds(name) for name in (router, norm, fc1))
    chosen = ParamRounding(include=("*.mlp.*",), exclude=("*router*", "*typo*"))
    assert [chosen.rounds(name) for name in (router, norm, fc1)] == [False, False, True]
    assert chosen.unmatched([router, norm, fc1]) == ["*typo*"]
