"""Records of moves on CUDA tensors: the bytes, the numbers and the errors of the CPU's codec.

The same tests run on a GPU, if there is one, and in the emulator.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from megatron_sparse.errors import ExtensionError, WireFormatError
from megatron_sparse.formats.moves import decode_moves_, encode_moves
from megatron_sparse.wire import MOVES_CODERS
from tests.cuda_emulator.device import Place
from tests.cuda_emulator.emulator import IN_ORDER, RANDOM, REVERSED, Emulator
from tests.cuda_emulator.ledger import Ledger, counting
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

NUMELS = [0, 1, 31, 33, 255, 257, 5000]
CODED = ("rans", "packed")
PACKED_CHUNK, RANS_CHUNK = 8192, 16384


def check(place: Place, old: torch.Tensor, new: torch.Tensor, coder: str, shift: int = 0) -> None:
    """The record is the CPU's, and turns the old numbers into the new ones."""
    wanted = encode_moves(old, new, coder=coder, epoch=EPOCH).numpy().tobytes()
    moves_cases.check(old, new, coder, wanted, place, shift)


@pytest.mark.parametrize("coder", MOVES_CODERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", NUMELS)
def test_records_are_the_cpus(place: Place, numel: int, dtype: torch.dtype, coder: str) -> None:
    for shift, make in enumerate((adam_like, any_bits, mixed)):
        check(place, *make(numel, dtype), coder, shift)


@pytest.mark.parametrize("coder", CODED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_denormals_nan_both_zeros_and_nothing_at_all(
    place: Place, dtype: torch.dtype, coder: str
) -> None:
    least = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}[dtype]
    special = torch.tensor(
        [least, -least, 0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0, -1.0]
    )
    old = special.repeat(300).to(dtype)
    for new in (old.roll(1), -old, old, torch.zeros_like(old)):
        check(place, old, new, coder)
    check(place, torch.zeros_like(old), torch.zeros_like(old), coder)


@pytest.mark.parametrize("coder", CODED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_raw_and_coded_chunks_in_one_record(place: Place, dtype: torch.dtype, coder: str) -> None:
    """Of a packed record also the edges of chunks."""
    chunk = PACKED_CHUNK if coder == "packed" else RANS_CHUNK
    for numel in (chunk, chunk + 777, 2 * chunk + 1) if coder == "packed" else (chunk + 777,):
        old, new = adam_like(numel, dtype)
        wild = slice(0, chunk)
        old[wild], new[wild] = any_bits(chunk, dtype)
        check(place, old, new, coder, 1)
        check(place, *adam_like(numel, dtype), coder)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_widths_of_every_learning_rate(place: Place, dtype: torch.dtype) -> None:
    """Wider tiles than a byte of planes, and lists of escapes that more than one byte decides."""
    for lr in (0.0, 1e-3, 1e-2, 0.1, 1.0):
        check(place, *adam_like(1500, dtype, lr), "packed")


def test_every_bfloat16_moves_to_every_distance(place: Place) -> None:
    old, moved, next_to = every_bfloat16()
    check(place, old, moved, "packed")
    check(place, old, next_to, "rans")


def test_of_many_numbers_a_part_is_counted(place: Place) -> None:
    """Moves that no counted block has can be coded all the same."""
    check(place, *of_which_a_part_is_counted(), "rans")


@pytest.mark.parametrize("order", [IN_ORDER, REVERSED, RANDOM])
def test_schedules_do_not_change_the_bytes(emulated_gpu, emulator: Emulator, order: int) -> None:
    """More chunks than resident blocks, so that blocks wait for each other's sizes."""
    emulator.schedule(order, 11, resident_blocks=3, multiprocessors=1)
    old, new = mixed(6 * PACKED_CHUNK + 100, torch.bfloat16)
    check(emulated_gpu.place, old, new, "packed")
    check(emulated_gpu.place, *mixed(RANS_CHUNK + 100, torch.float16), "rans")


@pytest.mark.parametrize(
    ("coder", "encode", "decode"), [("raw", 1, 2), ("packed", 2, 2), ("rans", 6, 3)]
)
def test_launches(emulated_gpu, coder: str, encode: int, decode: int) -> None:
    """Kernels, and one memset in each call; docs/device-work.md states them."""
    old, new = (emulated_gpu.place(each) for each in adam_like(5000, torch.bfloat16))
    encoding, decoding = Ledger(), Ledger()
    with counting(encoding):
        record = encode_moves(old, new, coder=coder, epoch=EPOCH)
    with counting(decoding):
        decode_moves_(record, old, epoch=EPOCH)
    assert (encoding.kernels, decoding.kernels) == (encode, decode)


def same_refusal(place: Place, record: torch.Tensor, held: torch.Tensor, epoch: int = EPOCH) -> str:
    wanted = refusal(record, held, epoch)
    assert refusal(place(record), place(held), epoch) == wanted
    return wanted


@pytest.mark.parametrize("coder", MOVES_CODERS)
def test_every_damaged_word_has_the_cpus_error(place: Place, coder: str) -> None:
    """With right checksums, so that the fields themselves must be looked at; and without."""
    old, new = adam_like(300, torch.bfloat16)
    record = encode_moves(old, new, coder=coder, epoch=EPOCH)
    fields = set()
    for at in [*range(48, 80), *range(80, record.numel(), 41)]:
        damaged = record.clone()
        damaged[at] ^= 0x41
        fields.add(same_refusal(place, damaged, old).split(" is ")[0])
        mended = repaired(damaged.numpy().tobytes())
        try:
            decode_moves_(mended, old.clone(), epoch=EPOCH)
        except WireFormatError:
            fields.add(same_refusal(place, mended, old).split(" is ")[0])
            continue
        # Another record, which is right: the same numbers on both.
        other, got = old.clone(), place(old)
        decode_moves_(mended, other, epoch=EPOCH)
        decode_moves_(place(mended), got, epoch=EPOCH)
        assert np.array_equal(bits(got.cpu()), bits(other))
    assert any("payload checksum" in field for field in fields)
    if coder == "rans":
        for name in ("chunks", "frequency table", "chunk offsets", "zeros of", "size"):
            assert any(name in field for field in fields), name


@pytest.mark.parametrize("coder", MOVES_CODERS)
def test_records_that_are_not_meant(place: Place, coder: str) -> None:
    old, new = adam_like(5000, torch.bfloat16)
    record = encode_moves(old, new, coder=coder, epoch=EPOCH)
    assert "step" in same_refusal(place, record, old, EPOCH + 1)
    assert "numel" in same_refusal(place, record, old[:-1].clone())
    assert "dtype" in same_refusal(place, record, old.half())
    for cut in (40, 48, record.numel() - 16, record.numel() - 1):
        same_refusal(place, record[:cut].clone(), old)


@pytest.mark.parametrize(
    ("coder", "at", "value"),
    [
        ("rans", 56, b"\0\0\0\0"),  # no table
        ("rans", 56, b"\xff\xff\xff\xff"),
        ("rans", 64, b"\1\0\0\0"),  # offsets
        ("rans", 68, b"\xff\xff\xff\xff"),
        ("rans", 72, b"\0\0\0\0"),
        ("rans", 80, b"\xff"),  # frequencies of the first context
        ("rans", 95, b"\x30"),  # of the last one
        ("packed", 56, b"\1\0\0\0"),
        ("packed", 68, b"\1\0\0\0"),
        ("packed", 96, b"\x11"),  # a width beyond the numbers'
        ("packed", 96, b"\0"),
        ("packed", 130, b"\xff"),  # a number of escapes
    ],
)
def test_damaged_fields_of_several_chunks(place: Place, coder: str, at: int, value: bytes) -> None:
    chunk = PACKED_CHUNK if coder == "packed" else RANS_CHUNK
    old, new = adam_like(chunk + 500, torch.bfloat16)
    same_refusal(place, written(encode_moves(old, new, coder=coder, epoch=EPOCH), at, value), old)


def test_the_first_damaged_chunk_is_named(place: Place) -> None:
    """Two rans chunks do not end where they must; an earlier fault outweighs both."""
    old, new = adam_like(3 * RANS_CHUNK, torch.bfloat16)
    clean = encode_moves(old, new, coder="rans", epoch=EPOCH).numpy().tobytes()
    record = bytearray(clean)
    offsets = struct.unpack_from("<4I", record, 64)
    table = struct.unpack_from("<I", record, 56)[0]
    data = 64 + 16 + -(-table // 16) * 16
    for chunk in (1, 2):
        at = data + 16 * offsets[chunk] + 200
        record[at : at + 40] = bytes(255 - byte for byte in record[at : at + 40])
    if len(offsets) == 4:
        data += 16  # five offsets, padded
    assert "damage at 1" in same_refusal(place, repaired(record), old)


def test_a_position_that_stands_twice_in_a_packed_tile(place: Place) -> None:
    """A right checksum and sizes: both decode it alike, without a write outside."""
    old, new = any_bits(256, torch.float32)
    new[:200] = old[:200]
    record = encode_moves(old, new, coder="packed", epoch=EPOCH)
    damaged = bytearray(record.numpy().tobytes())
    escapes = damaged[64 + 16 + 1]
    assert escapes > 2
    end = len(damaged.rstrip(b"\0"))
    damaged[end - 2] = damaged[end - 1]
    held, got = old.clone(), place(old)
    decode_moves_(repaired(damaged), held, epoch=EPOCH)
    decode_moves_(place(repaired(damaged)), got, epoch=EPOCH)
    assert np.array_equal(bits(got.cpu()), bits(held))


def test_a_record_at_any_address(place: Place) -> None:
    old, new = adam_like(3001, torch.bfloat16)
    for coder in MOVES_CODERS:
        record, held = encode_moves(old, new, coder=coder, epoch=EPOCH), place(old, 1)
        decode_moves_(place(record, 3), held, epoch=EPOCH)
        assert torch.equal(held.cpu(), new)


def test_tensors_of_two_devices_are_refused(place: Place) -> None:
    old, new = adam_like(100, torch.bfloat16)
    with pytest.raises(ExtensionError, match="old is on the wrong device"):
        encode_moves(old, place(new), coder="rans", epoch=EPOCH)
    record = encode_moves(old, new, coder="rans", epoch=EPOCH)
    with pytest.raises(ExtensionError, match="record is on the wrong device"):
        decode_moves_(record, place(old), epoch=EPOCH)
