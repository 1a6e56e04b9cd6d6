"""DSAR split all-gather (SparCML, Renggli et al. 2019): sparse split, then a dense all-gather.

For sums that have filled in. The second half sends dense records, whose sizes are known, so that no
sizes are announced.

Phase 1 is `direct`'s: the agreement, then n - 1 rounds in which every shard goes to its
owner, who adds it up. Phase 2, ceil(log2 n) rounds: the sums, as dense records, are all-gathered by
recursive doubling, for any number of ranks (Bruck's order).

Rank r sends |message_r| - |shard_r of it| bytes, and dense records (48 bytes of header and the
values, padded to 16, for each segment). In a round that starts with d sums held it sends those of
ranks r ... r + d - 1, in the last round only as many as are missing. With equal shards that is
(n - 1) / n N b in total. All-reduce only: as a reduce-scatter it would be `direct`.
"""

from megatron_sparse.collectives.base import Exchange, Steps
from megatron_sparse.collectives.direct import reduce_shards, split_cost
from megatron_sparse.collectives.gather import doubling_all_gather_cost
from megatron_sparse.collectives.records import reads_reports
from megatron_sparse.collectives.scheme import ALL_REDUCE_ONLY, Input, Scheme
from megatron_sparse.collectives.sparse_sum import SparseSum
from megatron_sparse.formats.message import Message
from megatron_sparse.pricing.cluster import CodecOp
from megatron_sparse.pricing.dry_run import DryRun

NAME = "dsar_split_ag"


@reads_reports
def dsar_split_ag(exchange: Exchange, message: Message) -> Steps:
    """Writes the exact sum of all ranks' messages into `exchange.bucket`.

    Arguments and errors as of `agsparse`; the message is cut into shards.
    """
    sums = SparseSum(exchange, message)
    return (yield from reduce_shards(NAME, sums, doubling=True, dense=True))


def cost(run: DryRun) -> None:
    """Predicts the time of `dsar_split_ag`: as `ssar_split_ag.cost`, but sums are dense.

    With messages of m bytes: ((n - 1) + log2 n) alpha + (n - 1) / n (m + N b) beta (SparCML,
    section 5). Added: the agreement on the messages' sizes, encoding and adding.
    """
    split_cost(run, run.messages(SCHEME.message_format(run.options)))
    form, shard = run.sum_format("dense"), run.piece(run.n)
    run.work(form.seconds(CodecOp.ENCODE, shard, 1.0, run.b))  # 1.0: the density of a dense record
    decoding_s = form.seconds(CodecOp.DECODE, shard, 1.0, run.b)
    doubling_all_gather_cost(run, form.nbytes(shard, 1.0, run.b), decoding_s)


SCHEME = Scheme(
    NAME,
    Input.SPARSE,
    run=dsar_split_ag,
    place=110,
    cost=cost,
    ops=ALL_REDUCE_ONLY,
    needs_shards=True,
    sends_by_shard=True,
    takes_slots=True,
)
