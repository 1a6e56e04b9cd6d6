"""Sealed records on CUDA: the oracle's bytes, the CPU's errors."""

import random
from dataclasses import replace

import pytest
import torch

from megatron_sparse.cuda_ext.checksum_ops import payload_sums
from megatron_sparse.errors import WireFormatError
from megatron_sparse.formats import hash_bitmap
from megatron_sparse.formats.hash_partition import PermutationHash
from tests.codec import CPU, Case, Ops, check, segments_of
from tests.cuda_emulator.device import Place
from tests.cuda_ext import cases
from tests.formats.hash_cases import place_of
from tests.formats.test_checksum import SPECS, case_of


@pytest.mark.parametrize("name", SPECS)
def test_the_oracles_bytes_and_the_errors_of_the_cpu(place: Place, name: str) -> None:
    case, device = case_of(name), Ops("CUDA", place)
    good = check(case, device).bytes
    if "blocks" not in name:
        check(case.with_slots(), device)
    for bit in random.Random(1).sample(range(8 * len(good)), 20):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        texts = []
        for codec in (CPU[-1], device):
            with pytest.raises(WireFormatError) as caught:
                codec.decode_(torch.zeros(case.numel), bytes(bad), case.expected())
            texts.append(str(caught.value))
        assert texts[0] == texts[1], bit


def test_many_records_and_large_ones(place: Place) -> None:
    """More records than rows of the grid; one that several blocks share, and empty ones."""
    offsets = torch.tensor([*range(0, 900, 9), 900, *range(150_000, 150_100)])
    values_N = cases.scattered_grad(int(offsets[-1]), 0.3, torch.float32)
    spec = replace(SPECS["coo"], value_dtype=0, checksum=True)
    case = Case(values_N, segments_of(offsets), spec)
    for given in (case, case.with_slots()):
        message = torch.tensor(list(check(given, Ops("CUDA", place)).message(given)))
        message, records = message.to(torch.uint8), offsets.numel() - 1
        wanted = payload_sums([message] * 2, records, given.segments.slots)
        slots = None if given.segments.slots is None else place(given.segments.slots)
        assert torch.equal(payload_sums([place(message)] * 2, records, slots).cpu(), wanted)
        message[24:32] = 255
        wanted = payload_sums([message], records, given.segments.slots)
        assert torch.equal(payload_sums([place(message)], records, slots).cpu(), wanted)


def test_a_record_of_a_partition(place: Place) -> None:
    where = replace(place_of(PermutationHash(4000, 2, 3), 0), checksum=True)
    values_P = cases.scattered_grad(2000, 0.05, torch.float32)
    record, wanted = hash_bitmap.encode(place(values_P), where), hash_bitmap.encode(values_P, where)
    assert torch.equal(record.cpu(), wanted)
    record[400] ^= 1
    with pytest.raises(WireFormatError, match="rank 6: field checksum"):
        hash_bitmap.decode_add_(place(torch.ones(4000)), record, where, rank=6)
