"""Typed ops for ZEN, a sparse all-reduce that hashes a segment's elements into n partitions.

A keyed permutation moves the elements; equal blocks of the permuted positions are the partitions,
each summed up by one rank. An entry is a non-zero element: its index and value. A hash bitmap has a
bit for each position of a partition. Shape suffixes: K entries, P positions of a partition, M
elements of a segment (below 2^31). All tensors of a call are 1-D, contiguous and on one device, and
so are its results. These are the same on every device and do not depend on the threads. A seed is
any int64. Every wrapper raises `ExtensionError` for arguments that do not fit together. On CUDA
every call except `split` waits once for the device: to read whether any value was out of range or,
in `bitmap_pack`, how many values are not zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_sparse.cuda_ext.arguments import GRAD_DTYPES, call, check_flat

BITMAP_FIELDS = ("", "nnz", "bitmap")
"""The field codes of a bitmap's status (`csrc/hash_launch.h`); "" is for one that fits."""
_PERMUTE, _UNPERMUTE, _PARTITION = range(3)  # `HashMap` of csrc/hash_launch.h


@dataclass(frozen=True, slots=True)
class HashMemory:
    """Sizes of ZEN's hash memory (Algorithm 1), in which each partition collects its entries.

    Attributes:
        parallel_slots: r1, at least 1: slots of a partition that the hashes h_1 to h_k choose from.
        serial_slots: r2: slots of a partition for entries that find all k taken; grows if needed.
        rehashes: k, how many hashes an entry tries, 1 to 64.
        seed: of h_1 to h_k; may differ between ranks.
    """

    parallel_slots: int
    serial_slots: int
    rehashes: int
    seed: int


class BitmapPlace(NamedTuple):
    """Which elements the bits of a hash bitmap stand for.

    Attributes:
        partition: the partition whose positions the bits are.
        partitions: how many there are.
        seed: of the permutation.
        permuted: False if bit i is element i: there is one partition, and no permutation.
    """

    partition: int
    partitions: int
    seed: int
    permuted: bool = True


def permute(elements_K: torch.Tensor, numel: int, seed: int) -> torch.Tensor:
    """The positions of elements under the keyed permutation of [0, numel).

    Args:
        elements_K: int64, in [0, numel).
        numel: below 2^31.
        seed: of the permutation; the same on all ranks.

    Returns:
        int64, in [0, numel). `unpermute` undoes it.
    """
    return call("hash_map", elements_K, numel, 1, seed, _PERMUTE)  # 1: one partition


def unpermute(positions_K: torch.Tensor, numel: int, seed: int) -> torch.Tensor:
    """The elements at positions of the keyed permutation; `permute` undoes it."""
    return call("hash_map", positions_K, numel, 1, seed, _UNPERMUTE)


def partition_of(elements_K: torch.Tensor, numel: int, partitions: int, seed: int) -> torch.Tensor:
    """The number of the partition to which each element belongs.

    Args:
        elements_K: int64, in [0, numel).
        numel: below 2^31.
        partitions: 1 to 2^16.
        seed: the same on all ranks.

    Returns:
        int64, in [0, partitions).
    """
    return call("hash_map", elements_K, numel, partitions, seed, _PARTITION)


