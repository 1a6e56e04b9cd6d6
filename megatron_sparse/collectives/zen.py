"""ZEN's Balanced Parallelism (sections 3.1 to 3.3): shards by hash, so all carry the same load.

Rank i is the server of partition i: of the elements that a hash h0, common to all ranks, maps to i
(`formats.hash_partition`). Wherever the non-zero elements of a gradient lie, every server gets
about as many of them, so with M of them the imbalance ratios of Push and Pull (definition 8) are
1 + O(sqrt(n log n / M)) (theorem 2). With `direct`'s contiguous shards the server of a crowded one
would be everybody's bottleneck.

Agreement: one all-gather of the collective's identity and of every rank's n record
sizes, 8 (2 + n) bytes a rank.
Push, n - 1 rounds: a rank cuts what it has selected by partition (Algorithm 1, or a sort) and sends
each server its pairs of index and value, one peer at a time. The server adds them up in rank order,
in fp32.
Pull: sizes are all-gathered (as many bytes), and in n - 1 rounds each server sends its sums to
every other rank, as a hash bitmap (Algorithm 2).

Rank r sends its n - 1 push records, K (4 + b) bytes for K pairs and 80 for headers each, and
(n - 1) times its pull record, N / (8 n) bytes and b for each sum that is not zero, and 80.

There is no reduce-scatter, because its shards are contiguous and these are not. Elements that are
always sent whole travel among the pairs: 4 bytes more for each.

Deviations: h0 is a permutation, which needs no index sets (`formats.hash_partition`);
a push record is a bitmap or dense where that is smaller (`formats.hash_pairs`), and a pull record
dense; h0 is a function of `HASH_SEED`, which all ranks know, instead of seeds that are broadcast.
On CUDA the CPU waits for the GPU at every check.
"""

from collections.abc import Generator

import torch

from megatron_sparse.bucket import MAX_SEGMENT_NUMEL, Bucket
from megatron_sparse.collectives.base import (
    Exchange,
    Identity,
    Phase,
    Steps,
    Subgroup,
    Yielded,
    exchange_sizes,
    whole_group,
)
from megatron_sparse.collectives.direct import gather_sums_cost, send_shards_cost
from megatron_sparse.collectives.gather import pairwise_all_gather, pairwise_all_to_all
from megatron_sparse.collectives.records import check_sizes
from megatron_sparse.collectives.scheme import ALL_REDUCE_ONLY, Input, Scheme
from megatron_sparse.collectives.sparse_sum import SparseSum
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.formats import hash_bitmap, hash_pairs
from megatron_sparse.formats.hash_partition import HASH_SEED, PermutationHash
from megatron_sparse.formats.hash_record import PartitionRecord
from megatron_sparse.formats.hierarchical_hash import Partitioned, entries, hierarchical_hash, split
from megatron_sparse.formats.message import VALUE_DTYPES, Message
from megatron_sparse.formats.rounding import round_into
from megatron_sparse.pricing.cluster import CodecOp
from megatron_sparse.pricing.dry_run import DryRun
from megatron_sparse.pricing.records import pull_bytes, push_bytes

NAME = "zen"


def zen(exchange: Exchange, message: Message) -> Steps:
    """Writes the exact sum of all ranks' messages into `exchange.bucket`.

    Sums are fp32 and rounded once, to nearest even, where values travel narrower. Returns the bytes
    that this rank sent.

    Args:
        exchange: the bucket, and the means to synchronise it.
        message: this rank's contribution, of COO and dense records.

    Raises:
        ConfigError: the bucket is too large; before anything is sent.
        CommunicationError: ranks disagree about the bucket, scheme, dtype or step.
        WireFormatError: a peer's record is not what was announced.
    """
    bucket, options, timer = exchange.bucket, exchange.options, exchange.timer
    _check_bucket(bucket)
    identity = Identity.of_message(NAME, exchange, message)
    group = whole_group(exchange.transport, identity.tag)
    n = group.world_size
    h0 = PermutationHash(bucket.numel, n, HASH_SEED)
    dtype = VALUE_DTYPES[message.value_dtype]
    step, checksum = message.step, message.checksum
    # By server. A partition's elements lie all over the bucket, so each record's offset is 0.
    partitions = [
        PartitionRecord(h0, server, dtype, offset=0, step=step, checksum=checksum)
        for server in range(n)
    ]
    with timer.stage("encode"):
        pairs = _cut(message, h0, options)
        pushed = [hash_pairs.encode(*pairs.of(each.partition), each) for each in partitions]
    sums = SparseSum(exchange, message)
    sum_P = yield from _push(identity, pushed, partitions, sums, group)
    with timer.stage("encode"):
        rounded_P = round_into(sum_P.new_empty(sum_P.shape, dtype=dtype), sum_P)
        pulled = hash_bitmap.encode(rounded_P, partitions[group.rank])
    yield from _pull(identity, pulled, partitions, sums, group)
    sums.write(slice(None))  # the whole bucket
    return group.sent_bytes


