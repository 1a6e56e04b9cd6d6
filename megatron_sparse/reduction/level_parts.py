"""The part of a bucket that a rank selects from, at each level above `rank` (`level`).

    bucket, 2 nodes of 2 ranks     |  0  |  1  |  2  |  3  |    shards of a reduce-scatter
    part of place 0, all-reduce    |###########|           |    the first half
    part of place 0, shards        |#####|     |#####|     |    shards 0 and 2, back to back

A part is a `Bucket`. Its parameters are slices that name the element of the parameter at which they
begin, so a residual's elements keep their names whatever the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice, Reduction
from megatron_sparse.errors import ConfigError


def node_cuts(bucket: Bucket, members: int, place: int) -> list[slice]:
    """The elements of a bucket that make up the part of a rank, at level `node`.

    Args:
        bucket: the whole.
        members: ranks of a node.
        place: the rank's place in its node.
    """
    if bucket.op is CollectiveOp.REDUCE_SCATTER:
        return [bucket.shard(first + place) for first in range(0, bucket.world_size, members)]
    piece = bucket.numel // members
    stop = bucket.numel if place == members - 1 else (place + 1) * piece
    return [slice(place * piece, stop)]


def node_part(bucket: Bucket, members: int, place: int) -> Bucket:
    """The part of a rank at level `node`. Arguments as of `node_cuts`.

    The gradient of an all-reduce's part is a view of the bucket's. The shards of a reduce-scatter's
    part are not adjacent: there it is a placeholder of the right size.
    """
    cuts = node_cuts(bucket, members, place)
    numel = sum(cut.stop - cut.start for cut in cuts)
    return Bucket(
        bucket.name,
        bucket.grad_N[cuts[0]] if len(cuts) == 1 else bucket.grad_N[:numel],
        slices_of(bucket, cuts),
        bucket.op,
        bucket.world_size // members,
        Reduction.SUM,
        fp32_sums=bucket.fp32_sums,
        lanes=members,
    )


def instance_part(bucket: Bucket, rank: int) -> Bucket:
    """The part of a rank at level `instance`: its shard, a view of the bucket's gradient.

    Args:
        bucket: the whole.
        rank: in the instance.

    Raises:
        ConfigError: the bucket has no shards.
    """
    if bucket.op is not CollectiveOp.REDUCE_SCATTER:
        raise ConfigError(
            f"bucket {bucket.name}: compression.level=instance needs shards",
            expected="a reduce-scatter, as for Megatron's distributed optimizer",
            got=bucket.op,
            remedy="set compression.level=rank or node",
        )
    own = bucket.shard(rank)
    slices, op = slices_of(bucket, [own]), CollectiveOp.ALL_REDUCE
    lanes = bucket.world_size
    return Bucket(bucket.name, bucket.grad_N[own], slices, op, bucket.instances, lanes=lanes)


def in_whole_bucket(values_M: torch.Tensor, part: Bucket, whole: Bucket) -> torch.Tensor:
    """Values of a part's parameters where they lie in the whole bucket: fp32 [N], else zero.

    Args:
        values_M: of the part.
        part: see `level.Level.part`; at level `rank` the bucket itself.
        whole: the bucket.
    """
    # Where element 0 of each parameter lies in the bucket.
    first_elements = {piece.name: piece.start - piece.offset for piece in whole.parameters}
    values_N = torch.zeros(whole.numel, dtype=torch.float32, device=values_M.device)
    for piece in part.parameters:
        start = first_elements[piece.name] + piece.offset
        values_N[start : start + piece.numel] = values_M[piece.start : piece.stop]
    return values_N


def slices_of(bucket: Bucket, cuts: Sequence[slice]) -> list[ParameterSlice]:
    """The parameters of a bucket in a part of it.

    Args:
        bucket: the whole.
        cuts: the elements that make up the part, back to back.

    Example:
        >>> import torch
        >>> parameters = [ParameterSlice("w", 1, 7)]
        >>> b = Bucket("0", torch.zeros(8), parameters, CollectiveOp.REDUCE_SCATTER, 4)
        >>> [(p.start, p.stop, p.offset) for p in slices_of(b, [slice(0, 2), slice(4, 6)])]
        [(1, 2, 0), (2, 4, 3)]
    """
    found: list[ParameterSlice] = []
    place = 0  # of the cut's first element, in the part
    for cut in cuts:
        shift = place - cut.start  # from places in the bucket to those in the part
        for parameter in bucket.parameters:
            start, stop = max(parameter.start, cut.start), min(parameter.stop, cut.stop)
            if start < stop:
                offset = parameter.offset + start - parameter.start
                found.append(
                    replace(parameter, start=start + shift, stop=stop + shift, offset=offset)
                )
        place += cut.stop - cut.start
    return found
