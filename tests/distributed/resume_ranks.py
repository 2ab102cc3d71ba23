"""Two ranks: checkpoints that are saved, loaded, damaged, left without model params, in several layouts. Rank 0 writes JSON.

The checkpoints stay in `folder`, for the tests of `megatron-sr verify`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

import megatron_sr as sr
from tests.distributed.megatron_job import Job, Layout, build, logical_tensors, process_groups
from tests.tiny_models import hf_config

DENSE = hf_config("qwen3", tied=True)
MOE = hf_config("qwen3_moe")
NEAREST = sr.ParamRounding(mode="nearest")
NAMED, BUCKETS = "fully_reshardable", "dp_reshardable"


def stochastic(**fields) -> sr.ParamRounding:
    return sr.ParamRounding(**dict(mode="stochastic", seed=5) | fields)


def main(results_file: str, folder: str) -> None:
    torch.set_num_threads(1)
    folder, results = Path(folder), {}
    with process_groups(Layout()):
        first = Saved(DENSE, Layout(), stochastic(), NAMED, folder / "full")
        results["save none"] = {
            sharding: save_none(DENSE, Layout(), sharding, folder / f"none {sharding}") for sharding in (NAMED, BUCKETS)
        }
        results["none, overlap"] = save_none(
            DENSE, Layout(), BUCKETS, folder / "overlap",
            ddp_options=dict(use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=True),
        )  # fmt: skip
        results["none, fp16"] = save_none(DENSE, Layout(), NAMED, folder / "fp16", dtype=torch.float16, loss_scale=1.0)
        plain = dict(ddp_options=dict(use_distributed_optimizer=False))
        results["none, not distributed"] = save_none(DENSE, Layout(), None, folder / "float16", **plain)
        results["edited, not distributed"] = edited(
            Saved(DENSE, Layout(), stochastic(), None, folder / "float16 full", **plain)
        )
        results["edited"] = edited(first)
        results["mixed"] = mixed(first)
        results["changed settings"] = changed_settings(first)
        results["on and off"] = on_and_off(folder / "nearest", folder / "turned on")
        without, _ = first.start(stochastic(save_model="none"))
        results["needs metadata"] = refusal(lambda: without.optimizer.sharded_state_dict(without.model_state_dict()))
        simulated = stochastic(format="e8m5", exclude=("*norm*",))
        results["simulated"] = resumes(Saved(DENSE, Layout(), simulated, BUCKETS, folder / "simulated"))
        for sharding in (NAMED, BUCKETS):
            mxfp8 = Saved(DENSE, Layout(), stochastic(format="mxfp8"), sharding, folder / f"mxfp8 {sharding}")
            results[f"mxfp8, {sharding}"] = resumes(mxfp8)
            results[f"full, {sharding}"] = resumes(
                Saved(DENSE, Layout(), stochastic(), sharding, folder / f"whole {sharding}")
            )
        results["weights alone from none"] = weights_alone(folder / f"none {NAMED}")
    for name, layout in (("TP2", Layout(tensor=2)), ("PP2", Layout(pipeline=2))):
        with process_groups(layout):
            for kind in ("full", f"none {NAMED}"):
                results[f"DP2 -> {name}, {kind}"] = continue_elsewhere(DENSE, layout, folder / kind)
            Saved(DENSE, layout, stochastic(), NAMED, folder / name)
            results[f"{name}, buckets"] = resumes(
                Saved(DENSE, layout, stochastic(), BUCKETS, folder / f"{name} buckets")
            )
    with process_groups(Layout(pipeline=2)):
        results["TP2 -> PP2, full"] = continue_elsewhere(DENSE, Layout(pipeline=2), folder / "TP2")
    with process_groups(Layout()):
        results["TP2 -> DP2, full"] = continue_elsewhere(DENSE, Layout(), folder / "TP2")
        results["PP2 -> DP2, full"] = continue_elsewhere(DENSE, Layout(), folder / "PP2")
    with process_groups(Layout(expert=2)):
        results["save none, MoE"] = {
            sharding: save_none(MOE, Layout(expert=2), sharding, folder / f"moe none {sharding}")
            for sharding in (NAMED, BUCKETS)
        }
        for sharding in (NAMED, BUCKETS):
            saved = Saved(MOE, Layout(expert=2), stochastic(), sharding, folder / f"moe {sharding}")
            results[f"full, MoE {sharding}"] = resumes(saved)
            results[f"edited, MoE {sharding}"] = edited(saved, "decoder.layers.mlp.experts.experts.linear_fc1.weight")
    if dist.get_rank() == 0:
        Path(results_file).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


class Saved:
    """A job that has made steps 1 and 2 and was saved to `folder`; then it made steps 3 and 4 and was not."""

    def __init__(self, hf, layout: Layout, config: sr.ParamRounding, sharding: str | None, folder: Path, **options):
        self.hf, self.layout, self.config, self.sharding, self.folder = hf, layout, config, sharding, folder
        self.options = options
        self.job, self.controller = self.start(config)
        self.job.steps(1, 2)
        save(self.job, folder, sharding)
        self.weights = weights(self.job)
        self.job.steps(3, 4)
        self.final = weights(self.job)

    def start(self, config: sr.ParamRounding):
        job = build(self.hf, self.layout, **self.options)
        return job, sr.apply_param_rounding(job.optimizer, job.chunks, config)


def save_none(hf, layout, sharding, folder: Path, **options) -> dict:
    return resumes(Saved(hf, layout, stochastic(save_model="none"), sharding, folder, **options))


def resumes(saved: Saved) -> dict:
    """Loaded into a new job: the weights, what was printed, two more steps."""
    job, controller = saved.start(saved.config)
    printed = load(job, saved.folder)
    loaded, step = weights(job), controller.step
    job.steps(3, 4)
    return {
        "loaded": loaded == saved.weights,
        "continued": weights(job) == saved.final,
        "step": step,
        "printed": printed,
    }


def edited(saved: Saved, key: str = "decoder.layers.mlp.linear_fc2.weight") -> dict:
    """One bit of one model param is another after the model was loaded, as if the file had been edited.

    Data-parallel replicas read the same file; with EP2 only rank 1 has the edited expert.
    """

    def flip(job: Job) -> None:
        param = next(param for param, identity in job.identities.items() if identity.key == key)
        if saved.layout.expert == 1 or dist.get_rank() == 1:
            param.data.view(-1).view(torch.int16)[3] ^= 1

    def start(on_mismatch: str) -> Job:
        return saved.start(sr.ParamRounding(**saved.config.to_dict() | {"on_mismatch": on_mismatch}))[0]

    refused = start("error")
    messages: list = [None, None]
    dist.all_gather_object(messages, refusal(lambda: load(refused, saved.folder, between=flip)))
    job = start("recompute")
    printed: list = [None, None]
    dist.all_gather_object(printed, load(job, saved.folder, between=flip))
    return {"messages": messages, "recomputed": weights(job) == saved.weights, "printed": printed}


def mixed(saved: Saved) -> str:
    """The model of one run, the optimizer of another, both whole."""
    other = Saved(DENSE, Layout(), stochastic(), NAMED, saved.folder.parent / "another")
    later, _ = other.start(saved.config)
    load(later, other.folder)
    later.steps(3)
    save(later, saved.folder.parent / "later", NAMED)
    job, _ = saved.start(saved.config)
    return refusal(lambda: load(job, saved.folder, optimizer_from=saved.folder.parent / "later"))


def changed_settings(saved: Saved) -> dict:
    """Another seed, noise, format or selection of tensors than the checkpoint's."""
    results = {}
    for name, fields in (
        ("seed", dict(seed=6)),
        ("noise", dict(noise="fixed")),
        ("format", dict(format="e8m5")),
        ("exclude", dict(exclude=("*norm*", "embedding*"))),
    ):
        refused, _ = saved.start(stochastic(**fields))
        message = refusal(functools.partial(load, refused, saved.folder))
        job, controller = saved.start(stochastic(on_mismatch="recompute", **fields))
        printed = load(job, saved.folder)
        results[name] = {
            "message": message,
            "printed": printed,
            "step": controller.step,
            "rounded anew": differing_from_reference(job, controller),
            "changed": weights(job) != saved.weights,
        }
    return results