def _check_bucket(bucket: Bucket) -> None:
    """Refuses a bucket with more elements than int32 indices can number."""
    if bucket.numel > MAX_SEGMENT_NUMEL:
        raise ConfigError(
            f"bucket {bucket.name} is too large for scheme.name={NAME}",
            expected=f"at most {MAX_SEGMENT_NUMEL} elements",
            got=bucket.numel,
            remedy="make buckets smaller (Megatron: --ddp-bucket-size), or choose another scheme",
        )


def _cut(message: Message, h0: PermutationHash, options: SchemeConfig) -> Partitioned:
    """Groups a message's pairs by partition: by Algorithm 1, or by a sort if `hash_rounds` is 0."""
    indices_K, values_K = entries(message)
    if options.hash_rounds == 0:
        return split(h0, indices_K, values_K)
    return hierarchical_hash(h0, indices_K, values_K, rehashes=options.hash_rounds, seed=HASH_SEED)


def _push(
    identity: Identity,
    pushed: list[torch.Tensor],
    partitions: list[PartitionRecord],
    sums: SparseSum,
    group: Subgroup,
) -> Generator[Yielded, None, torch.Tensor]:
    """Agrees on sizes and runs the Push; returns the fp32 sums of this rank's partition.

    `pushed`: the encoded records for each server. `partitions`: the layout of each server's
    records. The result is by position in the partition, [P].
    """
    n, rank, exchange = group.world_size, group.rank, sums.exchange
    own = partitions[rank]
    own_sizes = [record.numel() for record in pushed]
    table = yield from exchange_sizes(own_sizes, identity, exchange.transport)
    sizes = [row[rank] for row in table]
    check_sizes(sizes, [own.capacity] * n, range(n))
    received = list(sums.take("received", sum(sizes)).split(sizes))
    received[rank] = pushed[rank]
    yield from pairwise_all_to_all(pushed, received, group, last=False)
    with exchange.timer.stage("decode"):
        sum_P = sums.take("partition", own.positions, torch.float32).zero_()
        for sender, record in enumerate(received):
            hash_pairs.accumulate_(sum_P, record, own, sender)
    return sum_P


def _pull(
    identity: Identity,
    own: torch.Tensor,
    partitions: list[PartitionRecord],
    sums: SparseSum,
    group: Subgroup,
) -> Phase:
    """Runs the Pull: every server sends its encoded sums to all, which decode them into `sums`.

    Decodes this rank's own sums (`own`) too, so that they are rounded here as on all other ranks.
    `partitions`: the layout of each server's records.
    """
    exchange = sums.exchange
    table = yield from exchange_sizes([own.numel()], identity, exchange.transport)
    sizes = [row[0] for row in table]
    check_sizes(sizes, [each.capacity for each in partitions], range(len(partitions)))
    with exchange.timer.stage("decode"):
        sums.sum_N.zero_()  # the bitmaps' decoder adds

    def arrived(server: int, record: torch.Tensor) -> None:
        """Decodes a server's sums into their elements of the bucket."""
        with exchange.timer.stage("decode"):
            hash_bitmap.decode_add_(sums.sum_N, record, partitions[server], rank=server)

    room = sums.take("gathered", sum(sizes) - own.numel())
    yield from pairwise_all_gather(own, room, sizes, group, arrived)


def cost(run: DryRun) -> None:
    """Predicts the time of `zen`, in which all servers carry the same load.

    ZEN's equation 1, Balanced Parallelism: (n - 1) / n (d + D) 2 M / B for COO, with the density d
    of a message and D of the sum of n ranks, M bytes of a dense bucket, bandwidth B (skewness 1).
    Added: bytes of the real records; n - 1 rounds of alpha in Push and Pull; the cut by hash;
    encoding, and adding one message after the other; clearing the bucket before the Pull's sums.
    """
    n, numel, codec_s = run.n, run.shape.numel, run.cluster.codec_s
    kept = run.shape.kept_numel / numel if numel else 0.0
    # Elements that are always sent whole travel among the pairs too.
    density, sum_density = (kept + (1 - kept) * run.densities.whole(ranks) for ranks in (1, n))
    positions = numel / n  # elements of a partition
    run.work(codec_s(CodecOp.PARTITION, "pairs", numel, density, run.b))
    run.work(n * codec_s(CodecOp.ENCODE, "pairs", positions, density, run.b))
    run.agree()
    pushed_bytes = float(push_bytes(positions, density, run.b))
    send_shards_cost(run, pushed_bytes)
    run.work(run.clearing_s(positions))
    run.work(n * codec_s(CodecOp.DECODE_ADD, "pairs", positions, density, run.b))
    run.work(codec_s(CodecOp.ENCODE, "hash_bitmap", positions, sum_density, run.b))
    run.agree()
    run.work(run.clearing_s(numel))
    decoding_s = codec_s(CodecOp.DECODE_ADD, "hash_bitmap", positions, sum_density, run.b)
    pulled_bytes = float(pull_bytes(positions, sum_density, run.b))
    gather_sums_cost(run, pulled_bytes, decoding_s)


SCHEME = Scheme(
    NAME,
    Input.SPARSE,
    run=zen,
    place=150,
    cost=cost,
    ops=ALL_REDUCE_ONLY,
    own_format="coo",
    waits_on_cuda=True,
)
