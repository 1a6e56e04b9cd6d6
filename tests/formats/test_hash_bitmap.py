"""The hash bitmap's bytes are the oracle's, decode to the encoded values, and are checked."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.cuda_ext import hash_ops
from megatron_sparse.cuda_ext.hash_ops import BitmapPlace
from megatron_sparse.errors import ExtensionError, WireFormatError
from megatron_sparse.formats import hash_bitmap
from megatron_sparse.formats.hash_partition import IndexSetHash, PermutationHash
from megatron_sparse.formats.hash_record import BY_POSITION
from megatron_sparse.reference import hash_bitmap as oracle
from tests.codec import on_threads
from tests.cuda_ext import cases
from tests.formats.hash_cases import OFFSET, STEP, H, forged, place_of

HASHES = (PermutationHash, IndexSetHash)
KINDS = ("zero", "equal", "special", "sparse")


def _gradient(kind, numel, dtype, seed):
    if kind != "sparse":
        return cases.make(kind, numel, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    spread = cases.make("spread", numel, dtype, seed)
    return spread * (torch.rand(numel, generator=generator) < 0.1).to(dtype)


def _positions(h, partition):
    """The partition's elements, in the order of their positions."""
    return h.element_at(partition, torch.arange(h.partition_numel(partition)))


def _encode(gradient, h, partition):
    values = gradient[_positions(h, partition)]
    return hash_bitmap.encode(values, place_of(h, partition, values.dtype))


def _decode(record, h, partition, dtype, rank=0):
    return hash_bitmap.decode(record, place_of(h, partition, dtype), rank=rank)


