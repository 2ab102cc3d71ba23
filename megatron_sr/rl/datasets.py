"""Problems with answers from a JSONL or a Parquet file, whatever its columns are called."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

PROBLEM, ANSWER = "problem", "answer"  # the fields, unless --problem-field and --answer-field name others
KINDS = ("jsonl", "parquet")


def read_problems(
    path: str | Path, problem_field: str = PROBLEM, answer_field: str = ANSWER, kind: str = "jsonl"
) -> list[tuple[str, str]]:
    """(problem, answer) pairs of a file, in its order; rows that are repeated come once.

    A field may lie deeper: `reward_model.ground_truth` goes into an object, `prompt.0.content` into a list's first element. A problem
    is a non-empty string, an answer a string or a number.

    Raises FileNotFoundError for a missing file, ImportError when Parquet cannot be read, and ValueError, with the line or row, for
    one that lacks a field or holds something else, and for a file without problems.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"--task {kind}:{path}: there is no such file; give the path of a {kind.upper() if kind == 'jsonl' else 'Parquet'} file with "
            f"the fields '{problem_field}' and '{answer_field}'"
        )
    rows = (
        _jsonl_rows(path, problem_field, answer_field)
        if kind == "jsonl"
        else _parquet_rows(path, problem_field, answer_field)
    )
    problems = {}  # a dictionary keeps the order
    for where, row in rows:
        problem, answer = _field(row, problem_field, where), _field(row, answer_field, where)
        if not isinstance(problem, str) or not problem.strip():
            raise ValueError(f"{where}: '{problem_field}' must be a non-empty string")
        if not isinstance(answer, str | int | float) or isinstance(answer, bool):
            raise ValueError(f"{where}: '{answer_field}' must be a string or a number, found {type(answer).__name__}")
        if not str(answer).strip():
            raise ValueError(f"{where}: '{answer_field}' is empty, so no completion could be rewarded")
        problems[problem, str(answer)] = None
    if not problems:
        raise ValueError(f'{path}: the file has no problems; add lines like {{"problem": "1+1?", "answer": "2"}}')
    return list(problems)


def _field(row: dict, field: str, where: str):
    """The value that `field` leads to. Raises ValueError when it leads nowhere."""
    value = row
    for part in field.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise ValueError(
                f"{where}: '{field}' leads nowhere at '{part}'; name the fields with --problem-field and --answer-field, as in "
                f"prompt.0.content for the first element of a list"
            )
    return value


def _jsonl_rows(path: Path, *fields: str) -> Iterator[tuple[str, dict]]:
    """(where it stands, object) of every line that is not blank."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # -sig: with or without a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte {error.start}: {error.reason}); save the file as UTF-8") from None
    wanted = {field.split(".")[0] for field in fields}
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: U+2028 may stand inside a JSON string
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where}: not valid JSON ({error.msg} at column {error.colno}); each line must be one object "
                f'like {{"problem": "1+1?", "answer": "2"}}'
            ) from None
        if not isinstance(record, dict) or not wanted <= record.keys():
            found = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise ValueError(
                f"{where}: needs the fields {' and '.join(map(repr, fields))}, found {found}; other names are given with --problem-field "
                f"and --answer-field"
            )
        yield where, record


def _parquet_rows(path: Path, *fields: str) -> Iterator[tuple[str, dict]]:
    """(where it stands, row) of a Parquet file; only the columns of the fields are read, a batch at a time."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            f"--task parquet:{path} needs pyarrow ({error}); install it with: pip install 'megatron-sr[math]', or use a JSONL file"
        ) from error
    columns = sorted({field.split(".")[0] for field in fields})
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            found = file.schema_arrow.names
            if missing := [column for column in columns if column not in found]:
                raise ValueError(
                    f"{path} has no column {', '.join(missing)}, only {', '.join(found)}; name the columns with --problem-field and "
                    f"--answer-field"
                )
            number = 0
            for batch in file.iter_batches(columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a whole Parquet file ({error}); download or write it again") from None
