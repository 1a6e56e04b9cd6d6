"""A gradient bucket and how it is cut: parameters, shards, wire segments, threshold ranges.

A picture above `Layout` shows all cuts. A *segment* is encoded as one record; all elements of a
*range* share one threshold; a *piece* is a parameter or padding.

Shape suffixes: N elements of the bucket, S segments, R ranges, P pieces.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

import torch

from megatron_sparse.errors import ConfigError

MAX_SEGMENT_NUMEL = 2**31 - 1
"""A COO record holds int32 indices that restart in each segment."""


Cuts = tuple[int, ...]
"""Elements of a bucket at which it is cut."""


class CollectiveOp(StrEnum):
    """The result of a collective on each rank: the whole sum, or the rank's own shard of it."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"


class Reduction(StrEnum):
    """How the ranks' gradients are combined.

    `AVG` divides each rank's gradient by the number of ranks before anything is selected from it,
    because residuals are contributions to the averaged gradient. A dense reduce-scatter leaves the
    division to the backend, as Megatron does.
    """

    SUM = "sum"
    AVG = "avg"


@dataclass(frozen=True)
class ParameterSlice:
    """Where one parameter, or a slice of it, lies in a bucket: elements `start` to `stop`.

    With `keep` all its elements are always sent ("kept"). With `lossless` exactly the elements that
    are not zero are sent. Else it is pruned. `name` is stable across runs and independent of how
    parameters are grouped into buckets. `offset` is the slice's first element in the parameter: a
    part of a bucket may hold several slices of one parameter.
    """

    name: str
    start: int
    stop: int
    keep: bool = False
    lossless: bool = False
    offset: int = 0

    @property
    def numel(self) -> int:
        """Elements of the slice."""
        return self.stop - self.start

    @property
    def pruned(self) -> bool:
        """Whether a threshold decides which of its elements are sent."""
        return not self.keep and not self.lossless


@dataclass
class Bucket:
    """One contiguous gradient buffer that is synchronised in one piece.

    Attributes:
        name: unique in the process and the same on every rank of the group.
        grad_N: 1-D contiguous gradients, fp32, bf16 or fp16; overwritten with the result.
        parameters: slices in ascending order; elements between two of them are padding.
        op: all-reduce, or reduce-scatter over `world_size` equal shards.
        world_size: ranks in the group.
        reduction: sum or average; the reducer does the division.
        instances: groups of `world_size` ranks whose shards are added up afterwards; see
            `megatron_sparse.reduction.level`.
        fp32_sums: a dense reduce-scatter adds in fp32 and rounds once, whatever the dtype of the
            gradients; sparse ones always do.
        lanes: of a part of a bucket (`compression.level` node or instance): how many parts share
            the links between the nodes at the same time, this one included; for the planner.
    """

    name: str
    grad_N: torch.Tensor
    parameters: Sequence[ParameterSlice]
    op: CollectiveOp
    world_size: int
    reduction: Reduction = Reduction.SUM
    instances: int = 1
    fp32_sums: bool = False
    lanes: int = 1
    layouts: dict[tuple[bool, Cuts], Layout] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.grad_N.dim() != 1 or not self.grad_N.is_contiguous():
            raise ConfigError(
                f"bucket {self.name}: the gradient buffer has the wrong shape",
                expected="a contiguous 1-D tensor",
                got=f"shape {tuple(self.grad_N.shape)}, strides {self.grad_N.stride()}",
            )
        if self.op is CollectiveOp.REDUCE_SCATTER and self.numel % self.world_size:
            raise ConfigError(
                f"bucket {self.name} cannot be cut into equal shards",
                expected=f"a multiple of {self.world_size} elements",
                got=self.numel,
                remedy="pad the bucket, as Megatron's distributed optimizer does",
            )

    @property
    def numel(self) -> int:
        """Elements in the bucket, padding included."""
        return self.grad_N.numel()

    def shard(self, rank: int) -> slice:
        """The elements that `rank` owns after a reduce-scatter."""
        shard_numel = self.numel // self.world_size
        return slice(rank * shard_numel, (rank + 1) * shard_numel)

    def layout(self, sharded: bool, extra_cuts: Cuts = ()) -> Layout:
        """How the bucket is cut into segments and ranges; cached for each pair of arguments.

        Args:
            sharded: whether to cut at the borders of the ranks' shards too.
            extra_cuts: further elements to cut at; see `Scheme.extra_cuts`.
        """
        key = (sharded, extra_cuts)
        if key not in self.layouts:
            self.layouts[key] = Layout.of(self, self.world_size if sharded else 1, extra_cuts)
        return self.layouts[key]


# How a bucket of 24 elements on 2 ranks is cut. Parameter w (0 to 10) is pruned, the norm b (10 to
# 14) is always sent whole, v (16 to 24) is pruned; 14 and 15 are padding. `shards` = 2.
#
#   element  0                   10  12  14  16              24
#   shard    |---------- 0 ----------|---------- 1 ----------|  equal parts, one a rank
#   piece    |-------- w --------|-- b --|pad|------ v ------|  parameters and padding
#   kind     |------ pruned -----|--- kept --|---- pruned ---|  padding as the piece before
#   segment  |-------- 0 --------| 1 |-- 2 --|------ 3 ------|  cut at shards and kinds
#   range    |-------- 0 --------| 1 | 2 | 3 |------ 4 ------|  segments cut at pieces
#
# A segment is one record on the wire: shard 0 is segments 0 and 1, shard 1 is segments 2 and 3. A
# range lies in one segment and in one piece, so it has one threshold.


