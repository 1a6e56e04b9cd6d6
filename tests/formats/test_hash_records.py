"""Records of hash partitions: bytes are the oracle's, come back as they were, and are checked.

A pull is a bitmap or dense; a push may be pairs too, the smallest of the three.
"""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.errors import ExtensionError, WireFormatError
from megatron_sparse.formats import hash_bitmap, hash_pairs
from megatron_sparse.formats.hash_partition import PermutationHash
from megatron_sparse.formats.hash_record import FORM_BITMAP, FORM_DENSE, FORM_PAIRS
from megatron_sparse.reference import hash_bitmap as oracle
from tests import damage
from tests.codec import on_threads
from tests.cuda_ext import cases
from tests.formats.hash_cases import OFFSET, STEP, H, place_of

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


def _pull(gradient, h, partition):
    values = gradient[_positions(h, partition)]
    return hash_bitmap.encode(values, place_of(h, partition, values.dtype))


def _entries(h, partition, density, dtype=torch.float32, seed=1):
    """Ascending elements of a partition, and values without a zero among them."""
    elements = _positions(h, partition).sort().values
    generator = torch.Generator().manual_seed(seed)
    chosen = elements[torch.rand(elements.numel(), generator=generator) < density]
    return chosen, (torch.rand(chosen.numel(), generator=generator) + 0.5).to(dtype)


def _decoded(record, h, partition):
    acc = torch.zeros(h.numel)
    hash_bitmap.decode_add_(acc, record, place_of(h, partition), rank=0)
    return acc


@settings(max_examples=80)
@given(
    st.integers(0, 900),
    st.integers(1, 12),
    st.sampled_from(KINDS),
    st.sampled_from(cases.DTYPES),
    st.integers(0, 1000),
)
def test_bytes_and_values_are_the_oracles(numel, partitions, kind, dtype, seed):
    h = PermutationHash(numel, partitions, seed)
    gradient = _gradient(kind, numel, dtype, seed)
    acc = torch.zeros(numel)
    for p in range(partitions):
        elements = _positions(h, p).tolist()
        record = _pull(gradient, h, p)
        fields = (p, partitions, seed)
        expected = oracle.encode(gradient, elements, fields, offset=OFFSET, step=STEP)
        assert record.numpy().tobytes() == expected
        hash_bitmap.decode_add_(acc, record, place_of(h, p, dtype), rank=0)
    # Every element is in one partition, so the whole comes back; -0.0 is a zero that is not sent.
    whole = torch.where(gradient == 0, 0, gradient.float())
    torch.testing.assert_close(acc, whole, rtol=0, atol=0, equal_nan=True)


