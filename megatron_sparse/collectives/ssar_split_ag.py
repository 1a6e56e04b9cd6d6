"""SSAR split all-gather (SparCML, Renggli et al. 2019): split, then a sparse recursive doubling.

Phase 1 is `direct`'s: the agreement, then n - 1 rounds in which every shard goes to its owner, who
adds it up. Phase 2, ceil(log2 n) rounds after one all-gather of sizes (8 (2 + n) bytes a rank): the
encoded sums are all-gathered by recursive doubling, for any number of ranks (Bruck's order).

Fewer rounds than `direct` and the same bytes in total. But ranks pass on the sums of others, so the
busiest rank depends on the places of the non-zeros. Rank r sends |message_r| - |shard_r of it|
bytes in phase 1. In a round of phase 2 that starts with d sums held it sends those of ranks
r ... r + d - 1 (in the last round only as many as are missing). All-reduce only: as a
reduce-scatter it would be `direct`.
"""

from megatron_sparse.collectives.base import Exchange, Steps
from megatron_sparse.collectives.direct import reduce_shards, split_cost, spread_sums_cost
from megatron_sparse.collectives.gather import doubling_all_gather_cost
from megatron_sparse.collectives.records import reads_reports
from megatron_sparse.collectives.scheme import ALL_REDUCE_ONLY, Input, Scheme
from megatron_sparse.collectives.sparse_sum import SparseSum
from megatron_sparse.formats.message import Message
from megatron_sparse.pricing.dry_run import DryRun

NAME = "ssar_split_ag"


@reads_reports
def ssar_split_ag(exchange: Exchange, message: Message) -> Steps:
    """Writes the exact sum of all ranks' messages into `exchange.bucket`.

    Arguments and errors as of `agsparse`; the message is cut into shards.
    """
    return (yield from reduce_shards(NAME, SparseSum(exchange, message), doubling=True))


def cost(run: DryRun) -> None:
    """Predicts the time of `ssar_split_ag`: shards to their owners, then recursive doubling.

    With messages of m bytes and a sum of M bytes: ((n - 1) + log2 n) alpha + (n - 1) / n (m + M)
    beta (SparCML, section 5). Added: the sizes that are sent first, encoding and adding.
    """
    split_cost(run, run.messages(SCHEME.message_format(run.options)))
    density_n, sent_density_n = run.densities.shards(run.n, run.n), run.sum_density(run.n)
    form = run.gathered_sums()
    spread_sums_cost(run, form, density_n, sent_density_n, doubling_all_gather_cost)


SCHEME = Scheme(
    NAME,
    Input.SPARSE,
    run=ssar_split_ag,
    place=100,
    cost=cost,
    ops=ALL_REDUCE_ONLY,
    needs_shards=True,
    sends_by_shard=True,
    takes_slots=True,
)