def differing_from_reference(job: Job, controller) -> list[str]:
    """Tensors that are not `round_segments_` (the torch reference) of the whole, gathered main params."""
    from megatron_sr.megatron.main_params import full_main_params

    config, wrong = controller.config, []
    for param, main in full_main_params(job.optimizer).items():
        key, segments = job.identities[param]
        step = 0 if config.noise == "fixed" else controller.step
        noise = sr.Noise(config.seed, step, key) if config.mode == "stochastic" and config.rounds(key) else None
        expected = torch.empty_like(param.data)
        sr.round_segments_(
            [expected], [main.contiguous()], [(noise, segments)], format=config.format, backend="reference"
        )
        if not torch.equal(expected.view(torch.int16), param.data.view(torch.int16)):
            wrong.append(key)
    return wrong


def on_and_off(nearest_folder: Path, folder: Path) -> dict:
    """A run to nearest, steps 1 and 2; then stochastic, step 3; then to nearest again, step 4."""
    plain = Saved(DENSE, Layout(), NEAREST, NAMED, nearest_folder)
    on, controller = plain.start(stochastic())
    printed_on = load(on, plain.folder)
    step, wrong = controller.step, differing_from_reference(on, controller)
    on.steps(3)
    save(on, folder, NAMED)
    after_on = weights(on)
    off, _ = plain.start(NEAREST)
    printed_off = load(off, folder)
    loaded = weights(off)
    off.steps(4)
    save(off, folder.parent / "off", NAMED)
    again, controller_again = plain.start(stochastic())
    printed_again = load(again, folder.parent / "off")
    return {
        "step": step,
        "rounded at load": wrong,
        "unlike nearest": weights(on) != weights(plain.job),
        "on says": printed_on,
        "off loads the same": loaded == after_on,
        "off says": printed_off,
        # main params do not depend on the rounding in this job, whose gradients are keyed
        "off is nearest": weights(off) == plain.final,
        "on again at step": controller_again.step,
        "on again says": printed_again,
    }


