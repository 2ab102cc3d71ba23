"""Names of pieces and the log line; that replicas are compared on real ranks, tests/distributed/test_megatron_sites.py shows."""

from __future__ import annotations

from megatron_sr.coordinates import Segment
from megatron_sr.megatron import metrics
from megatron_sr.megatron.identity import Identity
from megatron_sr.megatron.replicas import piece_id


def test_replicas_have_one_name_and_everything_else_another():
    pieces = [
        Identity("a", [Segment(0, 8, 0)]),
        Identity("b", [Segment(0, 8, 0)]),
        Identity("a", [Segment(0, 8, 8)]),
        Identity("a", [Segment(0, 4, 0), Segment(4, 4, 4)]),
        Identity("a", [Segment(0, 8, 0, 16, 4)]),
        Identity("a", []),
    ]
    names = [piece_id(piece) for piece in pieces]
    assert len(set(names)) == len(pieces)
    assert all(-(2**63) <= name < 2**63 for name in names)
    assert names[0] == piece_id(Identity("a", [Segment(0, 8, 0)]))


def test_the_log_line_names_what_it_counts():
    line = metrics.line(10, {"changed": 0.013527, "unchanged": 0.986473, "rms": 1.07e-5, "relative": 2.2744e-3})
    assert line == (
        "megatron-sr: step 10 | weights changed: 1.3527 % | sticking: 98.6473 % | main - model: rms 1.0700E-05 | "
        "relative 2.2744E-03"
    )
