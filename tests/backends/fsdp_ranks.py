"""Four or two gloo ranks: MasterWeights on real DTensor params. Rank 0 writes what came out as JSON.

`torchrun ... -m tests.backends.fsdp_ranks RESULTS FOLDER`: four ranks continue the checkpoint FOLDER/unsharded, two ranks that
of the four, FOLDER/four.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.backends.sharded_model import Model, digest, digests, make, rounded_wrongly, run


def main(results_file: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = four_ranks(Path(folder)) if dist.get_world_size() == 4 else two_ranks(Path(folder))
    if dist.get_rank() == 0:
        Path(results_file).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def four_ranks(folder: Path) -> dict:
    flat, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layouts = {
        "DDP": torch.nn.parallel.DistributedDataParallel,
        "fully_shard 4": lambda model: fully_shard(model, mesh=flat),
        "fully_shard 4, each layer": lambda model: each_layer(model, flat),
        "fully_shard 2": lambda model: each_layer(model, grid["dp"]),
        "HSDP 2x2": lambda model: each_layer(model, grid),
        "TP 2": lambda model: tensor_parallel(model, grid["tp"]),
        "TP 2, fully_shard 2": lambda model: fully_shard(tensor_parallel(model, grid["tp"]), mesh=grid["dp"]),
    }
    results = {"layouts": {name: three_steps(shard) for name, shard in layouts.items()}}
    results["SGD"] = three_steps(layouts["fully_shard 4, each layer"], "SGD")
    results["training"] = {
        name: training(shard) for name, shard in layouts.items() if name not in ("fully_shard 4", "fully_shard 2")
    }
    results["resume"] = {
        f"unsharded -> {name}{', flat' * flat}": resume(folder / "unsharded", layouts[name], [3, 4], flat=flat)
        for name, flat in (("TP 2, fully_shard 2", False), ("fully_shard 4, each layer", True))
    }
    results["resume"]["unsharded -> fully_shard 4"] = resume(
        folder / "unsharded", layouts["fully_shard 4"], [3, 4], folder / "four"
    )
    return results


def two_ranks(folder: Path) -> dict:
    mesh = init_device_mesh("cpu", (2,))
    return {"resume": resume(folder / "four", lambda model: each_layer(model, mesh), [5], folder / "two")}


def each_layer(model, mesh):
    for layer in (model.up, model.down, model.embed):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model, mesh):
    plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan | {"head": ColwiseParallel(output_layouts=Replicate())})


def three_steps(shard, optimizer: str = "AdamW") -> dict:
    model = Model()
    wrapped = shard(model)
    opt = make(wrapped, optimizer)
    run(model, opt, 1, 2, 3)
    return {**digests(model, opt), "wrong": rounded_wrongly(model, opt)}


def training(shard) -> dict:
    """Real forward and backward passes, two micro-batches a step: the losses, and whether every rank holds the same bits."""
    model = Model(width=36)
    wrapped = shard(model)
    opt = make(wrapped, include="*weight")
    for group in opt.param_groups:
        group["lr"] = 1e-2
    tokens = torch.randint(0, 29, (2, 4, 8), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(8):
        total = 0.0
        for batch in tokens:
            loss = torch.nn.functional.cross_entropy(wrapped(batch).float().flatten(0, 1), batch.flatten())
            (loss / len(tokens)).backward()
            total += loss.item() / len(tokens)
        for parameters in by_mesh(model):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        opt.step()
        opt.zero_grad()
        losses.append(total)
    mine = {name: digest(parameter) for name, parameter in model.named_parameters()}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    wrong = [name for name in rounded_wrongly(model, opt) if name.endswith("weight")]
    return {"losses": losses, "same": all(other == mine for other in everyone), "wrong": wrong}


def by_mesh(model) -> list[list]:
    """torch takes one norm over parameters of one mesh alone."""
    groups: dict = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def resume(checkpoint: Path, shard, steps: list[int], save: Path | None = None, flat: bool = False) -> dict:
    """Load what was saved, on another layout; go on; and save."""
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model = shard(model)
    opt = make(model)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, opt, options=options)
    made = opt.steps
    if flat:  # saved as torch nests it; a flat state dict is another file
        flat_save(model, checkpoint.with_name("flat"), checkpoint)
        checkpoint = checkpoint.with_name("flat")
    dcp.load({"model": weights, "optim": state}, checkpoint_id=checkpoint)
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state, options=options)
    loaded = {**digests(model, opt), "steps": opt.steps, "counted while asked for its state": made}
    run(model, opt, *steps)
    if save:
        weights, state = get_state_dict(model, opt)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=save)
    return {"loaded": loaded, "continued": digests(model, opt), "wrong": rounded_wrongly(model, opt)}


def flat_save(model, to: Path, source: Path) -> None:
    """Write the checkpoint `source` again with a flat optimizer state (StateDictOptions.flatten_optimizer_state_dict)."""
    other = Model()
    each_layer(other, init_device_mesh("cpu", (dist.get_world_size(),)))
    opt = make(other)
    weights, state = get_state_dict(other, opt)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=source)
    set_state_dict(other, opt, model_state_dict=weights, optim_state_dict=state)
    weights, state = get_state_dict(other, opt, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": weights, "optim": state}, checkpoint_id=to)


if __name__ == "__main__":
    main(*sys.argv[1:])
