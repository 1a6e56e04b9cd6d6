"""Two-shot sparse all-reduce and reduce-scatter over peer memory: no host in the loop.

`direct` inside an NVLink domain, as kernels (`csrc/peer.cu` says what each reads and writes): the
message goes to the rank's own window, owners add the shards of all windows in rank order and encode
the sum once, all ranks read it there. No size is exchanged and none is known to the host, which
launches about a dozen kernels and reads 72 bytes of error words at the end. Formats are decided for
each shard on the device, by `scheme.ring_intra_density` for messages and `ring_gather_density` for
sums (SpCCL's thresholds). The result is bit for bit that of `direct`.

It is no entry of `SCHEMES`: it needs `PeerMemory`, which a group's transport does not have, and
whose windows must have been made for the buckets. `with_peer_memory` joins the two.

Rank r reads from its peers about |shard_r of their messages| and all sums but its own: the same
bytes that `direct` sends, in two meetings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_sparse.bucket import Bucket, Form
from megatron_sparse.collectives.base import POSTED, Steps
from megatron_sparse.collectives.options import SchemeOptions
from megatron_sparse.cuda_ext.peer_ops import Operation, PeerLayout
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.errors import ConfigError
from megatron_sparse.formats.message import FORMAT_CODES, WIRE_CODES, Message, MessageBuffers
from megatron_sparse.recording import Stopwatch
from megatron_sparse.transport import Transport
from megatron_sparse.transport.peer_memory import PeerMemory, WindowProvider

NAME = "peer_two_shot"


def peer_layout(bucket: Bucket, value_dtype: str, form: str) -> PeerLayout:
    """The bucket's layout in windows.

    Args:
        bucket: cut into the shards of its ranks in both forms.
        value_dtype: of records: fp32, bf16 or fp16.
        form: of sums, as `scheme.format`.
    """
    layout = bucket.layout(sharded=True)
    return PeerLayout.of(
        layout.segment_offsets, layout.segment_keep, layout.shard_segments,
        WIRE_CODES[value_dtype], FORMAT_CODES[form],
    )  # fmt: skip


def with_peer_memory(
    transport: Transport,
    provider: WindowProvider,
    buckets: Sequence[Bucket],
    value_dtype: str,
    options: SchemeOptions,
    deadline_s: float,
    *,
    in_order_of_coming: bool = False,
) -> PeerMemory:
    """The windows for these buckets of a group. Collective; waits for the device.

    Args:
        transport: the group, whose ranks are those of the NVLink domain.
        provider: of the windows.
        buckets: all that will be synchronised.
        value_dtype: of their records.
        options: of the scheme.
        deadline_s: of each wait.
        in_order_of_coming: owners take shards as ranks come.

    Raises:
        ConfigError: the group is not on CUDA, or is not the provider's.
        HostError: the ranks cannot reach one another's memory.
    """
    if transport.device.type != "cuda" or provider.world_size != transport.world_size:
        raise ConfigError(
            f"{NAME} needs the memory of GPUs that reach one another",
            expected=f"a group of {provider.world_size} ranks on CUDA, all of one NVLink domain",
            got=f"{transport.world_size} ranks on {transport.device.type}",
            remedy="use scheme.name=direct, which does the same over any process group",
        )
    layouts = {b.name: peer_layout(b, value_dtype, options.format) for b in buckets}
    return PeerMemory(provider, layouts, deadline_s, in_order_of_coming=in_order_of_coming)


def peer_two_shot(
    bucket: Bucket,
    message: Message,
    peers: PeerMemory,
    buffers: MessageBuffers,
    watch: Stopwatch,
    options: SchemeOptions,
) -> Steps:
    """Writes the exact sum of all ranks' messages into `bucket.grad_N`.

    Sums are fp32 in rank order; an all-reduce rounds them to the message's dtype, a reduce-scatter
    to the gradient's.

    Args:
        bucket: receives the sum: all of it, or this rank's shard.
        message: this rank's contribution, cut into shards, with or without slots.
        peers: the windows; this process runs one rank.
        buffers: not used: what is received is read where it lies.
        watch: receives the time of all kernels, as `network`.
        options: thresholds and the format of sums.

    Raises:
        ConfigError: the windows were not made for this bucket.
        CommunicationError: a rank did not come in time; every rank names the same one.
        WireFormatError: a rank's records are wrong.
    """
    del buffers
    layout = peers.layouts.get(bucket.name)
    if layout is None or layout.value_dtype != WIRE_CODES[message.value_dtype]:
        raise ConfigError(
            f"bucket {bucket.name}: the windows were made for other buckets",
            expected=f"one of {len(peers.layouts)} buckets, with values as they were then",
            got=f"{bucket.name} with {message.value_dtype} values",
            remedy="make the windows for all buckets, after the last change of them",
        )
    rank = peers.domain.first_rank
    scatter = bucket.form is Form.REDUCE_SCATTER
    operation = Operation.REDUCE_SCATTER if scatter else Operation.ALL_REDUCE
    out = bucket.grad_N[bucket.shard(rank)] if scatter else bucket.grad_N
    intra, _, gather = options.ring_densities
    with watch.stage("network"):
        peers.run(
            operation, bucket.name, [message.buffer[: message.nbytes]], [out], message.epoch,
            densities=(intra, gather),
            message_slots=None if message.slots is None else message.slots.offsets,
        )  # fmt: skip
    yield POSTED
    reports = message.reports if message.reports is not None else Reports()
    peers.report(reports, bucket.name, message.epoch)
    read = reports.begin_read()
    if not read.ready():
        yield read
    read.finish()
    return sent_bytes(message, rank)


def sent_bytes(message: Message, rank: int) -> int:
    """Bytes of the own message that other ranks read, whose slots' sizes are what is known."""
    sizes = torch.tensor(message.shard_bytes())
    return int(sizes.sum() - sizes[rank])
