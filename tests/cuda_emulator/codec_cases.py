"""Gradients, the records that the oracles make of them, and the comparison with an encoder's."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch

from megatron_sparse.formats.header import Header
from megatron_sparse.reference import blocks, pici
from megatron_sparse.reference.prune import with_one_nan
from megatron_sparse.wire import pad16
from tests.cuda_emulator.emulated import (
    ADAPTIVE,
    BLOCKS,
    COO,
    DENSE,
    DTYPE_CODES,
    PICI,
    Codecs,
    Encoded,
)

type Place = Callable[..., torch.Tensor]
"""Puts a tensor on a GPU, or an emulated one, some elements behind an aligned address."""

STEP = 7
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


def gradient(numel: int, density: float, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Mostly zeros, with the values that are difficult for codecs if there is room."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    values[torch.rand(numel, generator=generator) >= density] = 0
    special = [-0.0, math.nan, math.inf, -math.inf, SMALLEST[dtype], -SMALLEST[dtype]]
    if numel > 100 and density > 0:
        places = torch.randperm(numel, generator=generator)[: len(special)]
        values[places] = torch.tensor(special)
    return values.to(dtype)


def record(
    values_N: torch.Tensor,
    kind: int,
    value_dtype: torch.dtype,
    offset: int,
    block_size: int,
) -> bytes:
    """The record of one segment; dense if the sparse one would not be smaller."""
    kept_N = values_N != 0
    if kind == ADAPTIVE:
        size = value_dtype.itemsize
        nnz = int(kept_N.sum())
        coo_bytes = pad16(4 * nnz) + pad16(size * nnz)
        kind = COO if coo_bytes <= pici.payload_bytes(values_N.numel(), nnz, size) else PICI
    wire_N = values_N
    if value_dtype != values_N.dtype:
        wire_N = with_one_nan(values_N, value_dtype)
    dense = padded(wire_N)
    # Blocks hold +0 where nothing is kept, dense records -0.0 where the gradient does.
    wire_N = wire_N.clone()
    wire_N[~kept_N] = 0
    if kind == COO:
        payload = padded(kept_N.nonzero().squeeze(1).int()) + padded(wire_N[kept_N])
    elif kind == BLOCKS:
        payload = blocks.encode(wire_N, kept_N, block_size)
    else:
        payload = pici.encode(wire_N, kept_N, linear=kind == PICI)
    if kind == DENSE or len(payload) >= len(dense):
        kind, payload = DENSE, dense
    header = Header(
        kind & 15,
        DTYPE_CODES[value_dtype],
        values_N.numel(),
        int(kept_N.sum()),
        len(payload),
        offset,
        STEP,
        pici.FLAG_LINEAR if kind == PICI else 0,
    )
    return header.pack() + payload


def expect(
    encoded: Encoded,
    values_N: torch.Tensor,
    segments: list[int],
    kinds: list[int],
    value_dtype: torch.dtype,
    block_size: int,
) -> list[bytes]:
    """Compares an encoder's result with the oracle's records, which it returns."""
    records = [
        record(values_N[a:b], kind, value_dtype, a, block_size)
        for (a, b), kind in zip(pairwise(segments), kinds, strict=True)
    ]
    assert encoded.status == [0, 0, 0, 0]
    assert encoded.segment_bytes == [len(data) for data in records]
    assert encoded.nnz == [int((values_N[a:b] != 0).sum()) for a, b in pairwise(segments)]
    for number, (found, wanted) in enumerate(zip(encoded.records, records, strict=True)):
        assert found[:48] == wanted[:48], f"header of record {number}"
        assert found == wanted, f"record {number} of kind {kinds[number]}"
    return records


def capacity_of(segments: list[int], value_dtype: torch.dtype) -> int:
    """Bytes of the dense message."""
    return sum(48 + (n * value_dtype.itemsize + 15) // 16 * 16 for n in _lengths(segments))


def padded(section: torch.Tensor) -> bytes:
    """A section's bytes with its padding."""
    data = section.contiguous().view(torch.uint8).numpy().tobytes()
    return data.ljust(pad16(len(data)), b"\0")


def _lengths(segments: list[int]) -> list[int]:
    return [b - a for a, b in pairwise(segments)]


def check_decode(
    codecs: Codecs,
    values_N: torch.Tensor,
    segments: list[int],
    records: list[bytes],
    value_dtype: torch.dtype,
) -> None:
    """Decodes into an accumulator with a margin and compares bit for bit."""
    acc = torch.randn(values_N.numel() + 20, generator=torch.Generator().manual_seed(3))
    wanted = acc.clone()
    wire_N = values_N.to(value_dtype).float()
    wire_N[values_N == 0] = 0
    wanted[10:-10] += wire_N
    found, status = codecs.decode_add(
        acc, b"".join(records), [s + 10 for s in segments], value_dtype, step=STEP, shift=1
    )
    # The offsets in the headers do not fit: nothing is added.
    if segments[-1]:
        assert status[0] == 1
        assert torch.equal(found, acc)
    found, status = codecs.decode_add(
        acc[10:], b"".join(records), segments, value_dtype, step=STEP, shift=2
    )
    assert status == [0, 0, 0, 0]
    torch.testing.assert_close(found, wanted[10:], rtol=0, atol=0, equal_nan=True)
