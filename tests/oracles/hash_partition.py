"""The partition hash and Algorithm 1 in Python integers and lists: the oracles.

`cuda_ext/csrc/hash_partition.h` defines the hash; this page repeats it.
"""

import torch

from megatron_sparse.triton_kernels.counter_hash import counter_hash, hash_seed

DRAW_ROUND, DRAW_SLOT = 16, 32
ROUNDS = 4


def permute(element: int, numel: int, seed: int) -> int:
    """The position of an element under the keyed permutation of [0, numel).

    The rounds permute the numbers of `bits` bits. A result of numel or more is permuted again until
    one is below numel, which makes this a permutation of [0, numel). Every step can be undone.
    """
    bits = max((numel - 1).bit_length(), 1)
    mask, shift = 2**bits - 1, (bits + 1) // 2
    x = element
    while True:
        for number in range(ROUNDS):
            key, word = hash_seed(seed, DRAW_ROUND + number)
            x = (x ^ key) * (word | 1) & mask  # an odd factor has an inverse
            x ^= x >> shift
        if x < numel:
            return x


def partition_of(element: int, numel: int, partitions: int, seed: int) -> int:
    """The partition of an element: equal blocks of the permutation."""
    return permute(element, numel, seed) * partitions // numel


def hierarchical_hash(
    indices: list[int],
    partition: list[int],
    partitions: int,
    parallel_slots: int,
    serial_slots: int,
    rehashes: int,
    seed: int,
) -> tuple[list[list[int]], int, int]:
    """Groups entries by partition with Algorithm 1, one entry after the other.

    An entry takes the first free one of `rehashes` (k) hashed slots, of `parallel_slots` (r1) in
    each partition, or else the next of `serial_slots` (r2).

    Returns the entry numbers of each partition, sorted by index; how many of them went through the
    serial memory, and how many beyond its r2 slots.
    """
    memory: list[list[int | None]] = [
        [None] * (parallel_slots + serial_slots) for _ in range(partitions)
    ]
    next_serial = [parallel_slots] * partitions
    grown = 0
    for entry, (index, p) in enumerate(zip(indices, partition, strict=True)):
        for trial in range(rehashes + 1):
            if trial == rehashes:  # all hashed slots were taken
                slot = next_serial[p]
                next_serial[p] += 1
                if slot == len(memory[p]):
                    memory[p].append(None)
                    grown += 1
            else:
                word = int(counter_hash(seed, DRAW_SLOT + trial, torch.tensor(index)))
                slot = word * parallel_slots >> 32  # scales 32 bits to [0, parallel_slots)
            if memory[p][slot] is None:
                memory[p][slot] = entry
                break
    extracted = []
    for slots in memory:
        held = [entry for entry in slots if entry is not None]
        extracted.append(sorted(held, key=lambda entry: (indices[entry], entry)))
    return extracted, sum(next_serial) - partitions * parallel_slots, grown
