"""ZEN's Balanced Parallelism (sections 3.1 to 3.3): shards by hash, so all carry the same load.

Rank i is the server of partition i: of the elements that a hash h0, common to all ranks, maps to i
(`formats.hash_partition`). Wherever the non-zero elements of a gradient lie, every server gets
about as many of them, so with M of them the imbalance ratios of Push and Pull (definition 8) are
1 + O(sqrt(n log n / M)) (theorem 2). With `direct`'s contiguous shards the server of a crowded one
would be everybody's bottleneck.

Agreement: one all-gather of what is meant, hash included, and of every rank's n record sizes,
8 (2 + n) bytes a rank.
Push, n - 1 rounds: a rank cuts what it has selected by partition (Algorithm 1, or a sort) and sends
each server its pairs of index and value, one peer at a time. The server adds them up in rank order,
in fp32.
Pull: sizes are all-gathered (as many bytes), and in n - 1 rounds each server sends its sums to
every other rank, as a hash bitmap (Algorithm 2).

Rank r sends its n - 1 push records, K (4 + b) bytes for K pairs and 80 for headers each, and
(n - 1) times its pull record, N / (8 n) bytes and b for each sum that is not zero, and 80.

There is no reduce-scatter: its shards are contiguous, these are not. What is always sent whole
travels among the pairs: 4 bytes more for each such element.

Deviations: by default h0 is a permutation, which needs no index sets (`scheme.partition_hash`);
a push record is a bitmap or dense where that is smaller (`formats.hash_pairs`), and a pull record
dense; h0 depends on `scheme.hash_seed`, which ranks agree on, instead of seeds that are broadcast.
On CUDA it needs the compiled kernels, and the host waits for the device at every check.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import cache

import torch

from megatron_sparse.bucket import MAX_SEGMENT_NUMEL, Bucket
from megatron_sparse.collectives.base import (
    Phase,
    Steps,
    Subgroup,
    Yielded,
    exchange_sizes,
    tag_of,
    whole_group,
)
from megatron_sparse.collectives.gather import pairwise_all_gather, pairwise_all_to_all
from megatron_sparse.collectives.options import SchemeOptions
from megatron_sparse.collectives.records import SparseSum, impossible_size, is_possible
from megatron_sparse.errors import ConfigError
from megatron_sparse.formats import hash_bitmap, hash_pairs
from megatron_sparse.formats.codec_choice import is_compiled
from megatron_sparse.formats.entries import entries
from megatron_sparse.formats.hash_partition import IndexSetHash, PartitionHash, PermutationHash
from megatron_sparse.formats.hash_record import PartitionRecord
from megatron_sparse.formats.hierarchical_hash import Partitioned, hierarchical_hash, split
from megatron_sparse.formats.message import VALUE_DTYPES, Message, MessageBuffers
from megatron_sparse.recording import StageTimer
from megatron_sparse.transport import Transport

NAME = "zen"


def zen(
    bucket: Bucket,
    message: Message,
    transport: Transport,
    buffers: MessageBuffers,
    timer: StageTimer,
    options: SchemeOptions,
) -> Steps:
    """Writes the exact sum of all ranks' messages into `bucket.grad_N`.

    Sums are fp32 and rounded once, to nearest even, where values travel narrower.

    Args:
        bucket: receives the sum.
        message: this rank's contribution, of COO and dense records.
        transport: the group.
        buffers: where received records and sums live.
        timer: receives the encode and decode time.
        options: the partition hash, and how to cut by it.

    Raises:
        ConfigError: the bucket is too large, or on a CUDA device for which there are no compiled
            kernels; before anything is sent.
        CommunicationError: ranks disagree about the bucket, scheme, hash, dtype or step.
        WireFormatError: a peer's record is not what was announced.
    """
    _check(bucket)
    scheme = f"{NAME} {options.partition_hash}/{options.hash_seed}"
    group = whole_group(transport, tag_of(bucket, scheme, message.value_dtype, message.epoch))
    n = group.world_size
    h0 = _partition_hash(options.partition_hash, bucket.numel, n, options.hash_seed)
    dtype = VALUE_DTYPES[message.value_dtype]
    places = [PartitionRecord(h0, server, dtype, 0, message.epoch) for server in range(n)]
    with timer.stage("encode"):
        parts = _cut(message, h0, options)
        pushed = [hash_pairs.encode(*parts.of(place.partition), place) for place in places]
    sums = SparseSum(bucket, message, buffers, timer)
    own_P = yield from _push(scheme, bucket, message, pushed, places, sums, group, transport, timer)
    with timer.stage("encode"):
        own = hash_bitmap.encode(own_P.to(dtype), h0, group.rank, offset=0, epoch=message.epoch)
    yield from _pull(scheme, bucket, message, own, places, sums, group, transport, timer)
    sums.write(slice(None))
    return group.sent_bytes


def _check(bucket: Bucket) -> None:
    if not is_compiled(bucket.grad_N.device):
        raise ConfigError(
            f"bucket {bucket.name}: scheme.name={NAME} needs the compiled kernels",
            expected="the extension's CUDA part, compiled for this GPU",
            got=f"none for {bucket.grad_N.device}",
            remedy="see megatron-sparse doctor; or choose another scheme: direct is the nearest",
        )
    if bucket.numel > MAX_SEGMENT_NUMEL:
        raise ConfigError(
            f"bucket {bucket.name} is too large for scheme.name={NAME}",
            expected=f"at most {MAX_SEGMENT_NUMEL} elements",
            got=bucket.numel,
            remedy="make buckets smaller (Megatron: --ddp-bucket-size), or choose another scheme",
        )


@cache
def _partition_hash(kind: str, numel: int, partitions: int, seed: int) -> PartitionHash:
    """Made once for each size of bucket: index sets take time and memory, and never change."""
    return {"permutation": PermutationHash, "general": IndexSetHash}[kind](numel, partitions, seed)


def _cut(message: Message, h0: PartitionHash, options: SchemeOptions) -> Partitioned:
    indices_K, values_K = entries(message)
    if options.hash_rounds == 0:
        return split(h0, indices_K, values_K)
    return hierarchical_hash(
        h0, indices_K, values_K, rehashes=options.hash_rounds, seed=options.hash_seed
    )


def _push(
    scheme: str,
    bucket: Bucket,
    message: Message,
    pushed: list[torch.Tensor],
    places: list[PartitionRecord],
    sums: SparseSum,
    group: Subgroup,
    transport: Transport,
    timer: StageTimer,
) -> Generator[Yielded, None, torch.Tensor]:
    """The agreement and the Push; returns the fp32 sums of this rank's partition, by position."""
    n, rank = group.world_size, group.rank
    own = places[rank]
    table = yield from exchange_sizes(
        [record.numel() for record in pushed],
        bucket,
        scheme,
        message.value_dtype,
        message.epoch,
        transport,
    )
    sizes = [row[rank] for row in table]
    _check_sizes(sizes, [own] * n)
    received = list(sums.take("received", sum(sizes)).split(sizes))
    received[rank] = pushed[rank]
    yield from pairwise_all_to_all(pushed, received, group, last=False)
    with timer.stage("decode"):
        sum_P = sums.take("partition", own.positions, torch.float32).zero_()
        for sender, record in enumerate(received):
            hash_pairs.accumulate_(sum_P, record, own, sender)
    return sum_P