@dataclass(frozen=True, eq=False)
class Layout:
    """Where a bucket is cut into segments, ranges and pieces; the comment above shows an example.

    Offsets are int64 elements from the bucket's start. A layout never changes, so caches may use
    it as a key: it is compared by identity.

    Attributes:
        segment_offsets: S+1 offsets of the segments, each one record on the wire. A segment never
            crosses a border between shards, nor between kept, lossless and pruned elements.
        segment_keep: uint8 [S], 1 for segments that are always sent whole.
        shard_segments: n+1 segment numbers: shard i begins at [i] and ends before [i+1].
        range_offsets: R+1 offsets of the ranges: segments cut at pieces.
        range_piece: int64 [R], the piece of each range.
        piece_offsets: P+1 offsets of the pieces: parameters and the padding between them.
        piece_parameter: for each piece the index into `Bucket.parameters`, -1 for padding.
    """

    segment_offsets: torch.Tensor
    segment_keep: torch.Tensor
    shard_segments: tuple[int, ...]
    range_offsets: torch.Tensor
    range_piece: torch.Tensor
    piece_offsets: torch.Tensor
    piece_parameter: tuple[int, ...]

    @classmethod
    def of(cls, bucket: Bucket, shards: int, extra_cuts: Cuts = ()) -> Layout:
        """Computes the segments, ranges and pieces of a bucket.

        Segments are cut at borders of shards, at `extra_cuts`, where they get too long, and where
        the kind of elements changes: kept, lossless or pruned. Ranges are cut at every piece too.
        Padding has the kind of the parameter before it, but is a piece of its own, so that the
        amount of padding does not change which elements are sampled for a threshold.

        Args:
            bucket: the bucket.
            shards: number of equal shards.
            extra_cuts: further borders, each from 0 to the bucket's end.

        Example:
            >>> p = [ParameterSlice("w", 0, 6), ParameterSlice("b", 6, 8, keep=True)]
            >>> b = Bucket("0", torch.zeros(8), p, CollectiveOp.REDUCE_SCATTER, 2)
            >>> Layout.of(b, 2).segment_offsets.tolist()
            [0, 4, 6, 8]
        """
        numel = bucket.numel
        shard_starts = [shard * (numel // shards) for shard in range(shards)]
        pieces, piece_parameter, kinds = _pieces(bucket)
        kind_starts = {  # where the kind differs from that of the piece before
            start
            for index, start in enumerate(pieces[:-1])  # the last offset is the bucket's end
            if index == 0 or kinds[index] != kinds[index - 1]
        }
        segments = _split_long(sorted({*shard_starts, numel, *kind_starts, *extra_cuts}))
        ranges = sorted({*segments, *pieces})
        # All pieces of a segment are of one kind (keep, lossless), so its first one shows it.
        segment_keep = [kinds[piece][0] for piece in _intervals_around(pieces, segments)]
        # An empty bucket has no segments: each of its shards begins and ends at 0.
        shard_firsts = [segments.index(start) for start in shard_starts] if numel else [0] * shards
        return cls(
            segment_offsets=torch.tensor(segments, dtype=torch.int64),
            segment_keep=torch.tensor(segment_keep, dtype=torch.uint8),
            shard_segments=(*shard_firsts, len(segments) - 1),
            range_offsets=torch.tensor(ranges, dtype=torch.int64),
            range_piece=torch.tensor(_intervals_around(pieces, ranges), dtype=torch.int64),
            piece_offsets=torch.tensor(pieces, dtype=torch.int64),
            piece_parameter=tuple(piece_parameter),
        )


def _pieces(bucket: Bucket) -> tuple[list[int], list[int], list[tuple[bool, bool]]]:
    """Cuts a bucket into parameters and paddings.

    Returns the P+1 offsets of the pieces, and for each piece its parameter's index (-1 for padding)
    and its kind (keep, lossless). Padding has the kind of the parameter before it.
    """
    offsets, piece_parameter, kinds = [0], [], []
    kind = (True, False)  # padding before the first parameter is kept

    def add_piece(stop: int, parameter: int) -> None:
        if stop > offsets[-1]:  # else there is no padding here
            offsets.append(stop)
            piece_parameter.append(parameter)
            kinds.append(kind)

    for index, parameter in enumerate(bucket.parameters):
        add_piece(parameter.start, -1)
        if parameter.numel:  # an empty slice makes no piece and gives padding no kind
            kind = (parameter.keep, parameter.lossless)
            add_piece(parameter.stop, index)
    add_piece(bucket.numel, -1)
    return offsets, piece_parameter, kinds


def _split_long(borders: list[int]) -> list[int]:
    """Adds borders so that no segment is longer than `MAX_SEGMENT_NUMEL`."""
    result = []
    for start, stop in pairwise(borders):
        result.extend(range(start, stop, MAX_SEGMENT_NUMEL))
    return [*result, borders[-1]]


def _intervals_around(offsets: Sequence[int], cuts: Sequence[int]) -> list[int]:
    """For each interval between two cuts, the number of the interval of `offsets` that holds it."""
    return [min(bisect(offsets, cut), len(offsets) - 1) - 1 for cut in cuts[:-1]]
