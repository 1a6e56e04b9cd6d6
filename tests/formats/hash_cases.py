"""Where records of hash partitions lie in the tests."""

import torch

from megatron_sparse.formats.hash_partition import PermutationHash
from megatron_sparse.formats.hash_record import PartitionRecord

OFFSET, STEP = 4096, 2**32 + 5
H = PermutationHash(1000, 3, 11)
"""The hash of wrong records; partition 1 has 333 positions."""


def place_of(h, partition, dtype=torch.float32):
    return PartitionRecord(h, partition, dtype, OFFSET, STEP)
