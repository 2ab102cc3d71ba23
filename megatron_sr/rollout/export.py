"""Megatron's shards -> whole tensors under Hugging Face names, and back.

`export_hf` walks the model unit by unit (embedding, each decoder layer, head): gather over the tensor-parallel group, over the
expert-parallel group, then broadcast from the pipeline stage that holds the unit. Never more than one unit is whole in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from megatron_sr.rollout import names, shards
from megatron_sr.rollout.collectives import ExportGroups
from megatron_sr.rollout.names import Entry

EMBEDDING, HEAD = "embedding", "head"  # the units beside the decoder layers, which are numbered from 0
Unit = int | str


def export_hf(
    model,
    hf_config,
    tensors: Mapping[torch.nn.Parameter, torch.Tensor] | None = None,
    *,
    scales: Mapping[torch.nn.Parameter, torch.Tensor] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, whole tensor) of every weight, on every rank the same, in the order of `names.expected_shapes`.

    model    a GPTModel or its chunks (virtual pipeline), bare or wrapped (DDP, Float16Module)
    tensors  values to export in place of the parameters': one tensor of the local shard's shape per parameter (FP32 main params)
    scales   a second tensor of some parameters, split over the ranks as the parameter is; exported as NAME_scale
    shapes   all names and shapes, in order, when there are scales; the same on every rank

    Collective over the tensor-, expert- and pipeline-parallel groups: every rank must exhaust the iterator. A yielded tensor may
    be a view of a live parameter: clone it to keep it beyond the next optimizer step.
    Raises ValueError for a parameter outside the supported families, or one that `tensors` lacks.
    """
    shapes = names.expected_shapes(hf_config) if shapes is None else shapes
    units = _units(shapes)
    groups, chunks = ExportGroups(), _chunks(model)
    mine = _local_units(chunks, hf_config, tensors, scales or {}, groups)
    owner, dtypes = _owners(units, mine, groups)
    device = next(chunks[0].parameters()).device
    for unit, unit_names in units.items():
        whole = _whole_unit(mine[unit], groups, hf_config) if unit in mine else None
        if whole is not None:
            _check_unit(
                unit, {name: tuple(tensor.shape) for name, tensor in whole.items()}, {n: shapes[n] for n in unit_names}
            )
        if groups.pipeline_size > 1:
            whole = groups.broadcast(whole, {n: (shapes[n], dtypes[n]) for n in unit_names}, owner[unit], device)
        for name in unit_names:
            yield name, whole[name]


@torch.no_grad()
def load_hf(model, state_dict: Mapping[str, torch.Tensor], hf_config) -> None:
    """Copy each rank's shards out of a whole Hugging Face `state_dict` into a GPTModel or its chunks, bare or wrapped.

    A tied model's output layer, which the last pipeline stage holds as a copy, gets the embedding. Vocabulary padding gets zeros.
    Raises ValueError for missing or unexpected names, a wrong shape, or a dtype that the parameters cannot hold without rounding;
    no parameter is changed then.
    """
    check_state_dict(state_dict, hf_config)
    groups = ExportGroups()
    copies = []
    for _, entry, parameter in _parameters(_chunks(model), hf_config, groups):
        sources = [state_dict[name] for name in entry.hf]
        for name, source in zip(entry.hf, sources):
            if torch.promote_types(source.dtype, parameter.dtype) != parameter.dtype:
                raise ValueError(
                    f"{name} is {source.dtype}, the model's parameters are {parameter.dtype}: loading would round it; "
                    f"convert the checkpoint first, or build the model in {source.dtype}"
                )
        rank, size = groups.tensor_rank(entry.expert)
        shard = shards.cut(entry, sources, hf_config, rank, size, parameter.shape[0])
        if shard.shape != parameter.shape:
            raise ValueError(
                f"{', '.join(entry.hf)}: this rank's shard is {list(shard.shape)}, its parameter is {list(parameter.shape)}"
            )
        copies.append((parameter, shard))
    for parameter, shard in copies:
        parameter.copy_(shard)


def check_state_dict(state_dict: Mapping[str, torch.Tensor], hf_config) -> None:
    """Raise ValueError, listing them, unless names and shapes are those of a checkpoint with this config."""
    shapes = names.expected_shapes(hf_config)
    missing = [name for name in shapes if name not in state_dict]
    unexpected = [name for name in state_dict if name not in shapes]
    wrong = [
        f"{n} is {list(state_dict[n].shape)}, not {list(s)}"
        for n, s in shapes.items()
        if n in state_dict and tuple(state_dict[n].shape) != s
    ]
    if problems := [
        f"{what}: {_some(items)}"
        for what, items in (("missing", missing), ("unexpected", unexpected), ("wrong shape", wrong))
        if items
    ]:
        raise ValueError(f"the checkpoint does not fit its {hf_config.model_type} config; {'; '.join(problems)}")


