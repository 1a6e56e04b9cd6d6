"""OmniReduce (Fei et al., 2021): only non-zero blocks travel, to the aggregators and back.

A message is the non-zero blocks of `scheme.block_size` consecutive elements, each with its number
instead of an index for every element; selection encodes messages this way. Aggregators add the
blocks that they receive and multicast the non-zero blocks of the sum. Meant for gradients whose
non-zero elements lie together, as rows of an embedding do. If the selected values are scattered,
most blocks hold one, and a shard whose blocks are not smaller than dense travels dense.

Deviations: aggregators are not machines of their own, but rank i is that of shard i (the paper's
co-located mode); a rank knows all its non-zero blocks when it starts, so instead of asking block by
block for the next one, a shard's blocks go in one message, one peer at a time. Blocks restart in
each segment of the bucket; segments that are always sent whole are dense.

Agreement and phases are those of `direct`, with blocks in both: 8 (2 + n) bytes a rank and n - 1
rounds, twice in an all-reduce. An fp32 segment with B non-zero blocks takes 16 + 4 B + 1024 B bytes
(256 elements a block), header and padding aside. Rank r sends
|message_r| - |shard_r of it| and (n - 1) |sum_r| bytes.
"""

from megatron_sparse.collectives.base import Exchange, Steps
from megatron_sparse.collectives.direct import (
    add_shards_cost,
    reduce_shards,
    send_shards_cost,
    spread_sums_cost,
)
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.collectives.sparse_sum import SparseSum
from megatron_sparse.formats.message import Message
from megatron_sparse.pricing.dry_run import DryRun
from megatron_sparse.wire import FORMAT_BLOCKS

NAME = "omnireduce"


def omnireduce(exchange: Exchange, message: Message) -> Steps:
    """Writes the exact sum of all ranks' messages into `exchange.bucket`.

    Arguments and errors as of `agsparse`; the message is cut into shards also for an all-reduce,
    and its records are blocks of `options.block_size` elements, on which ranks must agree.
    """
    block_size = exchange.options.block_size
    sums = SparseSum(exchange, message, form=FORMAT_BLOCKS, block_size=block_size)
    return (yield from reduce_shards(f"{NAME} {block_size}", sums))


def cost(run: DryRun) -> None:
    """Predicts the time of `omnireduce`: `direct.cost` with the bytes of the non-zero blocks.

    ZEN's appendix B.1 for contiguous shards (see `direct.cost`), with the fraction of non-zero
    blocks in each shard in place of the density of elements.
    """
    form, n, size = run.sum_format("blocks"), run.n, run.options.block_size
    own_density_n = run.densities.block_density(ranks=1, parts=n, block_size=size)
    run.agree()  # always: there is no capacity mode
    send_shards_cost(run, form.nbytes(run.piece(n), own_density_n, run.b))
    add_shards_cost(run, form, own_density_n)
    if not run.scatter:
        sum_density_n = run.densities.block_density(ranks=n, parts=n, block_size=size)
        spread_sums_cost(run, form, sum_density_n, sum_density_n)


SCHEME = Scheme(
    NAME,
    Input.SPARSE,
    run=omnireduce,
    place=140,
    cost=cost,
    needs_shards=True,
    sends_by_shard=True,
    own_format="blocks",
)
