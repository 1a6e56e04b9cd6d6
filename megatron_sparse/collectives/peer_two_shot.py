"""Two-shot sparse all-reduce and reduce-scatter over peer memory: no host in the loop.

`direct` inside an NVLink domain, as kernels (`csrc/peer.cu` lists what each reads and writes). A
rank puts its message into its own window. Owners add the shards of all windows in rank order and
encode the sum once. All ranks read the sum there. No size is exchanged and the host knows none: it
launches about a dozen kernels and reads 72 bytes of error words at the end. The device decides the
format of each shard, by `scheme.ring_intra_density` for messages and `ring_gather_density` for
sums (SpCCL's thresholds). The result is bit for bit that of `direct`.

It needs windows that were made beforehand for all buckets of the group (`peer_windows`). They are
`Exchange.windows`. The transport moves nothing.

Rank r reads from its peers about |shard_r of their messages| and all sums but its own. These are
the bytes that `direct` sends; ranks meet twice.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives.base import POSTED, QUEUED, Exchange, Steps
from megatron_sparse.collectives.buffer_sizes import no_buffers
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.cuda_ext.peer_ops import Operation, PeerLayout
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.errors import ConfigError
from megatron_sparse.formats.message import FORMAT_CODES, WIRE_CODES, Message
from megatron_sparse.pricing.cluster import CodecOp
from megatron_sparse.pricing.dry_run import DryRun
from megatron_sparse.pricing.records import Density, Piece, RecordFormat
from megatron_sparse.pricing.shape import FP32_BYTES

NAME = "peer_two_shot"


def peer_layout(bucket: Bucket, value_dtype: str, form: str) -> PeerLayout:
    """The bucket's layout in windows.

    Args:
        bucket: cut into the shards of its ranks in both collective ops.
        value_dtype: of records: fp32, bf16 or fp16.
        form: of sums, as `scheme.format`.
    """
    layout = bucket.layout(sharded=True)
    return PeerLayout.of(
        layout.segment_offsets,
        layout.segment_keep,
        layout.shard_segments,
        WIRE_CODES[value_dtype],
        FORMAT_CODES[form],
    )


def peer_two_shot(exchange: Exchange, message: Message) -> Steps:
    """Writes the exact sum of all ranks' messages into `exchange.bucket`.

    Sums are fp32 in rank order; an all-reduce rounds them to the message's dtype, a reduce-scatter
    to the gradient's.

    Args:
        exchange: the bucket, and the windows; this process runs one of their ranks. The timer
            counts the time of all kernels as `network`.
        message: this rank's contribution, cut into shards, with or without slots.

    Raises:
        ConfigError: there are no windows, or they were not made for this bucket.
        CommunicationError: a rank did not come in time; every rank names the same one.
        WireFormatError: a rank's records are wrong.
    """
    bucket, peers = exchange.bucket, exchange.windows
    if peers is None:
        raise ConfigError(
            f"bucket {bucket.name}: {NAME} without windows of peer memory",
            expected="windows, made for a group of GPUs of one machine when a model was attached",
            got=f"none, on {exchange.transport.device.type}",
            remedy="use scheme.name=direct, which does the same over any process group",
        )
    layout = peers.layouts.get(bucket.name)
    own = (bucket.numel, WIRE_CODES[message.value_dtype])
    if layout is None or (layout.numel, layout.value_dtype) != own:
        raise ConfigError(
            f"bucket {bucket.name}: the windows were made for other buckets",
            expected=f"one of {len(peers.layouts)} buckets, with elements and dtype as they were",
            got=f"{bucket.name} with {bucket.numel} {message.value_dtype} values",
            remedy="attach again after the last change of buckets or dtypes",
        )
    rank = peers.domain.first_rank
    scatter = exchange.scatters
    operation = Operation.REDUCE_SCATTER if scatter else Operation.ALL_REDUCE
    out = bucket.grad_N[bucket.shard(rank)] if scatter else bucket.grad_N
    intra, _, gather = exchange.options.ring_densities()
    with exchange.timer.stage("network"):
        peers.run(
            operation,
            bucket.name,
            [message.buffer[: message.nbytes]],
            [out],
            message.step,
            densities=(intra, gather),
            message_slots=None if message.slots is None else message.slots.offsets,
        )
    yield POSTED
    reports = message.reports if message.reports is not None else Reports()
    peers.report(reports, bucket.name, message.step)
    read = reports.begin_read()
    if not read.ready():
        yield QUEUED
        yield read
    read.finish()
    return sent_bytes(message, rank)


def sent_bytes(message: Message, rank: int) -> int:
    """Bytes of this rank's message that other ranks read; with slots, the slots' sizes."""
    sizes = torch.tensor(message.shard_bytes())
    return int(sizes.sum() - sizes[rank])


def cost(run: DryRun) -> None:
    """Owners read and add their shards, then all ranks read all sums: a MODEL, never measured.

    With shard i of m(i) bytes in a message of m, shard i of the sum of s(i) bytes, and beta of the
    links inside a node:

        put     2 m bytes through a rank's own memory: its message into its window
        meet    alpha
        add     max((n - 1) m(i) beta, n additions of shard i), by its owner
        encode  the sum of shard i, by its owner
        meet    alpha
        write   max(beta times all s but the own, decoding of all s)

    A reduce-scatter ends after `add`. Records are added while they are read, so the slower of the
    two counts. Passes over memory cost what the cluster file has for codecs on the same records.
    Sums are dense from `scheme.ring_gather_density` on. No sizes are agreed on, and slots are not
    read beyond their records. Left out: launches (they are in the cluster's `host_s_per_bucket`),
    and the copies of `in_order_of_coming`.
    """
    n, shard = run.n, run.piece(run.n)
    if n == 1:
        return
    beta_s = run.clocks.topology.intra.beta_s
    form = run.messages(SCHEME.message_format(run.options))
    own_n = run.densities.shards(1, n)
    message_n = np.broadcast_to(form.nbytes(shard, own_n, run.b), n)
    run.work(run.plain(CodecOp.COPY, float(message_n.sum()) / FP32_BYTES))
    run.clocks.everybody_at_once(0.0)
    adding_n = form.seconds(CodecOp.DECODE, shard, own_n, run.b) + (n - 1) * form.seconds(
        CodecOp.DECODE_ADD, shard, own_n, run.b
    )
    _read_cost(run, (n - 1) * message_n * beta_s, adding_n)
    if run.scatter:
        return
    sums_n3 = np.array([_of_sum(run, shard, float(d)) for d in run.densities.shards(n, n)])
    bytes_n, encoding_n, decoding_n = sums_n3.T
    run.work(encoding_n)
    run.clocks.everybody_at_once(0.0)
    _read_cost(run, (bytes_n.sum() - bytes_n) * beta_s, decoding_n.sum())


def _of_sum(run: DryRun, shard: Piece, density: float) -> tuple[float, float, float]:
    """Bytes of the sum's record of a shard, and the seconds of encoding and decoding it."""
    *_, gather = run.options.ring_densities()
    name = "dense" if density >= gather else run.options.format
    form = RecordFormat(name, run.cluster)
    seconds = [
        float(form.seconds(op, shard, density, run.b)) for op in (CodecOp.ENCODE, CodecOp.DECODE)
    ]
    return float(form.nbytes(shard, density, run.b)), seconds[0], seconds[1]


def _read_cost(run: DryRun, network_n: Density, local_n: Density) -> None:
    """Time of a read over the links and of the local work that overlaps it: the longer one."""
    run.clocks.work(np.maximum(network_n, run.local(local_n)))


SCHEME = Scheme(
    NAME,
    Input.SPARSE,
    run=peer_two_shot,
    place=200,
    cost=cost,
    buffers=no_buffers,
    needs_shards=True,
    takes_slots=True,
    needs_windows=True,
)
