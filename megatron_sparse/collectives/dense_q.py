"""Dense, quantised: `direct` with messages that hold every element in 8 or 4 bits.

The all-to-all of SDP4Bit (Jia et al. 2024, arXiv 2410.15526) and of ZeRO++'s qgZ (Wang et al.
2023, arXiv 2306.10209), with error feedback as LoCo has (Xie et al. 2024, arXiv 2407.04480): what
rounding leaves stays in the residual. Deviations: one level of links; no rotation before rounding;
sums in fp32, which an all-reduce gathers in full unless `scheme.sum_bits` says otherwise.

Selection prunes nothing (`MessageSpec.whole`): a message is Rice records without indices, in
`compression.value_bits` bits where these are 8 or 4, else in 4. The rounds are `direct`'s. The
sums of an all-reduce are dense records, with `scheme.sum_bits` of 8 or 4 bits too (4 for 3 and 2).

With equal shards, rank r sends (n - 1) / n N (q + 1/4) / 8 bytes in q bits; for an all-reduce also
(n - 1) / n N b, or as many bytes again with `sum_bits`. A ring sends (n - 1) / n N b for each half.
"""

from megatron_sparse.collectives.base import Exchange, Steps
from megatron_sparse.collectives.direct import reduce_shards, split_cost, spread_sums_cost
from megatron_sparse.collectives.records import reads_reports
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.collectives.sparse_sum import SparseSum
from megatron_sparse.formats.message import Message
from megatron_sparse.pricing.dry_run import DryRun

NAME = "dense_q"


@reads_reports
def dense_q(exchange: Exchange, message: Message) -> Steps:
    """Writes the sum of all ranks' messages into `exchange.bucket`; exact without `sum_bits`.

    Arguments and errors as of `agsparse`; the message is cut into shards also for an all-reduce.
    """
    return (yield from reduce_shards(NAME, SparseSum(exchange, message, whole=True)))


def cost(run: DryRun) -> None:
    """`direct.cost` with messages that hold every element in q bits (+ 1/4), and dense sums."""
    split_cost(run, run.whole_messages())
    if not run.scatter:
        sum_density_n = run.densities.shards(run.n, run.n)
        # The same density twice: the size of dense records does not depend on it.
        spread_sums_cost(run, run.whole_sums(), sum_density_n, sum_density_n)


SCHEME = Scheme(
    NAME,
    Input.SPARSE,
    run=dense_q,
    place=85,
    cost=cost,
    needs_shards=True,
    sends_by_shard=True,
    takes_slots=True,
    sends_whole=True,
)
