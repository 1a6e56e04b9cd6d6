"""The torch-operation codec writes and reads the same bytes as the compiled one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, RecordSpec, Segments
from megatron_sparse.errors import ExtensionError, WireFormatError
from megatron_sparse.formats import torch_codec
from megatron_sparse.wire import HEADER_BYTES
from tests.cuda_ext import cases


def _case(sizes, density, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])
    numel = int(offsets[-1])
    grad = torch.randn(numel, generator=generator)
    grad *= torch.rand(numel, generator=generator) < density
    if numel > 4:
        grad[1], grad[2] = float("nan"), -0.0
    grad = grad.to(dtype)
    keep = torch.randint(0, 2, (len(sizes),), generator=generator).to(torch.uint8)
    return grad, offsets, keep, cases.count_nonzero(grad, offsets)


def _encode(codec, grad, offsets, keep, nnz, code, step=9):
    out = torch.full((ops.message_capacity(offsets, code),), 0xAB, dtype=torch.uint8)
    sizes = codec(grad, Segments(offsets, keep), nnz, RecordSpec(code, step), out)
    return out[: int(sizes.sum())], sizes


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    st.sampled_from(range(3)),
    st.integers(0, 1000),
)
def test_same_bytes_and_same_sum_as_the_compiled_codec(sizes, density, code, seed):
    grad, offsets, keep, nnz = _case(sizes, density, cases.DTYPES[code], seed)
    expected, expected_sizes = _encode(ops.encode, grad, offsets, keep, nnz, code)
    got, got_sizes = _encode(torch_codec.encode, grad, offsets, keep, nnz, code)
    assert torch.equal(got_sizes, expected_sizes)
    assert torch.equal(got, expected)
    start = torch.arange(grad.numel(), dtype=torch.float32)
    for base in (0, -3):
        sums = []
        for decode in (ops.decode_add_, torch_codec.decode_add_):
            acc = torch.cat([torch.zeros(-base), start])
            decode(acc[-base:], got, Expected(offsets, code, 9, rank=0), 0)
            sums.append(acc)
        torch.testing.assert_close(sums[0], sums[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("code", [1, 2])
@pytest.mark.parametrize("density", [0.05, 1.0])
def test_narrowed_values_have_the_compiled_codecs_bits_also_where_they_are_nan(code, density):
    grad, offsets, keep, nnz = _case([300, 41], density, torch.float32, 5)
    specials = torch.tensor([0x7FC00000, -0x400000, 0x7FA5A5A5], dtype=torch.int32)
    nonzero = grad.nonzero().flatten()
    grad[nonzero] = specials.view(torch.float32)[torch.arange(nonzero.numel()) % 3]
    grad[nonzero[-1]] = 1.00390625  # halfway between two values of bf16
    expected, _ = _encode(ops.encode, grad, offsets, keep, nnz, code)
    assert torch.equal(_encode(torch_codec.encode, grad, offsets, keep, nnz, code)[0], expected)


def _message():
    grad, offsets, keep, nnz = _case([200, 50], 0.05, torch.float32, 3)
    keep[:] = 0
    return _encode(torch_codec.encode, grad, offsets, keep, nnz, 0)[0], offsets


@pytest.mark.parametrize("byte", range(HEADER_BYTES))
def test_a_flipped_header_byte_is_refused_and_nothing_is_added(byte):
    message, offsets = _message()
    message[byte] ^= 0x5A
    acc = torch.zeros(250)
    with pytest.raises(WireFormatError, match="rank 4"):
        torch_codec.decode_add_(acc, message, Expected(offsets, 0, 9, rank=4), 0)
    assert not acc.any()


@pytest.mark.parametrize("index", [-1, 200, 2**31 - 1])
def test_an_index_out_of_range_is_refused(index):
    message, offsets = _message()
    message[HEADER_BYTES : HEADER_BYTES + 4].view(torch.int32)[0] = index
    with pytest.raises(WireFormatError, match="indices"):
        torch_codec.decode_add_(torch.zeros(250), message, Expected(offsets, 0, 9, rank=0), 0)


def test_truncated_and_extended_messages_are_refused():
    message, offsets = _message()
    for damaged in (message[:-16], torch.cat([message, message[:16]]), message[:20]):
        with pytest.raises(WireFormatError):
            torch_codec.decode_add_(torch.zeros(250), damaged, Expected(offsets, 0, 9, rank=0), 0)


def test_a_buffer_that_is_too_small_is_refused():
    grad, offsets, keep, nnz = _case([200], 0.05, torch.float32, 3)
    with pytest.raises(ExtensionError, match="too small"):
        torch_codec.encode(
            grad, Segments(offsets, keep), nnz, RecordSpec(0, 9), torch.empty(64, dtype=torch.uint8)
        )
