"""Records of moves on CUDA tensors: the bytes, the numbers and the errors of the CPU's codec.

The same tests run on a GPU, if there is one, and in the emulator; those of the CPU's codec too.
"""

import struct

import pytest
import torch

from megatron_sparse.errors import ExtensionError
from megatron_sparse.formats.moves import decode_moves_, encode_moves
from megatron_sparse.reference.moves import RANS_CHUNK
from megatron_sparse.wire import MOVES_CODERS
from tests.cuda_emulator.device import Place
from tests.cuda_emulator.emulator import IN_ORDER, RANDOM, REVERSED, Emulator
from tests.formats.moves_cases import EPOCH, adam_like, mixed, record_as, repaired
from tests.formats.test_moves import (  # noqa: F401 - the tests run here too, with this `place`
    check,
    refused,
    test_a_damaged_field_is_named,
    test_a_record_at_any_address,
    test_a_record_that_is_not_meant_is_refused,
    test_bytes_are_the_oracles,
    test_denormals_nan_both_zeros_and_nothing_at_all,
    test_every_bfloat16_moves_to_every_distance,
    test_every_learning_rate,
    test_many_records_in_one_call,
    test_of_many_numbers_a_part_is_counted,
    test_of_many_records_only_the_damaged_one_is_named,
    test_raw_and_coded_chunks_in_one_record,
)


@pytest.mark.parametrize("order", [IN_ORDER, REVERSED, RANDOM])
def test_schedules_do_not_change_the_bytes(emulated_gpu, emulator: Emulator, order: int) -> None:
    """More chunks than resident blocks, so that blocks wait for each other's sizes."""
    emulator.schedule(order, 11, resident_blocks=3, multiprocessors=1)
    check(emulated_gpu.place, *mixed(4 * RANS_CHUNK + 100, torch.bfloat16))
    check(emulated_gpu.place, *mixed(RANS_CHUNK + 100, torch.float16))


@pytest.mark.parametrize("coder", MOVES_CODERS)
def test_a_wrong_checksum_has_the_cpus_error(place: Place, coder: str) -> None:
    record, old = record_as(coder, 300)
    for at in (48, -1):
        damaged = record.clone()
        damaged[at] ^= 0x41
        refused(place, damaged, old, "payload checksum")


def test_the_first_damaged_chunk_is_named(place: Place) -> None:
    """Two rans chunks do not end where they must; an earlier fault outweighs both."""
    old, new = adam_like(3 * RANS_CHUNK, torch.bfloat16)
    clean = encode_moves(old, new, epoch=EPOCH).numpy().tobytes()
    record = bytearray(clean)
    offsets = struct.unpack_from("<4I", record, 64)
    table = struct.unpack_from("<I", record, 56)[0]
    data = 64 + 16 + -(-table // 16) * 16
    for chunk in (1, 2):
        at = data + 16 * offsets[chunk] + 200
        record[at : at + 40] = bytes(255 - byte for byte in record[at : at + 40])
    assert "damage at 1" in refused(place, repaired(record), old, "chunk")


def test_tensors_of_two_devices_are_refused(place: Place) -> None:
    old, new = adam_like(100, torch.bfloat16)
    with pytest.raises(ExtensionError, match="old is on the wrong device"):
        encode_moves(old, place(new), epoch=EPOCH)
    record = encode_moves(old, new, epoch=EPOCH)
    with pytest.raises(ExtensionError, match="record is on the wrong device"):
        decode_moves_([record], [place(old)], epoch=EPOCH)