@settings(max_examples=80)
@given(
    st.integers(0, 900),
    st.integers(1, 12),
    st.sampled_from(KINDS),
    st.sampled_from(cases.DTYPES),
    st.sampled_from(HASHES),
    st.integers(0, 1000),
)
def test_bytes_and_values_are_the_oracles(numel, partitions, kind, dtype, hash_kind, seed):
    h = hash_kind(numel, partitions, seed)
    gradient = _gradient(kind, numel, dtype, seed)
    acc = torch.zeros(numel)
    for p in range(partitions):
        index_set = _positions(h, p).tolist()
        record = _encode(gradient, h, p)
        fields = (p, partitions, seed, h.code)
        expected = oracle.encode(gradient, index_set, fields, offset=OFFSET, step=STEP)
        assert record.numpy().tobytes() == expected
        elements, values = _decode(record, h, p, dtype)
        pairs = oracle.decode(expected, index_set, dtype)
        assert elements.tolist() == [element for element, _ in pairs]
        cases.assert_same_bits(values, gradient[elements], f"partition {p}")
        nnz = int((gradient[index_set] != 0).sum())
        assert record.numel() == place_of(h, p, dtype).nbytes(nnz, BY_POSITION)
        hash_bitmap.decode_add_(acc, record, place_of(h, p, dtype), rank=0)
    # Every element is in one partition, so the whole comes back; -0.0 is a zero that is not sent.
    whole = torch.where(gradient == 0, 0, gradient.float())
    torch.testing.assert_close(acc, whole, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("partitions", [2, 16, 128])
def test_size_is_one_bit_for_each_position_and_the_values(partitions):
    """N / n / 8 bytes each, so N / 8 in all; 80 bytes of headers, under 16 + 12 of padding."""
    numel = 100_003
    h = PermutationHash(numel, partitions, 1)
    gradient = torch.zeros(numel)
    gradient[::10] = 1.0
    records = [_encode(gradient, h, p) for p in range(partitions)]
    exact = numel / 8 + 4 * int((gradient != 0).sum())
    excess = sum(record.numel() for record in records) - exact
    assert 80 * partitions <= excess <= (80 + 8 + 8 + 12) * partitions


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("positions", [1, 15, 16, 17, 63, 64, 65, 4097, 50_000])
def test_never_larger_than_dense_and_headers(positions, dtype):
    h = PermutationHash(positions, 1, 0)
    for nnz in {0, 1, positions // 2, positions * 31 // 32, positions}:
        gradient = torch.zeros(positions, dtype=dtype)
        gradient[:nnz] = 1
        record = _encode(gradient, h, 0)
        dense = -(-positions * dtype.itemsize // 16) * 16
        assert record.numel() <= 80 + dense
        elements, values = _decode(record, h, 0, dtype)
        assert elements.sort().values.tolist() == list(range(nnz))
        assert bool((values == 1).all())


def test_results_do_not_depend_on_threads():
    numel = 300_007
    h = PermutationHash(numel, 2, 3)
    gradient = _gradient("sparse", numel, torch.float32, 1)
    results = []
    for count in (1, 2, 4):
        with on_threads(count):
            record = _encode(gradient, h, 1)
            acc = torch.zeros(numel)
            hash_bitmap.decode_add_(acc, record, place_of(h, 1), rank=0)
            results.append((record, *_decode(record, h, 1, torch.float32), acc))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    mine = h.partition_of(torch.arange(numel)) == 1
    assert torch.equal(results[0][3], torch.where(mine, gradient, 0))


def test_records_may_lie_anywhere_in_a_buffer():
    h = PermutationHash(1000, 2, 3)
    for kind in ("sparse", "equal"):
        gradient = _gradient(kind, 1000, torch.float32, 2)
        record = _encode(gradient, h, 0)
        expected = _decode(record, h, 0, torch.float32)
        for shift in (1, 3):
            buffer = torch.full((record.numel() + 9,), 0xAB, dtype=torch.uint8)
            buffer[shift : shift + record.numel()] = record
            moved = buffer[shift : shift + record.numel()]
            got = _decode(moved, h, 0, torch.float32)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


SPARSE = torch.zeros(1000)
SPARSE[::7] = 2.0
FULL = torch.full((1000,), 3.0)


def _assert_refused(record, field, h=H, partition=1):
    acc, place = torch.zeros(1000), place_of(h, partition)
    for call in (
        lambda: hash_bitmap.decode(record, place, rank=5),
        lambda: hash_bitmap.decode_add_(acc, record, place, rank=5),
    ):
        with pytest.raises(WireFormatError, match=f"rank 5: field {field} is wrong"):
            call()
    assert not acc.any()


@pytest.mark.parametrize(
    ("field", "at", "form", "value"),
    [
        ("magic", 0, "<I", 1),
        ("version", 4, "<B", 3),
        ("format", 5, "<B", 1),
        ("dtype", 6, "<B", 1),
        ("flags", 7, "<B", 1),
        ("numel", 8, "<Q", 1001),
        ("nnz", 16, "<Q", 334),
        ("nnz", 16, "<Q", 2**63),
        ("payload_bytes", 24, "<Q", 2**62),
        ("offset", 32, "<Q", 0),
        ("step", 40, "<I", 6),
        ("partition", 48, "<I", 0),
        ("partitions", 52, "<I", 4),
        ("seed", 56, "<Q", 12),
        ("hash", 64, "<I", 1),
        ("form", 68, "<I", 2),
        ("payload_bytes", 68, "<I", 1),
        ("positions", 72, "<Q", 334),
    ],
)
def test_every_wrong_field_is_named(field, at, form, value):
    _assert_refused(forged(_encode(SPARSE, H, 1), at, form, value), field)


def test_bits_and_counts_are_checked():
    record = _encode(SPARSE, H, 1)
    positions = H.partition_numel(1)
    assert positions == 333
    assert positions % 64
    words = struct.unpack_from("<6Q", record.numpy(), 80)
    # One bit more, one bit less, and one moved beyond the last position.
    last_bit = words[5].bit_length() - 1
    _assert_refused(forged(record, 80, "<Q", words[0] ^ (words[0] + 1 & ~words[0])), "nnz")
    _assert_refused(forged(record, 80, "<Q", words[0] & words[0] - 1), "nnz")
    _assert_refused(forged(record, 120, "<Q", words[5] ^ 1 << last_bit ^ 1 << 63), "bitmap")
    # In dense form there is no bitmap: the values themselves are counted.
    full = _encode(FULL, H, 1)
    assert full.numel() == 80 + 333 * 4 + 12
    _assert_refused(forged(full, 80, "<f", 0.0), "nnz")
    _assert_refused(forged(full, 16, "<Q", 332), "nnz")


@pytest.mark.parametrize("size", [0, 10, 47, 48, 79, 80, 100])
def test_short_records_are_refused(size):
    _assert_refused(_encode(SPARSE, H, 1)[:size], "(size|payload_bytes)")


def test_a_record_of_another_hash_or_with_a_tail_is_refused():
    record = _encode(SPARSE, H, 1)
    _assert_refused(record, "seed", PermutationHash(1000, 3, 12))
    _assert_refused(record, "partition", partition=0)
    _assert_refused(torch.cat([record, record[:16]]), "size")
    paper = IndexSetHash(1000, 3, 11)
    same_size = [p for p in range(3) if paper.partition_numel(p) >= 143]
    _assert_refused(record, "(hash|partition)", paper, same_size[0])


@settings(max_examples=200)
@given(st.integers(0, 1500), st.integers(1, 255), st.booleans())
def test_a_damaged_record_is_refused_or_changes_values_only(at, flip, full):
    """Any one byte: in a header it is found; in the values or the padding it cannot be found."""
    record = _encode(FULL if full else SPARSE, H, 1).clone()
    at %= record.numel()
    record[at] ^= flip
    try:
        elements, values = _decode(record, H, 1, torch.float32)
    except WireFormatError:
        return
    assert at >= 80
    assert elements.numel() == values.numel()
    assert elements.unique().numel() == elements.numel()
    assert bool((H.partition_of(elements) == 1).all())


def test_arguments_that_do_not_match_are_one_typed_error():
    record, place = _encode(SPARSE, H, 1), place_of(H, 1)
    values = SPARSE[_positions(H, 1)]
    for op, arguments, words in (
        (hash_bitmap.encode, lambda: (values[1:], place), "333 values"),
        (hash_bitmap.encode, lambda: (values.double(), place_of(H, 1, torch.float64)), "float32"),
        (hash_bitmap.encode, lambda: (values, place_of(H, 3)), "no such partition"),
        (hash_bitmap.decode, lambda: (record, place_of(H, 1, torch.float64), 0), "float32"),
        (hash_bitmap.decode, lambda: (record.view(torch.int8), place, 0), "no record"),
        (hash_bitmap.decode_add_, lambda: (torch.zeros(999), record, place, 0), "wrong length"),
        (hash_bitmap.decode_add_, lambda: (torch.zeros(1000).half(), record, place, 0), "dtype"),
    ):
        with pytest.raises(ExtensionError, match=words):
            op(*arguments())


def test_an_index_set_that_leads_outside_is_refused():
    words = torch.tensor([7, 0, 0, 0, 0, 0, 0, 0], dtype=torch.uint8)
    values, acc = torch.zeros(12, dtype=torch.uint8), torch.zeros(10)
    for bad in ([0, 1, 10], [0, 1, -1], [1, 1, 2]):
        index_set = torch.tensor(bad, dtype=torch.int32)
        with pytest.raises(ExtensionError, match="index_set is wrong at position"):
            hash_ops.bitmap_elements(words, 3, 10, BitmapPlace(0, 2, 0, index_set))
        with pytest.raises(ExtensionError, match="index_set is wrong at position"):
            hash_ops.bitmap_add_(acc, words, values, 0, 3, BitmapPlace(0, 2, 0, index_set))