def test_results_do_not_depend_on_threads():
    numel = 300_007
    h = PermutationHash(numel, 2, 3)
    gradient = _gradient("sparse", numel, torch.float32, 1)
    results = []
    for count in (1, 2, 4):
        with on_threads(count):
            record = _pull(gradient, h, 1)
            results.append((record, _decoded(record, h, 1)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    mine = h.partition_of(torch.arange(numel)) == 1
    assert torch.equal(results[0][1], torch.where(mine, gradient, 0))


def test_records_may_lie_anywhere_in_a_buffer():
    h = PermutationHash(1000, 2, 3)
    for kind in ("sparse", "equal"):
        gradient = _gradient(kind, 1000, torch.float32, 2)
        record = _pull(gradient, h, 0)
        expected = _decoded(record, h, 0)
        for shift in (1, 3):
            buffer = torch.full((record.numel() + 9,), 0xAB, dtype=torch.uint8)
            buffer[shift : shift + record.numel()] = record
            moved = buffer[shift : shift + record.numel()]
            assert torch.equal(_decoded(moved, h, 0), expected)


@settings(max_examples=60)
@given(
    st.integers(0, 3000),
    st.integers(1, 5),
    st.sampled_from((0.0, 0.01, 0.1, 1.0)),
    st.sampled_from(cases.DTYPES),
)
def test_pushed_values_are_added_by_position(numel, partitions, density, dtype):
    h = PermutationHash(numel, partitions, 7)
    for p in range(partitions):
        indices, values = _entries(h, p, density, dtype)
        place = place_of(h, p, dtype)
        record = hash_pairs.encode(indices, values, place)
        nnz, item = indices.numel(), dtype.itemsize
        sections = {
            FORM_DENSE: -(-place.positions * item // 16) * 16,
            FORM_BITMAP: (place.positions + 127) // 128 * 16 + -(-nnz * item // 16) * 16,
            FORM_PAIRS: -(-nnz * 4 // 16) * 16 + -(-nnz * item // 16) * 16,
        }
        assert record.numel() == 80 + min(sections.values())
        assert sections[damage.word(record.numpy().tobytes(), 68)] == min(sections.values())
        acc = torch.ones(place.positions)
        hash_pairs.accumulate_(acc, record, place, rank=0)
        expected = torch.ones(place.positions)
        expected[h.locate(p, indices)] += values.float()
        assert torch.equal(acc, expected)


def test_pairs_are_the_elements_and_the_bits_of_their_values():
    indices = _entries(H, 1, 1.0)[0][[3, 50]]
    values = torch.tensor([float("nan"), float("-inf")])
    record = hash_pairs.encode(indices, values, place_of(H, 1))
    assert record.numel() == 80 + 16 + 16
    assert struct.unpack_from("<QQQ", record.numpy(), 8) == (1000, 2, 32 + 32)
    assert struct.unpack_from("<2I2I", record.numpy(), 80) == (*indices.tolist(), 0, 0)
    assert bytes(record[96:104].numpy()) == bytes(values.numpy())
    assert not record[104:].any()


SPARSE = torch.zeros(1000)
SPARSE[::7] = 2.0
PULLED = _pull(SPARSE, H, 1)
FULL = _pull(torch.full((1000,), 3.0), H, 1)
INDICES, VALUES = _entries(H, 1, 0.02)
PUSHED = hash_pairs.encode(INDICES, VALUES, place_of(H, 1))
STRANGER = int((H.partition_of(torch.arange(1000)) != 1).nonzero()[0])


def _refused(record, data, fields, h=H, partition=1):
    """The reader of records of this kind names one of the fields, and adds nothing."""
    add_, numel = hash_bitmap.decode_add_, 1000
    if record is PUSHED:
        add_, numel = hash_pairs.accumulate_, 333
    acc = torch.zeros(numel)
    with pytest.raises(WireFormatError, match=f"rank 5: field ({'|'.join(fields)}) is wrong"):
        add_(acc, data, place_of(h, partition), rank=5)
    assert not acc.any()


def _tensor(data):
    return torch.tensor(list(data), dtype=torch.uint8)


def _put(record, at, value, width):
    return _tensor(damage.put(record.numpy().tobytes(), at, value, width))


WORDS = struct.unpack_from("<6Q", PULLED.numpy(), 80)
LAST_BIT = WORDS[5].bit_length() - 1


@pytest.mark.parametrize(
    ("record", "field", "at", "width", "value"),
    [
        *(
            (record, *wrong)
            for record in (PULLED, PUSHED)
            for wrong in (
                ("nnz", 16, 8, 2**63),
                ("partition", 48, 4, 0),
                ("partitions", 52, 4, 4),
                ("seed", 56, 8, 12),
                ("hash", 64, 4, 1),
                ("form", 68, 4, 3),
                ("positions", 72, 8, 334),
            )
        ),
        (PULLED, "nnz", 16, 8, 334),
        (PULLED, "form", 68, 4, 2),
        (PULLED, "payload_bytes", 68, 4, 1),
        # One bit more, one bit less, and one moved beyond the last position.
        (PULLED, "nnz", 80, 8, WORDS[0] ^ (WORDS[0] + 1 & ~WORDS[0])),
        (PULLED, "nnz", 80, 8, WORDS[0] & WORDS[0] - 1),
        (PULLED, "bitmap", 120, 8, WORDS[5] ^ 1 << LAST_BIT ^ 1 << 63),
        # In dense form there is no bitmap: the values themselves are counted.
        (FULL, "nnz", 80, 4, 0),
        (FULL, "nnz", 16, 8, 332),
        (PUSHED, "payload_bytes", 16, 8, 100),
        (PUSHED, "indices", 80, 4, 1000),
        (PUSHED, "indices", 80, 4, -1),
        (PUSHED, "indices", 80, 4, STRANGER),
        (PUSHED, "indices", 84, 4, int(INDICES[0])),
    ],
)
def test_every_wrong_field_is_named(record, field, at, width, value):
    assert (H.partition_numel(1), FULL.numel()) == (333, 80 + 333 * 4 + 12)
    _refused(record, _put(record, at, value, width), [field])


@pytest.mark.parametrize("record", [PULLED, PUSHED], ids=["pull", "push"])
def test_damaged_headers_and_other_lengths(record):
    for found in damage.headers(record.numpy().tobytes(), 1000):
        _refused(record, _tensor(found.message), found.fields)


def test_another_record_is_refused():
    """Of another hash; or pairs, which a pull never is."""
    _refused(PULLED, PUSHED, ["form"])
    _refused(PULLED, PULLED, ["seed"], PermutationHash(1000, 3, 12))
    _refused(PULLED, PULLED, ["partition"], partition=0)


def test_arguments_that_do_not_match_are_one_typed_error():
    place = place_of(H, 1)
    for call, arguments, words in (
        (hash_bitmap.decode_add_, (torch.zeros(999), PULLED, place, 0), "wrong length"),
        (hash_bitmap.decode_add_, (torch.zeros(1000).half(), PULLED, place, 0), "dtype"),
        (place_of, (H, 3), "no such partition"),
    ):
        with pytest.raises(ExtensionError, match=words):
            call(*arguments)