def _pull(
    scheme: str,
    bucket: Bucket,
    message: Message,
    own: torch.Tensor,
    places: list[PartitionRecord],
    sums: SparseSum,
    group: Subgroup,
    transport: Transport,
    timer: StageTimer,
) -> Phase:
    """Leaves the sums of all partitions in `sums`, this rank's own as the others see it."""
    table = yield from exchange_sizes(
        [own.numel()], bucket, scheme, message.value_dtype, message.epoch, transport
    )
    sizes = [row[0] for row in table]
    _check_sizes(sizes, places)
    sums.clear()

    def arrived(server: int, record: torch.Tensor) -> None:
        place = places[server]
        with timer.stage("decode"):
            hash_bitmap.decode_add_(
                sums.sum_N,
                record,
                place.partition_hash,
                server,
                place.value_dtype,
                offset=place.offset,
                epoch=place.epoch,
                rank=server,
            )

    room = sums.take("gathered", sum(sizes) - own.numel())
    yield from pairwise_all_gather(own, room, sizes, group, arrived)


def _check_sizes(sizes: list[int], places: list[PartitionRecord]) -> None:
    """Refuses sizes that no record has, before memory is taken for them."""
    for rank, (size, place) in enumerate(zip(sizes, places, strict=True)):
        if not is_possible(size, place.capacity):
            raise impossible_size(rank, size, place.capacity)