def _some(items: Sequence[str], most: int = 8) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def _chunks(model) -> list[torch.nn.Module]:
    """The bare GPTModel chunks of this rank."""
    chunks = []
    for chunk in model if isinstance(model, (list, tuple)) else [model]:
        while not hasattr(chunk, "decoder"):
            if not hasattr(chunk, "module"):
                raise ValueError(
                    f"{type(chunk).__name__} is not a GPTModel: it has neither a decoder nor a wrapped module"
                )
            chunk = chunk.module
        chunks.append(chunk)
    return chunks


def _units(shapes: Mapping[str, tuple]) -> dict[Unit, list[str]]:
    units: dict[Unit, list[str]] = {}
    for name in shapes:
        units.setdefault(_unit_of(name), []).append(name)
    return units


def _unit_of(name: str) -> Unit:
    layer = names.layer_number(name)
    return layer if layer is not None else EMBEDDING if name == "model.embed_tokens.weight" else HEAD


def _parameters(chunks, hf_config, groups: ExportGroups) -> Iterator[tuple[str, Entry, torch.nn.Parameter]]:
    """(Megatron name, entry, parameter) of this rank. A tied output layer, where it exists, is an entry for the embedding."""
    rank, size = groups.expert_rank()
    first_expert = rank * ((getattr(hf_config, "num_experts", 0) or 0) // size)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            layer = None
            if name.startswith("decoder.layers."):
                layer = chunk.decoder.layers[int(name.split(".")[2])].layer_number - 1
            entry = names.entry(name, layer=layer, first_expert=first_expert)
            if entry.hf == ("lm_head.weight",) and hf_config.tie_word_embeddings:
                entry = names.entry("embedding.word_embeddings.weight")
            yield name, entry, parameter


def _local_units(chunks, hf_config, tensors, scales, groups) -> dict[Unit, list[tuple[Entry, torch.Tensor]]]:
    """What this rank contributes to each unit. The tied copy on the last stage contributes nothing."""
    out: dict[Unit, list[tuple[Entry, torch.Tensor]]] = {}
    for name, entry, parameter in _parameters(chunks, hf_config, groups):
        if name == "output_layer.weight" and hf_config.tie_word_embeddings:
            continue
        value = parameter.detach()
        if tensors is not None:
            if parameter not in tensors:
                raise ValueError(
                    f"export: no value given for parameter {name!r}; `tensors` must hold one for every parameter"
                )
            value = tensors[parameter].detach()
            if value.shape != parameter.shape:
                raise ValueError(
                    f"export: the value given for {name!r} is {list(value.shape)}, the parameter {list(parameter.shape)}"
                )
        unit = out.setdefault(_unit_of(entry.hf[0]), [])
        unit.append((entry, value))
        if parameter in scales:
            unit.append((replace(entry, hf=tuple(f"{hf}_scale" for hf in entry.hf)), scales[parameter]))
    return out


def _whole_unit(items: list[tuple[Entry, torch.Tensor]], groups: ExportGroups, hf_config) -> dict[str, torch.Tensor]:
    """Whole tensors of a unit, from the shards of its stage's ranks."""
    whole: dict[str, torch.Tensor] = {}
    for expert in (False, True):
        part = [(entry, value) for entry, value in items if entry.expert == expert]
        if not part:
            continue
        split = [(entry, value) for entry, value in part if entry.layout != names.REPLICATED]
        gathered = groups.gather_tensor([value for _, value in split], expert)
        named = [(entry.hf, shards.join(entry, pieces, hf_config)) for (entry, _), pieces in zip(split, gathered)]
        named += [(entry.hf, [value]) for entry, value in part if entry.layout == names.REPLICATED]
        local = [(name, tensor) for hf, joined in named for name, tensor in zip(hf, joined)]
        whole.update(groups.gather_experts(local) if expert else local)
    return whole


def _owners(units, mine, groups: ExportGroups) -> tuple[dict[Unit, int], dict[str, torch.dtype]]:
    """Global rank, in this rank's pipeline, that holds each unit; dtype of each tensor."""
    held = {
        unit: {_kind(name): value.dtype for entry, value in items for name in entry.hf} for unit, items in mine.items()
    }
    stages = groups.gather_stages(held)
    owner = {unit: rank for rank, stage in stages.items() for unit in stage}
    if lacking := [unit for unit in units if unit not in owner]:
        raise ValueError(
            f"no pipeline stage holds {lacking}; does the model have as many layers as its Hugging Face config?"
        )
    dtypes = {kind: dtype for stage in stages.values() for unit in stage.values() for kind, dtype in unit.items()}
    return owner, {name: dtypes.get(_kind(name)) for unit in units.values() for name in unit}


def _check_unit(unit: Unit, found: dict[str, tuple], expected: dict[str, tuple]) -> None:
    if found != expected:
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise ValueError(
            f"the model's {'layer ' if isinstance(unit, int) else ''}{unit} does not fit its Hugging Face config: "
            + _some([f"{name} is {found.get(name, 'missing')}, not {expected.get(name, 'expected')}" for name in wrong])
        )


def _kind(name: str) -> str:
    """A tensor's name with the expert's number left out: a rank holds some of a layer's experts, all of one dtype."""
    head, mark, tail = name.partition(".mlp.experts.")
    return head + mark + tail.split(".", 1)[-1] if mark else name
