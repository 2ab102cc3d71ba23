"""`python -m tests.unit.examples_parser JOBS.json OUT.json`: launches through Megatron's parser, `validate_args` and TransformerConfig.

On the CPU host. JOBS.json: by name {"ranks", "env", "arguments", "capability"}.
OUT.json: by name {"args"} or {"refused"}, and under "must be refused" what was said of flags that are wrong.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path

BAD = ("--num-expert 7", "--tensor-model-parallel-size 48", "--qk-clip", "--recompute-modules moe_act")


def main(jobs_file: str, out_file: str) -> None:
    from megatron_sr.megatron import host

    host.install()
    import megatron_sr.megatron.plugin  # noqa: F401

    pretend_transformer_engine()
    jobs = json.loads(Path(jobs_file).read_text())
    out = {name: parse(job) for name, job in jobs.items()}
    job = jobs["deepseek_r1_14b"]
    out["must be refused"] = {
        flags: parse({**job, "arguments": job["arguments"] + flags.split()}).get("refused") for flags in BAD
    }
    Path(out_file).write_text(json.dumps(out))


def pretend_transformer_engine() -> None:
    """The mock: a recent Transformer Engine is there when a TransformerConfig asks for its version and fused functions."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.moe import moe_utils

    transformer_config.is_te_min_version = lambda *args, **kwargs: True
    rope_utils.fused_apply_rotary_pos_emb = rope_utils.fused_apply_rotary_pos_emb_thd = object()
    moe_utils.fused_permute = moe_utils.fused_permute_with_probs = object()
    moe_utils.fused_sort_chunks_by_index = moe_utils.fused_sort_chunks_by_index_with_probs = (
        moe_utils.fused_unpermute
    ) = object()


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
            arguments.core_transformer_config_from_args(args)  # its own checks, across flags
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
