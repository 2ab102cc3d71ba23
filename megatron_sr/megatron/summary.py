"""What is rounded how: the table that is printed once at start-up."""

from __future__ import annotations

from collections import defaultdict

import torch

from megatron_sr.config import FLAGS
from megatron_sr.version import __version__


def table(controller) -> str:
    """The settings and the cast sites of a `Controller`, over all ranks. Collective."""
    c = controller.config
    if not controller.replaced:
        return f"megatron-sr {__version__}: --param-rounding nearest (Megatron's own cast)"
    head = f"megatron-sr {__version__}: --param-rounding {c.mode}, seed {c.seed}, format {c.format}, noise {c.noise}"
    left_out = ("mode", "stream", *(() if c.format == "mxfp8" else ("mxfp8_columnwise", "mxfp8_scaling")))
    rows = [(FLAGS[field], _shown(value)) for field, value in c.to_dict().items() if field not in left_out]
    width = max(len(name) for name, _ in rows)
    lines = [head, *(f"  {name:<{width}}  {value}" for name, value in rows), *_sites(controller)]
    return "\n".join(lines)


def _shown(value) -> str:
    return (" ".join(value) or "-") if isinstance(value, tuple) else str(value)


def _sites(controller) -> list[str]:
    """One line for each kind of cast site, then the tensors that are rounded to nearest."""
    mine = [
        (site.kind, site.stochastic(piece), piece.identity.key, piece.main.numel())
        for site in controller.sites
        for piece in site.pieces
    ]
    copied = sum(main.numel() for site in controller.sites for _, main in site.copies)
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (mine, copied))
    ranks, stochastic, nearest, names = (defaultdict(set), defaultdict(int), defaultdict(int), set())
    for rank, (pieces, _) in enumerate(everyone):
        for kind, is_stochastic, key, numel in pieces:
            ranks[kind].add(rank)
            (stochastic if is_stochastic else nearest)[kind] += numel
            if not is_stochastic:
                names.add(key)
    lines = [
        f"  cast site {kind}: {len(ranks[kind])} ranks, {stochastic[kind]:,} elements stochastic, {nearest[kind]:,} to nearest"
        for kind in sorted(ranks)
    ]
    if names and len(names) <= 8:
        lines.append(f"  to nearest: {', '.join(sorted(names))}")
    elif names:
        lines.append(f"  to nearest: {len(names)} tensors, such as {', '.join(sorted(names)[:8])}")
    if any(numel for _, numel in everyone):
        lines.append(f"  FP32 model params, copied as they are: {sum(numel for _, numel in everyone):,} elements")
    return lines
