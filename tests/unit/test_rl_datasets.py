"""Problems from files: layouts, and every kind of bad dataset with a message that says where."""

import json
from pathlib import Path

import pytest

from megatron_sr.rl.datasets import read_problems
from tests.launch import ROOT

# A row as DAPO-Math-17k has them (BytedTsinghua-SIA/DAPO-Math-17k: the layout of verl's datasets), problems of our own.
DAPO = {
    "data_source": "math_dapo",
    "prompt": [
        {
            "content": "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
            "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is $17+17$?\n\nRemember to put "
            'your answer on its own line after "Answer:".',
            "role": "user",
        }
    ],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
DAPO_FIELDS = "prompt.0.content", "reward_model.ground_truth"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"problem": "1+1?", "answer": "2"}', '{"problem": "2+2?", "answer"'], "line 2: not valid JSON"),
        (['{"problem": "1+1?"}'], "line 1: needs the fields 'problem' and 'answer', found .'problem'"),
        (["", "", "[1, 2]"], "line 3: needs the fields .* found list"),
        (['{"problem": "", "answer": "2"}'], "line 1: 'problem' must be a non-empty string"),
        (['{"problem": "x", "answer": null}'], "line 1: 'answer' must be a string or a number, found NoneType"),
        (['{"problem": "x", "answer": true}'], "line 1: 'answer' must be a string or a number, found bool"),
        (['{"problem": "x", "answer": " "}'], "line 1: 'answer' is empty"),
        ([], "has no problems"),
    ],
)
def test_bad_jsonl_names_file_line_and_way_out(tmp_path, lines, message):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message) as error:
        read_problems(path)
    assert "bad.jsonl" in str(error.value)


def test_unusual_but_valid_jsonl_is_read_and_other_encodings_are_named(tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + '{"problem": "a\u2028b", "answer": 0}\r\n\n{"problem": "c", "answer": "2"}'.encode()
    )
    assert read_problems(path) == [("a\u2028b", "0"), ("c", "2")]
    path.write_bytes('{"problem": "é", "answer": "2"}'.encode("latin-1"))
    with pytest.raises(ValueError, match="odd.jsonl: not UTF-8 .byte 13.*; save the file as UTF-8"):
        read_problems(path)


def test_dapo_rows_from_jsonl_and_parquet_repeated_ones_once(tmp_path):
    """DAPO-Math-17k repeats every problem about a hundred times."""
    other = {**DAPO, "reward_model": {**DAPO["reward_model"], "ground_truth": "35"}}
    rows = [DAPO, other, DAPO, DAPO]
    expected = [(DAPO["prompt"][0]["content"], "34"), (DAPO["prompt"][0]["content"], "35")]
    path = tmp_path / "dapo.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_problems(path, *DAPO_FIELDS) == expected

    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "dapo.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert read_problems(path, *DAPO_FIELDS, "parquet") == expected
    for fields, message in (
        (("problem", "answer"), "has no column answer, problem, only data_source, prompt, ability, reward_model"),
        (("prompt.1.content", DAPO_FIELDS[1]), "row 1: 'prompt.1.content' leads nowhere at '1'"),
        (("prompt", DAPO_FIELDS[1]), "row 1: 'prompt' must be a non-empty string"),
        (
            (DAPO_FIELDS[0], "reward_model.truth"),
            "row 1: 'reward_model.truth' leads nowhere at 'truth'; name the fields",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            read_problems(path, *fields, "parquet")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="dapo.parquet: not a whole Parquet file"):
        read_problems(path, *DAPO_FIELDS, "parquet")


def test_parquet_says_how_to_install_pyarrow(tmp_path, monkeypatch):
    import sys

    (tmp_path / "x.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match="needs pyarrow .*pip install 'megatron-sr.math.'"):
        read_problems(tmp_path / "x.parquet", kind="parquet")


@pytest.mark.parametrize("name, count", [("math-1460", 1460), ("aime-2024", 30)])
def test_shared_math_data_loads_where_it_is_present(name, count):
    path = Path(ROOT).parent / "shared" / "data" / f"{name}.jsonl"
    if not path.exists():
        pytest.skip("no ../shared here (a user's clone)")
    assert len(read_problems(path)) == count
