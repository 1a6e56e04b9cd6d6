"""The parts of a long message, which ranks exchange one after the other.

A part is added to the sum while the next one is on its way. A layout is cut at all borders that
parts may have; how many parts there are is chosen when the ranks know the sizes of all messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from megatron_sparse.bucket import Bucket, CollectiveOp, Cuts, Layout
from megatron_sparse.collectives.records import CUTS, Cut, whole_cut
from megatron_sparse.formats.message import Message

MOST_PARTS = 4
PART_NUMEL = 1 << 20
"""Elements of a part, at least."""
PART_BYTES = 1 << 18
"""Bytes of a part of the longest message, at least: a round takes milliseconds beside its bytes."""
ALIGNMENT = 4096
"""Elements, of borders: a tile of the sparse formats, and whole pages of memory."""


def part_borders(bucket: Bucket) -> Cuts:
    """Where parts of a bucket's messages may begin: a power of two of them, at most n.

    On CUDA there is one: all messages come in one call, and are added in one. So it is in a
    reduce-scatter, where a rank's shard is a small part already.
    """
    if bucket.grad_N.is_cuda or bucket.op is CollectiveOp.REDUCE_SCATTER:
        return ()
    parts = most_parts(bucket.numel, bucket.world_size)
    return tuple(bucket.numel * k // parts // ALIGNMENT * ALIGNMENT for k in range(1, parts))


def most_parts(numel: int, ranks: int) -> int:
    """How many parts a bucket's messages may have on a CPU."""
    return _power_of_two(min(MOST_PARTS, ranks, numel // PART_NUMEL))


@lru_cache(CUTS)
def parts_at(layout: Layout, borders: Cuts) -> tuple[Cut, ...]:
    """The parts that begin at the borders; all of it, if no segments begin there.

    Example:
        >>> import torch
        >>> from megatron_sparse.bucket import ParameterSlice
        >>> p = [ParameterSlice("w", 0, 8)]
        >>> b = Bucket("0", torch.zeros(8), p, CollectiveOp.ALL_REDUCE, 2)
        >>> [part.elements for part in parts_at(b.layout(False, (4,)), (4,))]
        [slice(0, 4, None), slice(4, 8, None)]
    """
    if not borders or not set(borders) <= set(layout.segment_offsets.tolist()):
        return (whole_cut(layout),)
    ends = (0, *borders, int(layout.segment_offsets[-1]))
    return tuple(Cut(layout, elements=slice(*each)) for each in pairwise(ends))


def part_bytes(message: Message, parts: Sequence[Cut]) -> list[int]:
    """Bytes of a message's records in each part."""
    return [sum(message.segment_bytes[part.segments]) for part in parts]


def parts_in_one(sizes: Sequence[Sequence[int]]) -> int:
    """How many parts should travel as one, so that they are not too short.

    Args:
        sizes: for each rank, the bytes of its message's parts, a power of two of them.
    """
    parts = len(sizes[0])
    return parts // parts_for(parts, max(map(sum, sizes)))


def parts_for(most: int, longest: int) -> int:
    """How many of `most` parts, a power of two, the ranks send if the longest message is so long.

    Example:
        >>> parts_for(4, 600_000)
        2
    """
    return min(most, _power_of_two(longest // PART_BYTES))


def _power_of_two(most: int) -> int:
    """The largest one that is not above a number; at least 1."""
    return 1 << (max(most, 1).bit_length() - 1)
