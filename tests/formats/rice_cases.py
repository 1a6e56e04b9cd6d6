"""Messages of Rice records by the oracle and by each instruction set of the ops, under one roof."""

from __future__ import annotations

import os
from dataclasses import dataclass
from unittest import mock

import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, Pruning, RecordSpec, Segments
from megatron_sparse.reference import message as message_oracle
from megatron_sparse.reference import rice_message
from megatron_sparse.wire import FORMAT_RICE, RICE_BITS
from tests.cuda_ext import cases

STEP, RANK = 2**32 + 5, 3  # the step's lower half travels
ORACLE = "oracle"
CODECS = (ORACLE, *cases.ISAS)
RAW = (0, 1, 2)
QUANTISED = tuple(RICE_BITS)
ALL = (*RAW, *QUANTISED)
NAMES = {0: "fp32", 1: "bf16", 2: "fp16", 3: "q8", 4: "q4", 5: "q3", 6: "q2"}


@dataclass(frozen=True)
class Message:
    """An encoder's results."""

    records: list[bytes]
    residual: torch.Tensor

    @property
    def bytes(self):
        return b"".join(self.records)


def spec_of(value_dtype, log2_span=12, *, without_indices=False):
    return RecordSpec(
        value_dtype, STEP, FORMAT_RICE, log2_span=log2_span, without_indices=without_indices
    )


def encode(codec, grad, pruning, segments, spec):
    """Prunes and encodes on unaligned views, into poisoned buffers; mutates nothing."""
    if codec == ORACLE:
        return Message(*rice_message.prune_encode(grad, pruning, segments, spec))
    capacity = ops.rice_capacity(segments.offsets, spec.value_dtype)
    if segments.slots is not None:
        capacity = int(segments.slots[-1])
    out = torch.full((capacity + 64,), 0xFF, dtype=torch.uint8)
    room = ops.rice_scratch_capacity(segments.offsets, spec.value_dtype)
    scratch = torch.full((room + 64,), 0xFF, dtype=torch.uint8)
    got_grad, got_rest = cases.unaligned(grad), cases.unaligned(pruning.residual_N)
    arguments = {name: getattr(pruning, name) for name in pruning.__slots__}
    with mock.patch.dict(os.environ, MEGATRON_SPARSE_ISA=codec):
        sizes, nnz = ops.rice_prune_encode(
            got_grad,
            Pruning(**(arguments | {"residual_N": got_rest})),
            segments,
            spec,
            out[:capacity],
            scratch[:room],
        )
    assert bool((scratch[room:] == 0xFF).all())
    for buffer in (got_grad, got_rest):
        assert buffer._base[0].isnan()
        assert buffer._base[-1].isnan()
    cases.assert_same_bits(got_grad, grad, f"{codec}: the gradient")
    begins = [0, *sizes.cumsum(0).tolist()[:-1]]
    if segments.slots is not None:
        begins = segments.slots[:-1].tolist()
        free = torch.ones(capacity, dtype=torch.bool)
        for begin, size in zip(begins, sizes.tolist(), strict=True):
            free[begin : begin + size] = False
        assert not out[:capacity][free].any(), "the rest of a slot is not cleared"
    else:
        assert bool((out[int(sizes.sum()) :] == 0xFF).all())
    assert bool((out[capacity:] == 0xFF).all())
    records = [
        out[begin : begin + size].numpy().tobytes()
        for begin, size in zip(begins, sizes.tolist(), strict=True)
    ]
    assert nnz.tolist() == [int.from_bytes(record[16:24], "little") for record in records]
    return Message(records, got_rest.clone())


def select(codec, grad, residual, threshold, spec, *, offsets=None, dense=None, key=-1):
    """One threshold for everything; segments as given, one pruned segment by default."""
    offsets = torch.tensor([0, grad.numel()]) if offsets is None else offsets
    if dense is None:
        dense = torch.zeros(offsets.numel() - 1, dtype=torch.uint8)
    pruning = Pruning(
        residual, torch.tensor([0, grad.numel()]), torch.tensor([float(threshold)]), 1.0, key
    )
    return encode(codec, grad, pruning, Segments(offsets, dense), spec)


def decode_add_(codec, acc, message, value_dtype, *, offsets=None, fresh=False):
    """Adds to `acc`; the ops do it from an unaligned copy that ends with the message."""
    offsets = torch.tensor([0, acc.numel()]) if offsets is None else offsets
    expected = Expected(offsets, value_dtype, STEP, RANK)
    if codec == ORACLE:
        if fresh:
            acc.zero_()
        message_oracle.decode_add_(acc, message, expected, 0)
        return
    room = torch.empty(len(message) + 1, dtype=torch.uint8)
    room[1:] = torch.tensor(list(message), dtype=torch.uint8)
    with mock.patch.dict(os.environ, MEGATRON_SPARSE_ISA=codec):
        ops.decode_add_(acc, room[1:], expected, 0, fresh=fresh)


def decoded(codec, message, numel, value_dtype, *, offsets=None):
    """What a message adds to zeros."""
    acc = cases.unaligned(torch.full((numel,), torch.nan))
    decode_add_(codec, acc, message, value_dtype, offsets=offsets, fresh=True)
    assert acc._base[0].isnan()
    assert acc._base[-1].isnan()
    return acc.clone()
