"""What real DeepSpeed engines do on gloo ranks. Rank 0 writes what came out as JSON; test_deepspeed.py judges it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.backends.deepspeed_job import (
    KINDS,
    digest,
    main_params,
    make_engine,
    rounded,
    same,
    share_changed_by_rounding,
    start_ranks,
    train,
    weights,
)


def all_kinds() -> dict:
    """Three steps of every kind of engine from the same main params."""
    results = {}
    for kind in KINDS:
        engine, rounding = make_engine(kind)
        train(engine, 1, 2, 3)
        whole, mains = weights(engine), main_params(engine)
        results[kind] = {
            "optimizer": type(engine.optimizer).__name__,
            "digest": digest(whole),
            "reference": same(whole, rounded(mains, 3)),
            "step": rounding.step,
            "not nearest": share_changed_by_rounding(whole, mains),
        }
        rounding.recompute()
        results[kind]["recomputed"] = same(weights(engine), whole)
    return results


def main(results_file: str, folder: str) -> None:
    start_ranks()
    results = {"kinds": all_kinds()}
    if dist.get_rank() == 0:
        Path(results_file).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
