"""Records of moves: the compiled codec against the oracle, byte for byte, and damaged records.

Tests that take a `place` run on every instruction set of the CPU and, imported by
`tests/cuda_emulator/test_moves_emulated.py`, with tensors on a GPU.
"""

from functools import cache

import numpy as np
import pytest
import torch

from megatron_sparse.errors import ExtensionError, WireFormatError
from megatron_sparse.formats.moves import (
    decode_moves_,
    down_words,
    encode_moves,
    keep_moves_,
    most_bytes,
)
from megatron_sparse.reference import moves as oracle
from megatron_sparse.wire import MOVES_CODERS
from tests.codec import on_threads
from tests.cuda_ext import cases
from tests.damage import sealed
from tests.formats import moves_cases
from tests.formats.moves_cases import (
    DTYPES,
    EPOCH,
    adam_like,
    any_bits,
    bits,
    every_bfloat16,
    last_directions,
    mixed,
    of_which_a_part_is_counted,
    record_as,
    refusal,
    repaired,
    written,
)

NUMELS = [0, 1, 31, 32, 33, 255, 257, 4096, 16384 + 300]


@cache
def oracle_record(old, new, dtype, mirrored=False):
    """Of bytes. The same for all instruction sets."""
    old_bits, new_bits = (np.frombuffer(data, f"<u{DTYPES[dtype].itemsize}") for data in (old, new))
    down = last_directions(old_bits.size) if mirrored else None
    return oracle.encode(old_bits, new_bits, dtype, EPOCH, down)


def check(place, old, new, shift=0):
    wanted = oracle_record(bits(old).tobytes(), bits(new).tobytes(), DTYPES.index(old.dtype), True)
    moves_cases.check(old, new, wanted, place, shift)
    assert len(wanted) <= most_bytes(old.numel(), old.dtype)


dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
coders = pytest.mark.parametrize("coder", MOVES_CODERS)


@dtypes
@pytest.mark.parametrize("numel", NUMELS)
def test_bytes_are_the_oracles(place, numel, dtype):
    for shift, make in enumerate((adam_like, any_bits, mixed) if numel < 5000 else (adam_like,)):
        check(place, *make(numel, dtype), shift)


@dtypes
def test_denormals_nan_both_zeros_and_nothing_at_all(place, dtype):
    least = cases.SMALLEST[dtype]
    special = torch.tensor(
        [least, -least, 0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0, -1.0]
    )
    old = special.repeat(300).to(dtype)
    for new in (old.roll(1), -old, old, torch.zeros_like(old)):
        check(place, old, new)
    check(place, torch.zeros_like(old), torch.zeros_like(old))


@dtypes
def test_raw_and_coded_chunks_in_one_record(place, dtype):
    chunk = oracle.RANS_CHUNK
    old, new = adam_like(chunk + 777, dtype)
    wild = slice(0, chunk)
    old[wild], new[wild] = any_bits(chunk, dtype)
    check(place, old, new, 1)


@dtypes
def test_all_kinds_of_chunks_in_one_record(place, dtype):
    """Some chunks are raw, some coded; numbers that do not move cost nothing."""
    check(place, *mixed(65536 + 777, dtype))


def test_of_many_numbers_a_part_is_counted(place):
    """Moves that no counted block has can be coded all the same."""
    check(place, *of_which_a_part_is_counted())


@dtypes
def test_every_learning_rate(place, dtype):
    for lr in (0.0, 1e-5, 1e-3, 1e-2, 0.1, 0.3, 1.0):
        check(place, *adam_like(1500, dtype, lr))


def test_every_bfloat16_moves_to_every_distance(place):
    old, moved, next_to = every_bfloat16()
    check(place, old, moved)
    check(place, old, next_to)


def test_a_record_at_any_address(place):
    for make in (adam_like, any_bits):
        old, new = make(3001, torch.bfloat16)
        record, held = encode_moves(old, new, epoch=EPOCH), place(old, 1)
        decode_moves_([place(record, 3)], [held], epoch=EPOCH)
        assert np.array_equal(bits(held.cpu()), bits(new))