def hierarchical_hash(
    indices_K: torch.Tensor,
    values_K: torch.Tensor,
    partition_K: torch.Tensor,
    numel: int,
    partitions: int,
    memory: HashMemory,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """ZEN's Algorithm 1: groups entries by partition through a hash memory; loses none.

    Time O(K rehashes + partitions (r1 + r2) + K log K), memory 4 partitions (r1 + r2) + 8 K bytes.

    Args:
        indices_K: int64, in [0, numel); repeated ones are all kept.
        values_K: fp32, bf16 or fp16; copied bit for bit.
        partition_K: int64, in [0, partitions).
        numel: elements of the segment, below 2^31.
        partitions: n, 1 to 2^16.
        memory: r1, r2 and k, and the seed of the hashes.

    Returns:
        Indices and values, partition by partition, each in ascending order of the index (then of
        the entry's number); n + 1 int64 offsets of the partitions in them; and two int64 counts:
        entries that took a serial slot, and those that took one beyond r2. Only the counts may vary
        from run to run: they depend on which thread was first.
    """
    memory_arguments = (memory.parallel_slots, memory.serial_slots, memory.rehashes, memory.seed)
    # The native op is not given the values (it returns entry numbers), so they are checked here.
    entries, device = indices_K.numel(), indices_K.device
    check_flat("hierarchical_hash", "values", values_K, GRAD_DTYPES, entries, device)
    entry_K, offsets, counts = call(
        "hash_memory", indices_K, partition_K, numel, partitions, *memory_arguments
    )
    if indices_K.is_cuda:  # the CPU op returns them sorted by index
        entry_K = _by_index(entry_K, indices_K, offsets)
    return indices_K[entry_K], values_K[entry_K], offsets, counts


def _by_index(
    entry_K: torch.Tensor, indices_K: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Sorts the entries of each partition by index, then by entry number.

    `entry_K`: entry numbers, partition after partition, in any order within one; `offsets`: where
    partitions begin in it, and the last one ends. `indices_K`: each entry's index, below 2^31.
    """
    # First all entries by one key: index in the upper half, entry number in the lower half ...
    order_K = (indices_K[entry_K] << 32 | entry_K).argsort()
    # ... then by partition, which follows from the place in `entry_K`; this sort is stable.
    partition_K = torch.bucketize(order_K, offsets[1:-1], right=True)
    return entry_K[order_K[partition_K.argsort(stable=True)]]


def split(partition_K: torch.Tensor, partitions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups entries by partition with one stable sort.

    Args:
        partition_K: int64, in [0, partitions).
        partitions: n, 1 to 2^16.

    Returns:
        int64 entry numbers, partition after partition, ascending in each; and the n + 1 int64
        offsets of the partitions in them.
    """
    # torch sorts narrow integers in a third of the time of wide ones.
    keys_K = partition_K.to(torch.uint8) if partitions <= 256 else partition_K
    ordered = torch.sort(keys_K, stable=True)
    numbers = torch.arange(partitions + 1, device=partition_K.device)
    # Partition p begins at the first entry whose partition is at least p.
    return ordered.indices, torch.searchsorted(ordered.values.long(), numbers)


def bitmap_pack(values_P: torch.Tensor, words: torch.Tensor, packed: torch.Tensor) -> int:
    """Writes a bitmap of the values that are not zero, and packs these values.

    `-0.0` counts as zero; NaN and denormals do not.

    Args:
        values_P: fp32, bf16 or fp16. Only read.
        words: uint8, 8 ceil(P / 64) bytes; bits beyond P become zero. Mutated.
        packed: uint8, room for all P values; receives nnz values, the rest is undefined. Mutated.

    Returns:
        nnz, the number of values that are not zero.
    """
    return int(call("hash_bitmap_pack", values_P, words, packed))


def bitmap_add_(
    acc_M: torch.Tensor,
    words: torch.Tensor,
    values: torch.Tensor,
    value_dtype: int,
    nnz: int,
    place: BitmapPlace,
) -> tuple[str, int]:
    """Adds the values of a bitmap to their elements of a segment, without listing the indices.

    Args:
        acc_M: fp32, the whole segment. Mutated only if the bitmap is right.
        words: the bitmap: uint8, 8 ceil(P / 64) bytes, not trusted.
        values: uint8, the nnz values in the order of the bits.
        value_dtype: dtype code of the values.
        nnz: how many bits must be set.
        place: which elements the bits stand for.

    Returns:
        The name of the wrong field ("" if none), and a number for the error: for "nnz" how many
        bits are set; for "bitmap", where a bit is beyond the partition, the partition's size.
    """
    status = call("hash_bitmap_add_", acc_M, words, values, value_dtype, nnz, *place)
    code, found = status.tolist()
    return BITMAP_FIELDS[code], found