def weights_alone(folder: Path) -> str | None:
    """What --finetune, or a run to nearest, does with a checkpoint that holds no model params."""
    job = build(DENSE, Layout())
    sr.apply_param_rounding(job.optimizer, job.chunks, NEAREST)
    return refusal(lambda: dist_checkpointing.load(job.model_state_dict(), str(folder)))


def continue_elsewhere(hf, layout: Layout, folder: Path) -> dict:
    """Load what another layout saved after step 2, and go on; compare with this layout's own uninterrupted run."""
    own, _ = start_job(hf, layout)
    own.steps(1, 2)
    weights_at_2, main_at_2 = weights(own), main_params(own)
    own.steps(3, 4)
    job, controller = start_job(hf, layout)
    load(job, folder)
    result = {
        "step": controller.step,
        "weights": weights(job) == weights_at_2,
        "main params": main_params(job) == main_at_2,
    }
    job.steps(3, 4)
    return result | {"continued": weights(job) == weights(own)}


def start_job(hf, layout: Layout):
    job = build(hf, layout)
    return job, sr.apply_param_rounding(job.optimizer, job.chunks, stochastic())


def weights(job: Job) -> dict[str, str]:
    job.gather_params()
    digests, differing = logical_tensors(job)
    assert not differing, f"replicas differ: {differing}"
    return digests


def main_params(job: Job) -> dict[str, str]:
    from megatron_sr.megatron.main_params import full_main_params

    return logical_tensors(job, full_main_params(job.optimizer))[0]


def sharded_state(job: Job, is_loading: bool, metadata: dict) -> dict:
    state = job.model_state_dict()
    state["optimizer"] = job.optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=metadata)
    return state


def save(job: Job, folder: Path, sharding: str | None) -> None:
    """As Megatron-LM saves: the metadata dict that sharded_state_dict was given goes into the checkpoint."""
    job.gather_params()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    metadata = {"chained_optim_avoid_prefix": True} | (
        {"distrib_optim_sharding_type": sharding} if sharding is not None else {}
    )
    state = sharded_state(job, False, metadata)
    dist_checkpointing.save(state, str(folder), content_metadata=metadata)


def load(job: Job, folder: Path, between=None, optimizer_from: Path | None = None) -> str:
    """As Megatron-LM loads: content metadata, the model, the optimizer. Returns what rank 0 printed.

    between: called with the job when the model is loaded and the optimizer is not. optimizer_from: another checkpoint.
    """
    for param in job.identities:
        param.data.fill_(7.0)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        optimizer = read(job, optimizer_from)["optimizer"] if optimizer_from else None
        state = read(job, folder)  # reads into the model's own tensors
        job.load_model(state)
        if between:
            between(job)
        job.optimizer.load_state_dict(optimizer or state["optimizer"])
    return "".join(line for line in out.getvalue().splitlines(True) if line.startswith("megatron-sr"))


def read(job: Job, folder: Path) -> dict:
    metadata = dist_checkpointing.load_content_metadata(str(folder))
    return dist_checkpointing.load(sharded_state(job, True, metadata), str(folder))


def refusal(attempt) -> str | None:
    """The message of the ValueError with which `attempt` is refused, None if it is not."""
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return None
