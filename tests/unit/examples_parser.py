"""`python -m tests.unit.examples_parser JOBS.json OUT.json`: command lines through Megatron's parser and `validate_args`, on the CPU host.

JOBS.json: by name {"ranks", "env", "arguments", "capability"}.
OUT.json: by name {"args"} or {"refused"}, and what was refused of bad changes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path

BAD = ("--num-expert 7", "--tensor-model-parallel-size 48", "--qk-clip")


def main(jobs_file: str, out_file: str) -> None:
    from megatron_sr.megatron import host

    host.install()
    import megatron_sr.megatron.plugin  # noqa: F401

    jobs = json.loads(Path(jobs_file).read_text())
    out = {name: parse(job) for name, job in jobs.items()}
    job = jobs["deepseek_r1_14b"]
    out["must be refused"] = {
        flags: parse({**job, "arguments": job["arguments"] + flags.split()}).get("refused") for flags in BAD
    }
    Path(out_file).write_text(json.dumps(out))


def parse(job: dict) -> dict:
    """The validated arguments of one command line, or why it is refused."""
    import torch
    from megatron.training import arguments

    torch.cuda.get_device_capability = lambda *args, **kwargs: tuple(job["capability"])  # the mock: a GPU answers
    os.environ.update(job["env"], RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(job["ranks"]))
    sys.argv = ["pretrain_gpt.py", *job["arguments"]]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            args = arguments.parse_args()
            arguments.validate_args(args, {})
    except (SystemExit, AssertionError, ValueError, RuntimeError) as error:
        return {"refused": f"{error} {said.getvalue()[-2000:]}"}
    return {"args": {name: value for name, value in vars(args).items() if is_plain(value)}}


def is_plain(value) -> bool:
    return isinstance(value, int | float | str | bool | list | None) and _serializable(value)


def _serializable(value) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
