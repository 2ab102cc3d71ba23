"""Rank-side scenarios of DeepSpeed checkpoints: resume, other numbers of ranks, exports. Used by deepspeed_ranks.py."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import megatron_sr as sr
from tests.backends.deepspeed_job import (
    SEED,
    adamw,
    digest,
    main_params,
    make_engine,
    refusal,
    rounded,
    same,
    share_changed_by_rounding,
    train,
    weights,
)

UNIVERSAL = ("ZeRO 1", "ZeRO 1, BF16_Optimizer", "ZeRO 2", "ZeRO 3")


def resume(folder: Path) -> dict:
    """Save after step 2, go on; another engine loads and goes on."""
    results = {}
    for kind in (
        "none", "none, fused", "ZeRO 1", "ZeRO 1, BF16_Optimizer", "ZeRO 2", "ZeRO 2, offload", "ZeRO 3",
        "ZeRO 3, persistent params", "ZeRO 3, offload",
    ):  # fmt: skip
        engine, _ = make_engine(kind, adamw)
        train(engine, 1, 2)
        saved = weights(engine)
        share = share_changed_by_rounding(saved, main_params(engine))
        engine.save_checkpoint(str(folder / kind), tag="2", client_state={"mine": 1})
        train(engine, 3, 4)
        resumed, rounding = make_engine(kind, adamw)
        _, client_state = resumed.load_checkpoint(str(folder / kind))
        loaded, step = weights(resumed), rounding.step
        train(resumed, 3, 4)
        results[kind] = {
            "loaded": same(loaded, saved),
            "step": step,
            "client state": client_state["mine"],
            "continued": same(weights(resumed), weights(engine)),
            "not nearest": share,
        }
    return results


def loads(folder: Path) -> dict:
    """Checkpoints of `resume` under another configuration, and one of a run without rounding."""
    plain, _ = make_engine("ZeRO 3", adamw, rounding=None)
    train(plain, 1, 2)
    plain.save_checkpoint(str(folder / "plain"), tag="2")

    def load(config, where, **how):
        engine, rounding = make_engine("ZeRO 3", adamw, config)
        return refusal(lambda: engine.load_checkpoint(str(folder / where), **how)), engine, rounding

    other_seed, _, kept = load(sr.ParamRounding(seed=6), "ZeRO 3")
    _, anew, recomputed = load(sr.ParamRounding(seed=6, on_mismatch="recompute"), "ZeRO 3")
    _, off, turned_off = load(sr.ParamRounding(mode="nearest"), "ZeRO 3")
    _, on, turned_on = load(sr.ParamRounding(seed=SEED), "plain")
    _, fresh, weights_only = load(sr.ParamRounding(seed=SEED), "ZeRO 3", load_module_only=True)
    nothing, _, none_found = load(sr.ParamRounding(seed=SEED), "missing")
    nearest = {name: main.bfloat16() for name, main in main_params(off).items()}
    return {
        "another seed": other_seed,
        "another seed, step": kept.step,
        "recompute": [recomputed.step, same(weights(anew), rounded(main_params(anew), 2, seed=6))],
        "nearest from stochastic": [turned_off.step, same(weights(off), nearest)],
        "nearest keeps no state": "param_rounding" not in off.basic_optimizer.param_groups[0],
        "stochastic from plain": [turned_on.step, same(weights(on), rounded(main_params(on), 2))],
        "weights only": [
            weights_only.step,
            same(main_params(fresh), {n: w.float() for n, w in weights(fresh).items()}),
        ],
        "nothing found": [str(nothing), none_found.step],
    }


def exports(folder: Path) -> dict:
    """What DeepSpeed writes for others: 16-bit weights, and FP32 main params from its checkpoint."""
    results = {}
    for kind in ("ZeRO 1", "ZeRO 2", "ZeRO 3"):
        settings = {"stage3_gather_16bit_weights_on_model_save": True} if kind == "ZeRO 3" else {}
        engine, _ = make_engine(kind, adamw, zero=settings)
        train(engine, 1, 2)
        engine.save_checkpoint(str(folder / "exports" / kind), tag="2")
        engine.save_16bit_model(str(folder / "exports" / kind))
        whole, mains = weights(engine), main_params(engine)
        dist.barrier()  # rank 0 writes
        saved = torch.load(folder / "exports" / kind / "pytorch_model.bin")
        restored = get_fp32_state_dict_from_zero_checkpoint(str(folder / "exports" / kind))
        results[kind] = {
            "save_16bit_model": same(dict(saved), whole),
            "zero_to_fp32": same(dict(restored), mains),
            "policy from zero_to_fp32, seed and step": same(rounded(dict(restored), 2), whole),
        }
    return results


def universal_save(folder: Path) -> dict:
    """Checkpoints for any number of ranks, made by DeepSpeed's converter."""
    results = {}
    for kind in UNIVERSAL:
        engine, _ = make_engine(kind, adamw)
        train(engine, 1, 2)
        engine.save_checkpoint(str(folder / "universal" / kind), tag="2")
        results[kind] = {"digest": digest(weights(engine))}
        if dist.get_rank() == 0:
            convert(folder / "universal" / kind)
        dist.barrier()
    return results


def convert(folder: Path) -> None:
    ds_to_universal.main(
        Namespace(
            input_folder=str(folder / "2"), output_folder=str(folder / "2_universal"), num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip


def universal_load(folder: Path) -> dict:
    """The checkpoints of `universal_save`, on as many ranks as run this."""
    results = {}
    for kind in UNIVERSAL:
        engine, rounding = make_engine(kind, adamw, checkpoint={"load_universal": True})
        engine.load_checkpoint(str(folder / "universal" / kind))
        step, loaded = rounding.step, digest(weights(engine))
        train(engine, 3)
        results[kind] = {
            "step": step,
            "digest": loaded,
            "next step": rounding.step,
            "reference": same(weights(engine), rounded(main_params(engine), 3)),
        }
    return results


SCENARIOS = {function.__name__: function for function in (resume, loads, exports, universal_save, universal_load)}
