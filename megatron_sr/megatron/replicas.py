"""Whether all ranks that hold the same elements of a logical tensor hold the same bits.

Megatron's own `check_param_hashes_across_dp_replicas` compares data-parallel replicas. Here all replicas count: norms and router
under tensor parallelism, the tied embedding on the first and last pipeline stage, experts under expert data parallelism, several
instances of the distributed optimizer. What is a replica follows from identities alone, so no process group is asked.

One record of 32 bytes per local parameter travels to every rank; weights do not.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_sr.megatron.identity import Identity


def piece_id(identity: Identity) -> int:
    """A signed 64-bit name of these elements of this logical tensor: equal for replicas."""
    segments = np.array(identity.segments, dtype=np.uint64).tobytes()
    digest = hashlib.blake2b(identity.key.encode() + b"\0" + segments, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def first_holders(identities: Sequence[Identity], device: torch.device) -> list[bool]:
    """For each of this rank's pieces, whether no lower rank holds the same elements. Collective."""
    mine = torch.tensor([[piece_id(identity)] for identity in identities], dtype=torch.int64).view(-1, 1)
    first = {}
    for rank, rows in enumerate(_gather(mine, device)):
        for (name,) in rows.tolist():
            first.setdefault(name, rank)
    return [first[name] == dist.get_rank() for (name,) in mine.tolist()]


@torch.no_grad()
def differing_replicas(identities: dict[torch.nn.Parameter, Identity], device: torch.device) -> list[str]:
    """One line for each set of elements whose replicas differ: the tensor and which ranks hold which bits. Collective.

    identities  of this rank's whole params, as `identify` gives them. Every rank gets the same lines.
    """
    from megatron_sr.rollout.digest import word_sums

    names, rows = {}, []
    for param, identity in identities.items():
        name = piece_id(identity)
        names[name] = identity
        # Local positions, not global ones: equal pieces have equal sums, and whole rows are summed fastest.
        rows.append([name, _dtype_number(param.dtype), *word_sums(param).tolist()])
    gathered = _gather(torch.tensor(rows, dtype=torch.int64).view(-1, 4), device)
    found = defaultdict(lambda: defaultdict(list))
    for rank, table in enumerate(gathered):
        for name, *bits in table.tolist():
            found[name][tuple(bits)].append(rank)
    wrong = [name for name, versions in found.items() if len(versions) > 1]
    if not wrong:
        return []
    known = [None] * dist.get_world_size()
    dist.all_gather_object(known, {name: names[name] for name in wrong if name in names})
    labels = {name: identity for part in known for name, identity in part.items()}
    return sorted(_describe(labels[name], found[name]) for name in wrong)


def _describe(identity: Identity, versions: dict[tuple, list[int]]) -> str:
    start = min(segment.global_start for segment in identity.segments)
    numel = sum(segment.length for segment in identity.segments)
    holders = "; ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in sorted(versions.values()))
    return f"{identity.key} ({numel} elements from {start}) has {len(versions)} versions: {holders}"


def _dtype_number(dtype: torch.dtype) -> int:
    return int.from_bytes(hashlib.blake2b(str(dtype).encode(), digest_size=4).digest(), "little")


def _gather(rows: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """The int64 rows [n, columns] of every rank; n may differ."""
    counts = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    counts[dist.get_rank()] = len(rows)
    dist.all_reduce(counts)
    padded = torch.zeros(int(counts.max()), rows.shape[1], dtype=torch.int64, device=device)
    padded[: len(rows)] = rows.to(device)
    everyone = [torch.empty_like(padded) for _ in range(len(counts))]
    dist.all_gather(everyone, padded)
    return [part[:count].cpu() for part, count in zip(everyone, counts.tolist())]
