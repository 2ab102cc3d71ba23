"""A 128-bit digest of a tensor's bits that ranks can compute in pieces and add.

The bytes of the whole (unsharded) tensor, row-major and little-endian, are read as 32-bit two's complement words w[j], the last
one padded with zero bytes. For k = 0, 1 and with C = 4096

    S_k = sum over j of  w[j] * A_k[j mod C] * B_k[j div C]   (mod 2**64)

where A and B are fixed odd 64-bit constants made by splitmix64. The digest is BLAKE2b-128 of the dtype, the shape, S_0 and S_1.
The sums are linear, so any split of the tensor into pieces, summed in any order, gives the same digest.

What it detects: every change confined to one 32-bit word, with certainty (the constants are odd). Any other fixed change passes
with probability below 2**-50, taken over the choice of the constants: the worst case, differences in the top bits of words only,
leaves 33 useful bits in each of the two independent sums. The constants are public, so it finds corruption, lost or swapped pieces
and wrong layouts, not an adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch

from megatron_sr.coordinates import Segment
from megatron_sr.kernels import digest_cpu

_ROW = 4096  # C: words that share one B
_ROWS = 32  # rows hashed at a time: bounds the temporaries to 3 MB
_UNSIGNED = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF}
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def word_sums(tensor: torch.Tensor, segments: Sequence[Segment] | None = None) -> torch.Tensor:
    """S_0 and S_1 of a tensor, or of the piece of a larger tensor that `segments` place: int64 [2] on the tensor's device.

    tensor    any shape, 1, 2 or 4 bytes an element. Temporaries stay below 8 MB whatever its size.
    segments  where the elements of the flattened `tensor` lie in the whole tensor; None: it is the whole tensor.

    The sums of pieces add (int64, wrapping) to those of the whole. Raises TypeError for another element size.
    """
    size = tensor.element_size()
    if size not in _INTEGER or tensor.is_complex():
        raise TypeError(f"cannot digest {tensor.dtype}: only elements of 1, 2 or 4 bytes are supported")
    flat = tensor.detach().contiguous().reshape(-1).view(_INTEGER[size])
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for s in segments if segments is not None else [Segment(0, flat.numel(), 0)]:
        piece = flat[s.local_start : s.local_start + s.length]
        if s.contiguous:
            _add_contiguous(sums, piece, s.global_start)
        else:
            _add_strided(sums, piece, s)
    return sums


def finish(sums: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> str:
    """The digest (32 hex digits) of a whole tensor from its word sums."""
    return _finish(sums.tolist(), dtype, shape)


def _finish(sums: Sequence[int], dtype: torch.dtype, shape: Sequence[int]) -> str:
    head = f"megatron-sr digest 1\n{str(dtype).removeprefix('torch.')}\n{'x'.join(map(str, shape))}\n".encode()
    body = b"".join((s & (2**64 - 1)).to_bytes(8, "little") for s in sums)
    return hashlib.blake2b(head + body, digest_size=16).hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """The digest (32 hex digits) of a whole tensor's bits, dtype and shape."""
    if tensor.element_size() in _INTEGER and not tensor.is_complex() and (sums := digest_cpu.whole_sums(tensor)):
        return _finish(sums, tensor.dtype, tensor.shape)
    return finish(word_sums(tensor), tensor.dtype, tensor.shape)


def _add_contiguous(sums: torch.Tensor, piece: torch.Tensor, start: int) -> None:
    """Add `piece` (integers of 1, 2 or 4 bytes), the elements `start`.. of the whole tensor."""
    per_word = 4 // piece.element_size()
    head = min(-start % per_word, piece.numel())
    body = (piece.numel() - head) // per_word * per_word
    _add_elements(sums, piece[:head], start)
    words = piece[head : head + body]
    if words.storage_offset() % per_word:
        words = words.clone()  # a view as 32-bit words needs aligned storage
    _add_words(sums, words.view(torch.int32), (start + head) // per_word)
    _add_elements(sums, piece[head + body :], start + head + body)


def _add_words(sums: torch.Tensor, words: torch.Tensor, first: int) -> None:
    """Add consecutive 32-bit words, the first of them word `first` of the whole tensor."""
    if words.device.type == "cpu":
        digest_cpu.add_words_(sums, words, first)
    else:
        add_words_reference(sums, words, first)


def add_words_reference(sums: torch.Tensor, words: torch.Tensor, first: int) -> None:
    """The same in plain torch, on any device: the oracle of the C++ kernel, and what runs on GPUs."""
    a = _row_constants(words.device)
    at = 0
    while at < words.numel():
        column = (first + at) % _ROW
        if column or words.numel() - at < _ROW:
            rows, width = 1, min(_ROW - column, words.numel() - at)
        else:
            rows, width = min(_ROWS, (words.numel() - at) // _ROW), _ROW
        block = words[at : at + rows * width].view(rows, width).long()
        b = _block_constants((first + at) // _ROW, rows, words.device)
        sums += ((block * a[:, None, column : column + width]).sum(2) * b).sum(1)
        at += rows * width


def _add_strided(sums: torch.Tensor, piece: torch.Tensor, s: Segment) -> None:
    for at in range(0, piece.numel(), _ROW * _ROWS):
        i = _indices(at, min(_ROW * _ROWS, piece.numel() - at), piece.device)
        where = s.global_start + i.div(s.run, rounding_mode="floor") * s.stride + i % s.run
        _add_scattered(sums, piece[at : at + _ROW * _ROWS], where)


def _add_elements(sums: torch.Tensor, piece: torch.Tensor, start: int) -> None:
    if piece.numel():
        _add_scattered(sums, piece, _indices(start, piece.numel(), piece.device))


def _add_scattered(sums: torch.Tensor, piece: torch.Tensor, where: torch.Tensor) -> None:
    """Add single elements; `where` holds their index in the whole tensor. The lanes of a word are disjoint, so each counts alone."""
    size = piece.element_size()
    byte = where * size
    value = (piece.long() & _UNSIGNED[size]) << (byte & 3) * 8
    value = value.to(torch.int32).long()  # the top lane carries the word's sign
    word = byte >> 2
    a = _row_constants(piece.device)
    b = _mix(word >> 12)
    sums += (value * a[:, word & (_ROW - 1)] * b).sum(1)


def _indices(start: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(start, start + count, dtype=torch.int64, device=device)


@lru_cache(maxsize=4096)
def _block_constants(first: int, rows: int, device: torch.device) -> torch.Tensor:
    """B_0 and B_1 of consecutive rows of words: int64 [2, rows]."""
    return _mix(_indices(first, rows, device))


@lru_cache(maxsize=16)
def _row_constants(device: torch.device) -> torch.Tensor:
    """A_0 and A_1: int64 [2, C]."""
    return _mix(_indices(2**61, _ROW, device))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64 of 2x and 2x + 1, made odd: int64 [2, *x.shape]."""
    z = torch.stack([2 * x, 2 * x + 1]) + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shift(z, 31)) | 1


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits) & (2 ** (64 - bits) - 1)  # torch's >> keeps the sign


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant
