"""The ops of ZEN's hashing and of its hash bitmap, typed: what `formats` calls.

Shape suffixes: K entries, P positions of a partition, M elements of a segment (below 2^31). All
tensors of a call are 1-D, contiguous and on one device, and so are its results. Results are the
same on every device and depend neither on the size of torch's thread pool nor on a GPU's
scheduling. A seed is any int64. The compiled checks refuse arguments that do not fit together, so
every wrapper raises `ExtensionError` with the expected and the actual value. On CUDA every call
except `split` waits once for the device: to read whether any value was out of range or, in
`bitmap_pack`, how many values are not zero.
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
    """The hash memory of Algorithm 1.

    Attributes:
        parallel_slots: r1 of each partition, 1 and more.
        serial_slots: r2 of each partition; it grows to hold the entries that overflow it.
        rehashes: k, 1 to 64.
        seed: of h_1 to h_k; may differ between ranks.
    """

    parallel_slots: int
    serial_slots: int
    rehashes: int
    seed: int


class BitmapPlace(NamedTuple):
    """Which elements the bits of a hash bitmap stand for.

    Attributes:
        partition: whose bitmap it is.
        partitions: how many there are.
        seed: of the permutation.
        permuted: False: the positions are the elements, of the only partition.
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
        seed: names the permutation; the same on all ranks.

    Returns:
        int64, in [0, numel). `unpermute` undoes it.
    """
    return call("hash_map", elements_K, numel, 1, seed, _PERMUTE)


def unpermute(positions_K: torch.Tensor, numel: int, seed: int) -> torch.Tensor:
    """The elements at positions of the keyed permutation; `permute` undoes it."""
    return call("hash_map", positions_K, numel, 1, seed, _UNPERMUTE)


def partition_of(elements_K: torch.Tensor, numel: int, partitions: int, seed: int) -> torch.Tensor:
    """The partition of each element: equal blocks of the permutation.

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
    """Algorithm 1: sorts entries into partitions through a hash memory; nothing is lost.

    Time O(K rehashes + partitions (r1 + r2) + K log K), memory 4 partitions (r1 + r2) + 8 K bytes.

    Args:
        indices_K: int64, in [0, numel); repeated ones are all kept.
        values_K: fp32, bf16 or fp16; travel bit for bit.
        partition_K: int64, in [0, partitions).
        numel: elements of the segment, below 2^31.
        partitions: n, 1 to 2^16.
        memory: r1, r2 and k, and the seed of the hashes.

    Returns:
        The indices and values, partition by partition, each in ascending order of the index (then
        of the entry); int64 offsets of the partitions, n + 1 of them; and int64 counts of entries
        that went through the serial memory, and of those beyond it. The counts alone may vary from
        run to run: they depend on which thread was first.
    """
    slots = (memory.parallel_slots, memory.serial_slots, memory.rehashes, memory.seed)
    # The native memory cannot check values: only the entries' numbers go through it.
    entries, device = indices_K.numel(), indices_K.device
    check_flat("hierarchical_hash", "values", values_K, GRAD_DTYPES, entries, device)
    entry_K, offsets, counts = call(
        "hash_memory", indices_K, partition_K, numel, partitions, *slots
    )
    if indices_K.is_cuda:  # on the CPU they come in this order
        entry_K = _by_index(entry_K, indices_K, offsets)
    return indices_K[entry_K], values_K[entry_K], offsets, counts


def _by_index(
    entry_K: torch.Tensor, indices_K: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Entries of each partition in ascending order of the index, then of the entry.

    Args:
        entry_K: entries, partition after partition, in any order within one.
        indices_K: the index of each entry, below 2^31.
        offsets: where partitions begin in `entry_K`, and the last one ends.
    """
    # Places in `entry_K`, by index (upper half of the key) and entry (lower half) ...
    place_K = (indices_K[entry_K] << 32 | entry_K).argsort()
    # ... and then by partition, which keeps that order within each: the sort is stable.
    partition_K = torch.bucketize(place_K, offsets[1:-1], right=True)
    return entry_K[place_K[partition_K.argsort(stable=True)]]


def split(partition_K: torch.Tensor, partitions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts entries by partition; those of one partition keep their order.

    Args:
        partition_K: int64, in [0, partitions).
        partitions: n, 1 to 2^16.

    Returns:
        int64 entries, partition after partition, ascending in each; and int64 offsets of the
        partitions, n + 1 of them.
    """
    # torch sorts narrow integers in a third of the time of wide ones.
    keys_K = partition_K.to(torch.uint8) if partitions <= 256 else partition_K
    ordered = torch.sort(keys_K, stable=True)
    numbers = torch.arange(partitions + 1, device=partition_K.device)
    # A partition begins at the first entry that is not of a lower one.
    return ordered.indices, torch.searchsorted(ordered.values.long(), numbers)


def bitmap_pack(values_P: torch.Tensor, words: torch.Tensor, packed: torch.Tensor) -> int:
    """Writes which values are not zero (`-0.0` is, NaN and denormals are not), and those values.

    Args:
        values_P: fp32, bf16 or fp16. Only read.
        words: uint8, 8 ceil(P / 64) bytes; bits beyond P become zero. Mutated.
        packed: uint8, room for all P values; receives nnz values, the rest is undefined. Mutated.

    Returns:
        nnz.
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
    """Adds a bitmap's values to their elements, without materialising the indices.

    Args:
        acc_M: fp32, the whole segment. Mutated only if the bitmap fits.
        words: uint8, 8 ceil(P / 64) bytes, not trusted.
        values: uint8, nnz values.
        value_dtype: dtype code of the values.
        nnz: how many bits must be set.
        place: which elements the bits stand for.

    Returns:
        "" or the name of the field that is wrong; and what it was instead: the number of set bits
        for `nnz`, the partition's size for a bit beyond it in `bitmap`.
    """
    status = call("hash_bitmap_add_", acc_M, words, values, value_dtype, nnz, *place)
    code, found = status.tolist()
    return BITMAP_FIELDS[code], found
