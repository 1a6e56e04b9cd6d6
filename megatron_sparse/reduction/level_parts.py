"""The part of a bucket that a rank selects from, at each level above `rank` (`level`).

    bucket, 2 nodes of 2 ranks         |  0  |  1  |  2  |  3  |    shards of a reduce-scatter
    part 0 (of the first rank of each node):
        of an all-reduce               |###########|           |    the first half
        of a reduce-scatter            |#####|     |#####|     |    shards 0 and 2, back to back

A part is a `Bucket`. Its parameters are slices, each with the element of the parameter at which it
begins (`offset`): so an element of a residual is identified in the same way on any nodes.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice, Reduction
from megatron_sparse.errors import ConfigError


def node_cuts(bucket: Bucket, node_size: int, local_rank: int) -> list[slice]:
    """The elements of a bucket that make up the part of a rank, at level `node`.

    `local_rank` is the rank's number within its node, from 0.
    """
    if bucket.op is CollectiveOp.REDUCE_SCATTER:
        firsts = range(0, bucket.world_size, node_size)  # the first rank of each node
        return [bucket.shard(first + local_rank) for first in firsts]
    piece = bucket.numel // node_size
    stop = bucket.numel if local_rank == node_size - 1 else (local_rank + 1) * piece
    return [slice(local_rank * piece, stop)]


def node_part(bucket: Bucket, node_size: int, local_rank: int) -> Bucket:
    """Makes the part of a rank at level `node`. For the arguments see `node_cuts`.

    An all-reduce's part has a view of the bucket's gradient. A reduce-scatter's part is not
    contiguous in the bucket: it has a tensor of the right size, which `NodeLevel.inside` replaces.
    """
    cuts = node_cuts(bucket, node_size, local_rank)
    numel = sum(cut.stop - cut.start for cut in cuts)
    return Bucket(
        bucket.name,
        bucket.grad_N[cuts[0]] if len(cuts) == 1 else bucket.grad_N[:numel],
        slices_of(bucket, cuts),
        bucket.op,
        bucket.world_size // node_size,  # ranks of a lane: one of each node
        Reduction.SUM,  # gradients are averaged before the node's sum
        fp32_sums=bucket.fp32_sums,
        lanes=node_size,
    )


def instance_part(bucket: Bucket, rank: int) -> Bucket:
    """Makes the part of a rank of the instance: its shard, a view of the bucket's gradient.

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
    lanes = bucket.world_size  # every rank of the instance exchanges a part at the same time
    return Bucket(bucket.name, bucket.grad_N[own], slices, op, bucket.instances, lanes=lanes)


def in_whole_bucket(values_M: torch.Tensor, part: Bucket, whole: Bucket) -> torch.Tensor:
    """Scatters the values of a part into a zero tensor of the whole bucket: fp32 [N].

    Args:
        values_M: one value for each element of the part, such as its residual.
        part: of the bucket `whole` (`level.Level.part`); at level `rank` the bucket itself.
        whole: the bucket.
    """
    # Parameter -> the element of the bucket that is the parameter's element 0.
    origins = {piece.name: piece.start - piece.offset for piece in whole.parameters}
    values_N = torch.zeros(whole.numel, dtype=torch.float32, device=values_M.device)
    for piece in part.parameters:
        start = origins[piece.name] + piece.offset
        values_N[start : start + piece.numel] = values_M[piece.start : piece.stop]
    return values_N


def slices_of(bucket: Bucket, cuts: Sequence[slice]) -> list[ParameterSlice]:
    """Cuts the parameters of a bucket to those elements that are in a part of it.

    `start` and `stop` of the slices returned count from the start of the part.

    `cuts` are the elements of the bucket that make up the part, back to back.

    Example:
        >>> import torch
        >>> parameters = [ParameterSlice("w", 1, 7)]
        >>> b = Bucket("0", torch.zeros(8), parameters, CollectiveOp.REDUCE_SCATTER, 4)
        >>> [(p.start, p.stop, p.offset) for p in slices_of(b, [slice(0, 2), slice(4, 6)])]
        [(1, 2, 0), (2, 4, 3)]
    """
    found: list[ParameterSlice] = []
    cut_start = 0  # the element of the part at which the cut begins
    for cut in cuts:
        shift = cut_start - cut.start  # added to an element of the bucket: its number in the part
        for parameter in bucket.parameters:
            start, stop = max(parameter.start, cut.start), min(parameter.stop, cut.stop)
            if start < stop:
                offset = parameter.offset + start - parameter.start
                found.append(
                    replace(parameter, start=start + shift, stop=stop + shift, offset=offset)
                )
        cut_start += cut.stop - cut.start
    return found
