"""Megatron's shards -> whole tensors under Hugging Face names, and back.

`export_hf` walks the model unit by unit (embedding, each decoder layer, head): gather over the tensor-parallel group, over the
expert-parallel group, then broadcast from the pipeline stage that holds the unit. Never more than one unit is whole in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_sr.rollout import names, shards
from megatron_sr.rollout.names import Entry

EMBEDDING, HEAD = "embedding", "head"  # the units beside the decoder layers, which are numbered from 0
Unit = int | str


def export_hf(
    model, hf_config, tensors: Mapping[torch.nn.Parameter, torch.Tensor] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, whole tensor) of every weight, on every rank the same, in the order of `names.expected_shapes`.

    model    a GPTModel or its chunks (virtual pipeline), bare or wrapped (DDP, Float16Module)
    tensors  values to export in place of the parameters': one tensor of the local shard's shape per parameter (FP32 main params)

    Collective over the tensor-, expert- and pipeline-parallel groups: every rank must exhaust the iterator. A yielded tensor may
    be a view of a live parameter: clone it to keep it beyond the next optimizer step.
    Raises ValueError for a parameter outside the supported families, or one that `tensors` lacks.
    """
    shapes = names.expected_shapes(hf_config)
    units = _units(shapes)
    mine = _local_units(_chunks(model), hf_config, tensors)
    groups = _Groups()
    owner, dtypes = groups.owners(units, mine)
    device = next(iter(_chunks(model)[0].parameters())).device
    for unit, unit_names in units.items():
        whole = _whole_unit(mine[unit], groups, hf_config) if unit in mine else None
        if whole is not None and set(whole) != set(unit_names):
            raise ValueError(
                f"the model's {unit} does not hold the tensors of its Hugging Face config: missing "
                f"{sorted(set(unit_names) - set(whole))}, unexpected {sorted(set(whole) - set(unit_names))}"
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
    groups = _Groups()
    copies = []
    for _, entry, parameter in _parameters(_chunks(model), hf_config):
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


def _parameters(chunks, hf_config) -> Iterator[tuple[str, Entry, torch.nn.Parameter]]:
    """(Megatron name, entry, parameter) of this rank. A tied output layer, where it exists, is an entry for the embedding."""
    names.check_family(hf_config)
    for chunk in chunks:
        first_expert = _first_expert(hf_config)
        for name, parameter in chunk.named_parameters():
            layer = None
            if name.startswith("decoder.layers."):
                layer = chunk.decoder.layers[int(name.split(".")[2])].layer_number - 1
            entry = names.entry(name, layer=layer, first_expert=first_expert)
            if entry.hf == ("lm_head.weight",) and hf_config.tie_word_embeddings:
                entry = names.entry("embedding.word_embeddings.weight")
            yield name, entry, parameter


def _first_expert(hf_config) -> int:
    from megatron.core import parallel_state as ps

    experts = getattr(hf_config, "num_experts", 0) or 0
    return ps.get_expert_model_parallel_rank() * (experts // ps.get_expert_model_parallel_world_size())


def _local_units(chunks, hf_config, tensors) -> dict[Unit, list[tuple[Entry, torch.Tensor]]]:
    """What this rank contributes to each unit. The tied copy on the last stage contributes nothing."""
    out: dict[Unit, list[tuple[Entry, torch.Tensor]]] = {}
    for name, entry, parameter in _parameters(chunks, hf_config):
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
        out.setdefault(_unit_of(entry.hf[0]), []).append((entry, value))
    return out


def _whole_unit(items: list[tuple[Entry, torch.Tensor]], groups: _Groups, hf_config) -> dict[str, torch.Tensor]:
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


class _Groups:
    """The collectives of an export over Megatron's process groups. Tensors travel as bytes, so dtypes may be mixed."""

    def __init__(self):
        from megatron.core import parallel_state as ps

        self.pipeline = ps.get_pipeline_model_parallel_group()
        self.pipeline_size = ps.get_pipeline_model_parallel_world_size()
        self._tensor = {False: ps.get_tensor_model_parallel_group(), True: ps.get_expert_tensor_parallel_group()}
        self._expert = ps.get_expert_model_parallel_group()

    def tensor_rank(self, expert: bool) -> tuple[int, int]:
        """Rank and size in the tensor-parallel group of the attention and dense parameters, or of the experts."""
        return dist.get_rank(self._tensor[expert]), dist.get_world_size(self._tensor[expert])

    def gather_tensor(self, values: list[torch.Tensor], expert: bool) -> list[list[torch.Tensor]]:
        """For each value, the tensors of all ranks of its tensor-parallel group, in rank order."""
        return _gather(values, self._tensor[expert])

    def gather_experts(self, local: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """The named expert tensors of all expert-parallel ranks. Ranks hold equally many, of equal shapes, in one order."""
        size = dist.get_world_size(self._expert)
        if size == 1:
            return local
        rank_names: list = [None] * size
        dist.all_gather_object(rank_names, [name for name, _ in local], group=self._expert)
        gathered = _gather([tensor for _, tensor in local], self._expert)
        return [(rank_names[r][i], gathered[i][r]) for r in range(size) for i in range(len(local))]

    def owners(self, units, mine) -> tuple[dict[Unit, int], dict[str, torch.dtype]]:
        """Global rank (in this pipeline group) that holds each unit, and the dtype of each of this pipeline's tensors."""
        held = {unit: self._dtypes(items) for unit, items in mine.items()}
        ranks = dist.get_process_group_ranks(self.pipeline)
        everyone: list = [held]
        if self.pipeline_size > 1:
            everyone = [None] * self.pipeline_size
            dist.all_gather_object(everyone, held, group=self.pipeline)
        owner = {unit: rank for rank, stage in zip(ranks, everyone) for unit in stage}
        if lacking := [unit for unit in units if unit not in owner]:
            raise ValueError(
                f"no pipeline stage holds {lacking}; does the model have as many layers as its Hugging Face config?"
            )
        kinds = {kind: dtype for stage in everyone for unit in stage.values() for kind, dtype in unit.items()}
        return owner, {name: kinds[_kind(name)] for unit in units.values() for name in unit}

    @staticmethod
    def _dtypes(items) -> dict[str, torch.dtype]:
        return {_kind(name): value.dtype for entry, value in items for name in entry.hf}

    def broadcast(self, whole, what: dict[str, tuple], source: int, device) -> dict[str, torch.Tensor]:
        """A unit's tensors from the stage that holds them to the ranks of the other stages."""
        sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, (shape, dtype) in what.items()}
        if whole is not None:
            buffer = _pack([whole[name] for name in what])
        else:
            buffer = torch.empty(sum(_padded(size) for size in sizes.values()), dtype=torch.uint8, device=device)
        dist.broadcast(buffer, source, group=self.pipeline)
        if whole is not None:
            return whole
        return dict(zip(what, _unpack(buffer, list(what.values()))))


def _kind(name: str) -> str:
    """A tensor's name with the expert's number left out: all experts of a layer share a dtype."""
    head, mark, tail = name.partition(".mlp.experts.")
    return head + mark + tail.split(".", 1)[-1] if mark else name


def _gather(values: list[torch.Tensor], group) -> list[list[torch.Tensor]]:
    """All-gather a list of tensors (same shapes and dtypes on all ranks) with one collective."""
    size = dist.get_world_size(group)
    if size == 1 or not values:
        return [[value] for value in values]
    buffer = _pack(values)
    buffers = [torch.empty_like(buffer) for _ in range(size)]
    dist.all_gather(buffers, buffer, group=group)
    per_rank = [_unpack(b, [(v.shape, v.dtype) for v in values]) for b in buffers]
    return [[per_rank[r][i] for r in range(size)] for i in range(len(values))]


def _padded(size: int) -> int:
    return -(-size // 16) * 16  # keeps every tensor of a buffer aligned for any dtype


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = sum(_padded(t.numel() * t.element_size()) for t in tensors)
    buffer = torch.zeros(total, dtype=torch.uint8, device=tensors[0].device)
    at = 0
    for t in tensors:
        size = t.numel() * t.element_size()
        buffer[at : at + size].view(t.dtype).copy_(t.reshape(-1))
        at += _padded(size)
    return buffer


def _unpack(buffer: torch.Tensor, what: Sequence[tuple]) -> list[torch.Tensor]:
    out, at = [], 0
    for shape, dtype in what:
        size = torch.Size(shape).numel() * dtype.itemsize
        out.append(buffer[at : at + size].view(dtype).view(shape))
        at += _padded(size)
    return out
