"""ParamRounding: what is refused, and how."""

import argparse

import pytest

from megatron_sr.config import SEED_MAX, ParamRounding, add_flags, from_flags


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"mode": "up"}, "--param-rounding='up' is not known; choose one of: nearest, stochastic"),
        ({"format": "int4"}, "format='int4' is not known; choose one of: bf16"),
        ({"noise": "pink"}, "noise='pink' is not known"),
        ({"seed": -1}, "--param-rounding-seed=-1 is out of range"),
        ({"seed": SEED_MAX + 1}, "out of range; choose a whole number from 0 to 18446744073709551615"),
        ({"seed": 1.5}, "--param-rounding-seed=1.5 must be a whole number"),
        ({"seed": True}, "--param-rounding-seed=True must be a whole number"),
        ({"stream": 2**32}, "stream=4294967296 is out of range"),
    ],
)
def test_c6_bad_values_name_flag_value_and_way_out(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ParamRounding(**kwargs)


def test_flags_default_to_nearest_and_to_the_job_s_seed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=7)
    add_flags(parser)
    assert from_flags(parser.parse_args([])) == ParamRounding(mode="nearest", seed=7)
    flags = ["--param-rounding", "stochastic", "--param-rounding-seed", str(SEED_MAX)]
    assert from_flags(parser.parse_args(flags)) == ParamRounding(mode="stochastic", seed=SEED_MAX)
