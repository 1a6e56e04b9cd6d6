"""Sizes, headers and places of messages; the smallest format in each segment, or `scheme.format`.

`tests/formats/test_codec.py` compares the messages with the oracle's.
"""

from __future__ import annotations

import zlib

import pytest
import torch

from megatron_sparse.bucket import ParameterSlice
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.config.sparse import MESSAGE_FORMATS, CompressionConfig, SchemeConfig
from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected
from megatron_sparse.errors import ConfigError, ExtensionError
from megatron_sparse.formats.header import Header
from megatron_sparse.formats.message import FORMAT_CODES
from megatron_sparse.wire import (
    FLAG_PICI_LINEAR,
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_NAMES,
    FORMAT_PICI,
    HEADER_BYTES,
)
from tests.codec import CPU, FORMS, ORACLE, STEP, Case, one_nan, segments_of, spec_of
from tests.compression.rank import Rank
from tests.cuda_ext import cases
from tests.headers import read_headers


def formats_of(message: bytes) -> list[tuple[int, int]]:
    return [(header.format, header.flags) for header in read_headers(message, rank=0)]


def test_the_smallest_is_chosen_in_each_segment():
    # 40,960 elements are ten tiles: Pici takes 5120 + 48 bytes and the values, COO 4 an entry.
    numel = 40_960
    grad = torch.zeros(5 * numel)
    for segment, nnz in enumerate((0, 1291, 1292, 1293, numel - 1291)):
        grad[segment * numel : segment * numel + nnz] = 1
    case = Case(grad, segments_of(torch.arange(6) * numel), spec_of(0, "adaptive"))
    # 4 * 1292 bytes of indices are as many as Pici's bitmap and prefix sums: COO wins the tie.
    assert formats_of(CPU[-1].encode(case).bytes) == [
        (FORMAT_COO, 0),
        (FORMAT_COO, 0),
        (FORMAT_COO, 0),
        (FORMAT_PICI, FLAG_PICI_LINEAR),
        (FORMAT_DENSE, 0),
    ]


@pytest.mark.parametrize("form", FORMS)
def test_never_larger_than_dense(form):
    for density in (0.0, 0.5, 1.0):
        grad = cases.pruned_grad(5000, density, torch.float32)
        case = Case(grad, segments_of([0, 5000]), spec_of(0, form))
        message = CPU[-1].encode(case).bytes
        assert len(message) <= case.room
        if density == 1:
            assert formats_of(message) == [(FORMAT_DENSE, 0)]


def test_dense_where_coo_is_not_smaller_and_never_larger_than_the_capacity():
    # fp32 COO takes 8 bytes an entry, dense 4 an element; each section is padded to 16 bytes.
    for nnz, form in ((496, FORMAT_COO), (497, FORMAT_DENSE), (501, FORMAT_DENSE)):
        grad = torch.zeros(1000)
        grad[:nnz] = 1
        message = CPU[-1].encode(Case(grad, segments_of([0, 1000]), spec_of(0))).bytes
        (header,) = read_headers(message, rank=0)
        assert (header.format, header.nnz, header.numel) == (form, nnz, 1000)
        assert header.step == STEP % 2**32


def test_segments_far_into_a_bucket():
    first, numel = 2**40 - 100, 100
    offsets = torch.tensor([0, numel])
    grad = cases.pruned_grad(numel, 0.1, torch.float32)
    record = ORACLE.encode(Case(grad, segments_of(offsets), spec_of(0))).bytes
    header = Header.unpack(record, rank=0)
    far = Header(**(vars(header) | {"offset": first})).pack() + record[HEADER_BYTES:]
    acc = torch.zeros(numel)
    message = torch.frombuffer(bytearray(far), dtype=torch.uint8)
    ops.decode_add_(acc, message, Expected(offsets + first, 0, STEP, rank=0), first)
    cases.assert_same_bits(one_nan(acc), one_nan(grad + 0.0), "far")


def test_the_accumulator_may_begin_before_the_segments():
    grad, offsets = torch.ones(6), torch.tensor([0, 6])
    made = CPU[-1].encode(Case(grad, segments_of(offsets, [1]), spec_of(0)))
    message = torch.tensor(list(made.bytes), dtype=torch.uint8)
    acc = torch.zeros(9)
    with pytest.raises(ExtensionError, match="do not lie in acc"):
        ops.decode_add_(acc[:5], message, Expected(offsets, 0, STEP, rank=0), 0)
    ops.decode_add_(acc, message, Expected(offsets, 0, STEP, rank=0), 0)
    assert acc.tolist() == [1.0] * 6 + [0.0] * 3


def test_message_capacity():
    assert ops.message_capacity(torch.tensor([0, 5, 8]), 0) == 48 + 32 + 48 + 16
    assert ops.message_capacity(torch.tensor([0, 5, 8]), 2) == 48 + 16 + 48 + 16
    assert ops.message_capacity(torch.tensor([0]), 1) == 0


def test_header_layout():
    header = Header(1, 2, numel=3, nnz=2, payload_bytes=32, offset=2**39, step=7)
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert packed[:8] == b"MSPG\x02\x01\x02\x00"
    assert packed[44:] == zlib.crc32(packed[:44]).to_bytes(4, "little")
    assert Header.unpack(packed, rank=0) == header


PIECES = [ParameterSlice("w", 0, 59_000), ParameterSlice("b", 59_000, 60_000, keep=True)]


@pytest.mark.parametrize(("density", "smallest"), [(0.01, "coo"), (0.2, "pici")])
def test_each_format_carries_the_same(density, smallest):
    grad_N, sent = torch.randn(60_000, generator=torch.Generator().manual_seed(1)), {}
    for form in MESSAGE_FORMATS:
        rank = Rank(CompressionConfig(density=density), PIECES)
        sent[form] = rank.send(grad_N, 3, format=form, block_size=64)
        records = rank.message.buffer[: rank.message.nbytes].numpy().tobytes()
        headers = read_headers(records, rank=0)
        nnz = sum(header.nnz for header in headers)
        assert rank.message.nnz == nnz == int(sent[form].count_nonzero())
        assert torch.equal(sent[form] + rank.residual, grad_N), "the rest is in the residual"
        pruned, kept = [FORMAT_NAMES[header.format] for header in headers]
        assert kept == "dense"
        assert pruned == {"auto": smallest}.get(form, form)
        assert torch.equal(sent[form], sent["auto"])


def test_the_names_are_those_of_the_configuration():
    assert set(FORMAT_CODES) == {
        *MESSAGE_FORMATS,
        *(s.own_format for s in SCHEMES.values() if s.own_format),
    }
    with pytest.raises(ConfigError, match=r"scheme\.format"):
        SchemeConfig(format="csr")