GATHERED = [(adam_like, 33), (any_bits, 300), (adam_like, 0), (mixed, 16384 + 300)]
"""Records of unlike sizes: coded, raw, empty, with raw and coded chunks."""


def gathered(place):
    """Old numbers on a device, new ones, and their records: 36, more than a launch takes."""
    pairs = [make(numel, torch.bfloat16) for make, numel in GATHERED]
    held = [place(old, 1) for _ in range(9) for old, _ in pairs]
    records = [oracle_record(*(bits(each).tobytes() for each in pair), 1) for pair in pairs] * 9
    made = [place(torch.tensor(list(each), dtype=torch.uint8)) for each in records]
    return held, [new for _, new in pairs] * 9, made


def test_many_records_in_one_call(place):
    held, new, records = gathered(place)
    decode_moves_(records, held, epoch=EPOCH)
    for given, wanted in zip(held, new, strict=True):
        assert np.array_equal(bits(given.cpu()), bits(wanted))


@pytest.mark.parametrize("at", [4, 52, -1])
def test_of_many_records_only_the_damaged_one_is_named(place, at):
    """A field of its header, of its sub-header, its payload; the first one leaves all unchanged."""
    held, new, records = gathered(place)
    before = [bits(each.cpu()).copy() for each in held]
    damaged = records[3].cpu().clone()
    damaged[at] ^= 1
    records[3] = place(damaged)
    with pytest.raises(WireFormatError, match="rank 3: field"):
        decode_moves_(records, held, epoch=EPOCH, ranks=range(len(records)))
    for rank, (given, old, wanted) in enumerate(zip(held, before, new, strict=True)):
        expected = old if at == 4 or rank == 3 else bits(wanted)
        assert np.array_equal(bits(given.cpu()), expected)


def test_threads_do_not_change_the_bytes():
    old, new = mixed(3 * 65536 + 777, torch.bfloat16)
    records = []
    for count in (1, 3):
        with on_threads(count):
            records.append(encode_moves(old, new, epoch=EPOCH))
            held = old.clone()
            decode_moves_(records[-1:], [held], epoch=EPOCH)
        assert np.array_equal(bits(held), bits(new))
    assert torch.equal(*records)


def test_bits_are_near_the_conditional_entropy():
    """Within 10 % of the entropy given the old exponent."""
    for lr, most in ((3e-5, 1.05), (1e-4, 1.85), (3e-4, 3.2)):
        old, new = adam_like(2_000_000, torch.bfloat16, lr)
        z = oracle.zigzag(bits(old).astype(np.int64), bits(new).astype(np.int64), 1)
        joint = oracle.exponents(bits(old).astype(np.int64), 1) << 16 | z
        entropy = entropy_bits(joint) - entropy_bits(joint >> 16)
        record = encode_moves(old, new, epoch=0)
        coded = 8 * record.numel() / old.numel()
        assert coded < 1.1 * entropy
        assert coded < most


def test_moves_in_one_direction_take_fewer_bits():
    """Steps as momentum makes them: each number moves where it moved before, or stays."""
    numel = 10**5
    held, update = torch.rand(numel).bfloat16(), torch.randn(numel) * 0.01
    down = torch.zeros(down_words(numel), dtype=torch.int32)
    for step in range(3):
        new = held + (update * torch.rand(numel)).bfloat16()
        size, size_of_any = (
            encode_moves(held, new, epoch=step, down=each).numel() for each in (down, None)
        )
        assert 8 * (size_of_any - size) >= (0.4 * numel if step else 0)
        keep_moves_(held, new, down)


def entropy_bits(symbols):
    shares = np.unique(symbols, return_counts=True)[1] / symbols.size
    return float(-(shares * np.log2(shares)).sum())


def refused(place, record, held, field, epoch=EPOCH):
    """With the error of the CPU, which names this field; returns its text."""
    text = refusal(record, held, epoch)
    assert f"field {field} is wrong" in text
    assert refusal(place(record), place(held), epoch) == text
    return text


