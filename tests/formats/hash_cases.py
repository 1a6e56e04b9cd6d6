"""Where records of hash partitions lie in the tests, and records of a faulty sender."""

from __future__ import annotations

import struct
import zlib

import torch

from megatron_sparse.formats.hash_partition import PermutationHash
from megatron_sparse.formats.hash_record import PartitionRecord

OFFSET, STEP = 4096, 2**32 + 5
H = PermutationHash(1000, 3, 11)
"""The hash of wrong records; partition 1 has 333 positions."""


def place_of(h, partition, dtype=torch.float32):
    return PartitionRecord(h, partition, dtype, OFFSET, STEP)


def forged(record, at, form, *values):
    """The record with fields replaced and a valid checksum."""
    data = bytearray(record.numpy().tobytes())
    struct.pack_into(form, data, at, *values)
    struct.pack_into("<I", data, 44, zlib.crc32(data[:44]))
    return torch.frombuffer(data, dtype=torch.uint8)
