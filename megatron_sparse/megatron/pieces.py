"""Cuts a large bucket on a GPU into pieces, which are synchronised one after another.

Without `--overlap-grad-reduce` Megatron has one bucket for all gradients, and the buffers for its
messages and sums would be as large as the model. The pieces share them (`MessageTurns`,
`Exchange.take`), and one piece is selected while another is exchanged.

A bucket that is reduce-scattered stays whole: a rank's shard of it lies in one place, and pieces
would have their shards in others. So does one whose gradients are sent dense, because NCCL adds in
an order that depends on the buffer's size: the sums of a dense run are Megatron's own, bit for bit.
"""

from dataclasses import replace

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives import SCHEMES, Input
from megatron_sparse.config.sparse import SparseConfig

PIECE_NUMEL, PIECE_NUMEL_PER_RANK = 40_000_000, 1_000_000
"""Megatron's own bucket size with overlap; the second counts if it is more for all ranks."""


def in_pieces(bucket: Bucket, config: SparseConfig) -> list[Bucket]:
    """Cuts a bucket into pieces if it is large, compressed and on a GPU; else returns it alone.

    A piece is a bucket over a view of the gradients. It consists of whole parameters, as few as
    reach `PIECE_NUMEL` elements, or `PIECE_NUMEL_PER_RANK` for each rank if that is more.

    Example:
        With `PIECE_NUMEL`, 40 million, a bucket of 90 million elements in parameters of 10 million
        becomes three pieces, of 40, 40 and 10 million.
    """
    enough = max(PIECE_NUMEL, PIECE_NUMEL_PER_RANK * bucket.world_size)
    if bucket.numel <= enough or not bucket.grad_N.is_cuda or not _is_compressed(bucket, config):
        return [bucket]
    pieces: list[Bucket] = []
    start = first = 0  # the piece's first element, and its first parameter
    for index, parameter in enumerate(bucket.parameters):
        is_last = index + 1 == len(bucket.parameters)
        if is_last or parameter.stop - start >= enough:
            stop = bucket.numel if is_last else parameter.stop  # the last one has the padding
            # A piece's slices count from its own first element.
            slices = tuple(
                replace(each, start=each.start - start, stop=each.stop - start)
                for each in bucket.parameters[first : index + 1]
            )
            name = f"{bucket.name}.{len(pieces)}"
            gradients = bucket.grad_N[start:stop]
            pieces.append(
                replace(bucket, name=name, grad_N=gradients, parameters=slices, layouts={})
            )
            start, first = stop, index + 1
    return pieces


def _is_compressed(bucket: Bucket, config: SparseConfig) -> bool:
    scheme = SCHEMES.get(config.scheme.name)  # None for `auto`, which chooses a sparse one
    sends_dense = scheme is not None and scheme.takes is Input.DENSE
    return config.compression.enabled and not sends_dense and bucket.op is CollectiveOp.ALL_REDUCE