@coders
def test_a_record_that_is_not_meant_is_refused(place, coder):
    record, old = record_as(coder, 5000)
    assert record[7] == MOVES_CODERS.index(coder)
    refused(place, record, old.clone(), "step", epoch=EPOCH + 1)
    refused(place, record, old[:-1].clone(), "numel")
    refused(place, record, old.half(), "dtype")
    for cut, field in ((40, "size"), (-16, "payload_bytes"), (-1, "size")):
        refused(place, record[:cut].clone(), old.clone(), field)
    with pytest.raises(WireFormatError, match="rank 5: field step"):
        decode_moves_([place(record)], [place(old)], epoch=0, ranks=[5])


@coders
def test_every_damaged_byte_is_noticed(coder):
    """One byte at a time, the checksum of the header repaired or not."""
    record, old = record_as(coder, 700)
    for at in range(record.numel()):
        damaged = record.clone()
        damaged[at] ^= 0x41
        refusal(damaged, old)
        checked = torch.tensor(list(sealed(damaged.numpy().tobytes())), dtype=torch.uint8)
        if not torch.equal(checked, record):
            refusal(checked, old)


DAMAGED_FIELDS = [
    # coder, numbers (some are several chunks), place, bytes, field
    ("rans", 5000, 52, b"\2\0\0\0", "chunks"),
    ("rans", 5000, 56, b"\xff\xff\xff\xff", "size"),
    ("rans", 5000, 56, b"\0\0\0\0", "frequency table"),
    ("rans", 5000, 61, b"\1", "zeros of the sub-header"),
    ("rans", 5000, 64, b"\1\0\0\0", "chunk offsets"),
    ("rans", 5000, 68, b"\xff\xff\xff\xff", "chunk offsets"),
    ("rans", 5000, 68, b"\1\0\0\0", "chunk offsets"),
    ("rans", 5000, 80, b"\xff", "frequency table"),
    ("rans", 5000, 7, b"\2", "flags"),
    ("raw", 5000, 52, b"\1\0\0\0", "chunks"),
    ("raw", 5000, 56, b"\1\0\0\0", "frequency table"),
    ("rans", 16_884, 68, b"\xff\xff\xff\xff", "chunk offsets"),
    ("rans", 16_884, 72, b"\0\0\0\0", "chunk offsets"),
    ("rans", 16_884, 95, b"\x30", "frequency table"),  # of the last one
]


@pytest.mark.parametrize(("coder", "numel", "at", "value", "field"), DAMAGED_FIELDS)
def test_a_damaged_field_is_named(place, coder, numel, at, value, field):
    """Checksums are right, so that the field itself must be looked at."""
    record, old = record_as(coder, numel)
    refused(place, written(record, at, value), old, field)


@pytest.mark.parametrize("words", [slice(-16, None), slice(-200, -184)])
def test_a_rans_chunk_that_does_not_end_where_it_began_is_refused(words):
    old, new = adam_like(70000, torch.bfloat16)
    record = bytearray(encode_moves(old, new, epoch=EPOCH).numpy().tobytes())
    record[words] = bytes(255 - byte for byte in record[words])
    refused(torch.clone, repaired(record), old, "chunk")


def test_another_old_number_is_noticed_by_rans():
    """Where ranks do not hold the same, contexts differ, and the states end elsewhere."""
    old, new = adam_like(5000, torch.bfloat16)
    record = encode_moves(old, new, epoch=EPOCH)
    refused(torch.clone, record, old * 4, "chunk")


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
            encode_moves(*arguments, epoch=0)
    with pytest.raises(ExtensionError, match="record has the wrong dtype"):
        decode_moves_([old], [old], epoch=0)
    record, none = encode_moves(old, old, epoch=0), torch.zeros(1, dtype=torch.int32)
    for down, match in ((torch.zeros(2, dtype=torch.int32), "length"), (none.float(), "dtype")):
        for refuse in (
            lambda down: encode_moves(old, old, epoch=0, down=down),
            lambda down: decode_moves_([record], [old], epoch=0, down=[down]),
            lambda down: keep_moves_(old, old, down),
        ):
            with pytest.raises(ExtensionError, match=f"down has the wrong {match}"):
                refuse(down)
    two = [old, old.half()]
    with pytest.raises(ExtensionError, match="held has the wrong dtype"):
        decode_moves_([encode_moves(each, each, epoch=0) for each in two], two, epoch=0)
