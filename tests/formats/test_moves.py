"""Records of moves: the compiled codec against the oracle, byte for byte, and damaged records."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from megatron_sparse.errors import ExtensionError
from megatron_sparse.formats.moves import decode_moves_, encode_moves, most_bytes
from megatron_sparse.reference import moves as oracle
from megatron_sparse.wire import MOVES_CODERS
from tests.codec import on_threads
from tests.damage import sealed
from tests.formats import moves_cases
from tests.formats.moves_cases import (
    DTYPES,
    EPOCH,
    adam_like,
    any_bits,
    bits,
    every_bfloat16,
    mixed,
    of_which_a_part_is_counted,
    refusal,
    repaired,
    written,
)

NUMELS = [0, 1, 31, 32, 33, 255, 257, 4096, 16384 + 300]


@cache
def oracle_record(old, new, dtype, coder):
    """Of bytes; checks that the oracle reads its own record. The same for all instruction sets."""
    old_bits, new_bits = (np.frombuffer(data, f"<u{DTYPES[dtype].itemsize}") for data in (old, new))
    record = oracle.encode(old_bits, new_bits, dtype, coder, EPOCH)
    if old_bits.size < oracle.COUNT_ALL:
        assert np.array_equal(oracle.decode(record, old_bits), new_bits)
    return record


def check(old, new, coder):
    wanted = oracle_record(bits(old).tobytes(), bits(new).tobytes(), DTYPES.index(old.dtype), coder)
    moves_cases.check(old, new, coder, wanted)
    assert len(wanted) <= most_bytes(old.numel(), old.dtype)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("coder", MOVES_CODERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", NUMELS)
def test_bytes_are_the_oracles(numel, dtype, coder):
    check(*adam_like(numel, dtype), coder)
    if numel < 5000:
        check(*any_bits(numel, dtype), coder)
        check(*mixed(numel, dtype), coder)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("coder", ["rans", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_kinds_of_chunks_in_one_record(dtype, coder):
    """Some chunks are raw, some coded; numbers that do not move cost nothing."""
    check(*mixed(65536 + 777, dtype), coder)


def test_of_many_numbers_a_part_is_counted():
    """Moves that no counted block has can be coded all the same."""
    check(*of_which_a_part_is_counted(), "rans")


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("coder", ["rans", "packed"])
@pytest.mark.parametrize("lr", [0.0, 1e-5, 1e-3, 0.3])
def test_every_learning_rate(lr, coder):
    check(*adam_like(20000, torch.bfloat16, lr), coder)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("coder", ["rans", "packed"])
def test_every_bfloat16_moves_to_every_distance(coder):
    old, moved, next_to = every_bfloat16()
    check(old, moved, coder)
    check(old, next_to, coder)


def test_views_that_are_not_aligned():
    old, new = adam_like(3001, torch.bfloat16)
    room = torch.empty(3002, dtype=torch.bfloat16)
    held = room[1:].copy_(old)
    for coder in MOVES_CODERS:
        record = encode_moves(held, new[:], coder=coder, epoch=EPOCH)
        moved = torch.cat([record.new_zeros(3), record])[3:]
        target = held.clone()
        decode_moves_(moved, target, epoch=EPOCH)
        assert torch.equal(target, new)


def test_threads_do_not_change_the_bytes():
    old, new = mixed(3 * 65536 + 777, torch.bfloat16)
    for coder in MOVES_CODERS:
        records = []
        for count in (1, 3):
            with on_threads(count):
                records.append(encode_moves(old, new, coder=coder, epoch=EPOCH))
                held = old.clone()
                decode_moves_(records[-1], held, epoch=EPOCH)
            assert np.array_equal(bits(held), bits(new))
        assert torch.equal(*records)


def test_bits_are_near_the_conditional_entropy():
    """Within 10 % of the entropy given the old exponent; packing costs at most 3 bits more."""
    for lr, most in ((3e-5, 1.05), (1e-4, 1.85), (3e-4, 3.2)):
        old, new = adam_like(2_000_000, torch.bfloat16, lr)
        z = oracle.zigzag(bits(old).astype(np.int64), bits(new).astype(np.int64), 1)
        joint = oracle.exponents(bits(old).astype(np.int64), 1) << 16 | z
        entropy = entropy_bits(joint) - entropy_bits(joint >> 16)
        record = encode_moves(old, new, coder="rans", epoch=0)
        coded = 8 * record.numel() / old.numel()
        assert coded < 1.1 * entropy
        assert coded < most
        packed = 8 * encode_moves(old, new, coder="packed", epoch=0).numel() / old.numel()
        assert coded < packed < coded + 3


def entropy_bits(symbols):
    shares = np.unique(symbols, return_counts=True)[1] / symbols.size
    return float(-(shares * np.log2(shares)).sum())


def refused(record, held, field, epoch=EPOCH):
    assert f"field {field} is wrong" in refusal(record, held, epoch)


@pytest.mark.parametrize("coder", MOVES_CODERS)
def test_a_record_that_is_not_meant_is_refused(coder):
    old, new = adam_like(5000, torch.bfloat16)
    record = encode_moves(old, new, coder=coder, epoch=EPOCH)
    refused(record, old.clone(), "step", epoch=EPOCH + 1)
    refused(record, old[:-1].clone(), "numel")
    refused(record, old.half(), "dtype")
    refused(record[:40].clone(), old.clone(), "size")
    refused(record[:-16].clone(), old.clone(), "payload_bytes")
    refused(record[:-1].clone(), old.clone(), "size")


@pytest.mark.parametrize("coder", MOVES_CODERS)
def test_every_damaged_byte_is_noticed(coder):
    """One byte at a time, the checksum of the header repaired or not."""
    old, new = adam_like(700, torch.bfloat16)
    record = encode_moves(old, new, coder=coder, epoch=EPOCH)
    for at in range(record.numel()):
        damaged = record.clone()
        damaged[at] ^= 0x41
        refusal(damaged, old)
        checked = torch.tensor(list(sealed(damaged.numpy().tobytes())), dtype=torch.uint8)
        if not torch.equal(checked, record):
            refusal(checked, old)


@pytest.mark.parametrize(
    ("coder", "at", "value", "field"),
    [
        ("rans", 52, b"\2\0\0\0", "chunks"),
        ("rans", 56, b"\xff\xff\xff\xff", "size"),
        ("rans", 56, b"\0\0\0\0", "frequency table"),
        ("rans", 61, b"\1", "zeros of the sub-header"),
        ("rans", 64, b"\1\0\0\0", "chunk offsets"),
        ("rans", 68, b"\xff\xff\xff\xff", "chunk offsets"),
        ("rans", 68, b"\1\0\0\0", "chunk offsets"),
        ("rans", 80, b"\xff", "frequency table"),
        ("packed", 52, b"\0\0\0\0", "chunks"),
        ("packed", 56, b"\1\0\0\0", "frequency table"),
        ("packed", 68, b"\0\0\0\0", "chunk offsets"),
        ("packed", 80, b"\x11", "chunk"),
        ("packed", 80, b"\0", "chunk"),
        ("raw", 52, b"\1\0\0\0", "chunks"),
        ("raw", 56, b"\1\0\0\0", "frequency table"),
    ],
)
def test_a_damaged_field_is_named(coder, at, value, field):
    """Checksums are right, so that the field itself must be looked at."""
    old, new = adam_like(5000, torch.bfloat16)
    refused(written(encode_moves(old, new, coder=coder, epoch=EPOCH), at, value), old, field)


@pytest.mark.parametrize("words", [slice(-16, None), slice(-200, -184)])
def test_a_rans_chunk_that_does_not_end_where_it_began_is_refused(words):
    old, new = adam_like(70000, torch.bfloat16)
    record = bytearray(encode_moves(old, new, coder="rans", epoch=EPOCH).numpy().tobytes())
    record[words] = bytes(255 - byte for byte in record[words])
    refused(repaired(record), old, "chunk")


def test_another_old_number_is_noticed_by_rans():
    """Where ranks do not hold the same, contexts differ, and the states end elsewhere."""
    old, new = adam_like(5000, torch.bfloat16)
    record = encode_moves(old, new, coder="rans", epoch=EPOCH)
    refused(record, old * 4, "chunk")


def test_arguments_that_do_not_fit_are_refused():
    old = torch.zeros(4, dtype=torch.bfloat16)
    for arguments, match in (
        ((old, torch.zeros(5, dtype=torch.bfloat16)), "length"),
        ((old, torch.zeros(4)), "dtype"),
        ((old.double(), old.double()), "dtype"),
        ((old[::2], old[::2]), "shape"),
        ((old.view(2, 2), old.view(2, 2)), "shape"),
        ((old.to("meta"), old.to("meta")), "wrong device"),
    ):
        with pytest.raises(ExtensionError, match=match):
            encode_moves(*arguments, coder="rans", epoch=0)
    with pytest.raises(ExtensionError, match="coder of moves is unknown"):
        encode_moves(old, old, coder="zip", epoch=0)
    with pytest.raises(ExtensionError, match="this is no record"):
        decode_moves_(old, old, epoch=0)
