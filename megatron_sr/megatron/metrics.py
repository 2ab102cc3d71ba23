"""What rounding did at a step: the share of weights that changed, and how far model params are from main params.

    changed     share of weights whose bits differ from those before the step; 1 - changed is "weight sticking"
    rms         root mean square of main - model, in the unit of the weights
    relative    ||main - model|| / ||main||

Counted where the cast happens, tensor by tensor, on logged steps only: the one extra copy is the old bits of one tensor (or of
a batch of small ones). Every element of the whole model counts once, on the lowest rank that holds it.
"""

from __future__ import annotations

import torch

from megatron_sr.megatron.replicas import first_holders, piece_id
from megatron_sr.megatron.sites.base import Piece, Site

CHUNK = 1 << 20  # elements at a time: the FP32 differences below are temporaries


class Metrics:
    """Sums of one optimizer step over the pieces of this rank. Made once (collective); `start` before each step to be logged."""

    def __init__(self, sites: list[Site], device: torch.device):
        self.sites, self.device = sites, device
        pieces = [piece for site in self.sites for piece in site.pieces]
        once = first_holders([piece.identity for piece in pieces], device)
        self._counted = {piece_id(piece.identity) for piece, first in zip(pieces, once) if first}

    def start(self) -> None:
        """Count the next rounding of every site."""
        # elements, changed, sum (main - model)^2, sum main^2
        self.sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        for site in self.sites:
            site.observer = self.observe

    def observe(self, site: Site) -> None:
        """Round the site's pieces, batch by batch, and count. Called in the place of one fused launch (same bits)."""
        for batch in site.batches():
            old = [piece.place.detach().clone() for piece in batch]
            site.plan(batch).run_(site.draw)
            for before, piece in zip(old, batch):
                if piece_id(piece.identity) in self._counted:
                    self._add(before, piece)
        site.observer = None  # a copy that Megatron repeats changes nothing and is not counted again

    def _add(self, before: torch.Tensor, piece: Piece) -> None:
        before, after, main = before.view(-1), piece.place.detach().view(-1), piece.main.detach().view(-1)
        bits_before, bits_after = before.view(torch.int16), after.view(torch.int16)
        for at in range(0, main.numel(), CHUNK):
            part = slice(at, at + CHUNK)
            wanted = main[part].double()
            self.sums[0] += wanted.numel()
            self.sums[1] += (bits_before[part] != bits_after[part]).sum()
            self.sums[2] += (wanted - after[part]).square_().sum()
            self.sums[3] += wanted.square_().sum()

    def finish(self, rounded: bool) -> dict[str, float] | None:
        """The metrics of the whole model; None if the step was skipped and nothing `rounded`. Collective over all ranks."""
        for site in self.sites:
            site.observer = None
        if not rounded:
            return None
        torch.distributed.all_reduce(self.sums)
        elements, changed, distance, norm = self.sums.tolist()
        elements = max(elements, 1.0)
        return {
            "changed": changed / elements,
            "unchanged": 1 - changed / elements,
            "rms": (distance / elements) ** 0.5,
            "relative": (distance / norm) ** 0.5 if norm else 0.0,
        }


def line(step: int, metrics: dict[str, float]) -> str:
    """One log line."""
    return (
        f"megatron-sr: step {step} | weights changed: {100 * metrics['changed']:.4f} % | sticking: "
        f"{100 * metrics['unchanged']:.4f} % | main - model: rms {metrics['rms']:.4E} | relative {metrics['relative']:.4E}"
    )


def to_megatron(step: int, metrics: dict[str, float]) -> None:
    """Write to the TensorBoard and W&B writers of Megatron's training loop, where its own curves are, and print one line.

    Megatron's x axis is its iteration, which counts skipped steps too. Both writers exist on the last rank only.
    """
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer
    from megatron.training.utils import print_rank_last

    iteration = getattr(get_args(), "curr_iteration", step - 1) + 1
    named = {f"param-rounding/{name}": value for name, value in metrics.items()}
    if writer := get_tensorboard_writer():
        for name, value in named.items():
            writer.add_scalar(name, value, iteration)
    if writer := get_wandb_writer():
        writer.log(named, iteration)
    print_rank_last(line(step, metrics))
