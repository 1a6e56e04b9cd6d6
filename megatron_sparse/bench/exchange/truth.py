"""Times a collective by running it on a virtual cluster with held-out prices: a MODEL.

Planners and cost models are compared with this. Every rank selects from its gradient, encodes,
sends, decodes and adds, by the registered collective; the network is the cluster's alpha-beta clock
(`VirtualCluster`) and local work is charged call by call (`ChargingTimer`): the bytes that the call
really moves, at the rate of a GPU's memory. No planner sees these charges: cost models interpolate
a cluster's table, which was made at other densities, sizes and vectors.

A bucket of some hundred thousand elements stands for one of any size, as in `simulate.pricing`;
here a record counts what it would have at full size, sections' padding and its one header included.
The number of elements should be a multiple of 4096 for each rank, so that shards have whole Pici
tiles. Shards of few non-zero elements differ more than they would at full size.

Dense schemes do not look at the gradients: they are run on few elements, once for each setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import SCHEMES, Exchange, Input
from megatron_sparse.collectives.base import Steps
from megatron_sparse.compression.residual import Outcome, ResidualStore
from megatron_sparse.compression.selection import MessageSpec, Selector
from megatron_sparse.config.compression import dense_value_bits
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.formats.hash_record import SUB_HEADER_BYTES
from megatron_sparse.formats.header import Header
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.pricing.cluster import ClusterModel
from megatron_sparse.pricing.densities import without_chance
from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.simulate.pricing import ChargingTimer, Measure, moved_bytes
from megatron_sparse.transport import Topology, VirtualCluster
from megatron_sparse.transport.virtual_rank import VirtualTransport
from megatron_sparse.wire import (
    BLOCKS_SUBHEADER,
    FORMAT_BLOCKS,
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_PICI,
    FORMAT_RICE,
    HEADER_BYTES,
    PICI_TILE,
    payload_bytes,
)

SMALL_NUMEL = 64
"""Tensors up to this size are offsets, sizes and states: they do not grow with the bucket."""


@dataclass(frozen=True)
class VirtualTiming:
    """The time of a collective on modelled clocks.

    Attributes:
        total_s: until the last rank was done.
        codec_s: local work of the rank that had most of it; part may be hidden behind the network.
    """

    total_s: float
    codec_s: float


class FullSizeCluster(VirtualCluster):
    """A virtual cluster that charges each record its bytes at full size."""

    def priced_bytes(self, data: torch.Tensor) -> float:
        """See `VirtualCluster`."""
        if data.dtype != torch.uint8:
            return super().priced_bytes(data)
        return full_size_bytes(data, self.message_scale)


def full_size_bytes(records: torch.Tensor, scale: float) -> float:
    """Bytes of some records if they had `scale` times the elements, at the same density."""
    total, position = 0.0, 0
    while position < records.numel():
        packed = records[position : position + HEADER_BYTES].numpy().tobytes()
        header = Header.unpack(packed, 0)
        position += HEADER_BYTES + header.payload_bytes
        total += HEADER_BYTES
        if header.format in (FORMAT_DENSE, FORMAT_COO, FORMAT_PICI):
            numel, nnz = round(header.numel * scale), round(header.nnz * scale)
            total += payload_bytes(header.format, numel, nnz, header.dtype)
        else:
            is_segment = header.format in (FORMAT_BLOCKS, FORMAT_RICE)
            fixed = BLOCKS_SUBHEADER.size if is_segment else SUB_HEADER_BYTES
            total += fixed + scale * (header.payload_bytes - fixed)
    return total


@dataclass(frozen=True)
class Setting:
    """The cluster and the options that a collective runs with.

    Attributes:
        topology: nodes and links; as many ranks as there are gradients.
        host_s_per_message: as of `ClusterModel`.
        host_s_per_bucket: as of `ClusterModel`.
        codec_rate: bytes a second that local work reads and writes; None makes it free.
        options: of the schemes.
        op: all-reduce or reduce-scatter.
        full_numel: elements of the bucket that the simulated one represents.
    """

    topology: Topology
    host_s_per_message: float
    host_s_per_bucket: float
    codec_rate: float | None
    options: SchemeConfig
    op: CollectiveOp
    full_numel: int

    @classmethod
    def on(
        cls,
        cluster: ClusterModel,
        world_size: int,
        codec_rate: float | None,
        options: SchemeConfig,
        op: CollectiveOp,
        full_numel: int,
    ) -> Setting:
        """On a cluster's links and with its host; its codec table is not looked at."""
        return cls(
            cluster.topology(world_size),
            cluster.host_s_per_message,
            cluster.host_s_per_bucket,
            codec_rate,
            options,
            op,
            full_numel,
        )

    def price(self, numel: int) -> Measure | None:
        """Seconds of an operation on a bucket of so few elements that stands for the whole."""
        if self.codec_rate is None:
            return None
        rate, scale = self.codec_rate, self.full_numel / numel

        def seconds(func: Any, args: tuple, kwargs: dict, result: Any) -> float:
            grows = func.namespace == "megatron_sparse" or _largest(args, kwargs) > SMALL_NUMEL
            return moved_bytes(func, args, kwargs, result) * (scale if grows else 1.0) / rate

        return seconds


def _largest(*values: Any) -> int:
    """Elements of the largest tensor in some arguments."""
    sizes = [0]
    for value in values:
        if isinstance(value, torch.Tensor):
            sizes.append(value.numel())
        elif isinstance(value, list | tuple):
            sizes.append(_largest(*value))
        elif isinstance(value, dict):
            sizes.append(_largest(*value.values()))
    return max(sizes)


def at_full_size(profile: SparsityProfile, numel: int) -> SparsityProfile:
    """A simulated bucket's profile as that of the bucket that it stands for.

    Less the skewness that only so few elements have; a bucket of full size has next to none.
    """
    return replace(without_chance(profile), numel=numel)


def run(scheme: str, gradients: Sequence[torch.Tensor], setting: Setting) -> VirtualTiming:
    """Runs one collective on all ranks' gradients.

    Args:
        scheme: a name in `SCHEMES`.
        gradients: fp32, one for each rank, mostly zeros; all that is not zero is selected. Not
            mutated.
        setting: where.

    Raises:
        ConfigError: the scheme has not this form; gradients of different sizes.
        MegatronSparseError: the collective failed.
    """
    numels = {gradient.numel() for gradient in gradients}
    if len(numels) != 1 or setting.op not in SCHEMES[scheme].ops:
        raise ConfigError(
            f"{scheme} cannot be run on a virtual cluster",
            expected="gradients of one size, and a form that the scheme has",
            got=f"{sorted(numels)} elements, {setting.op}",
        )
    if SCHEMES[scheme].takes is Input.DENSE:
        return _run_dense(scheme, len(gradients), setting)
    return _run(scheme, gradients, setting)


@lru_cache(maxsize=4096)
def _run_dense(scheme: str, world_size: int, setting: Setting) -> VirtualTiming:
    # All that they send and add grows with the bucket; any number of equal shards will do.
    numel = min(PICI_TILE, setting.full_numel // world_size) * world_size
    return _run(scheme, [torch.ones(numel)] * world_size, setting)


def _run(scheme: str, gradients: Sequence[torch.Tensor], setting: Setting) -> VirtualTiming:
    n, numel = len(gradients), gradients[0].numel()
    price = setting.price(numel)
    cluster = FullSizeCluster(n, setting.topology, message_scale=setting.full_numel / numel)
    timers: list[ChargingTimer] = []

    def start(transport: VirtualTransport) -> Steps:
        timer = ChargingTimer(transport, price)
        timers.append(timer)
        posting: Any = HostedTransport(transport, setting.host_s_per_message)
        whole = [ParameterSlice("w", 0, numel)]
        bucket = Bucket("truth", gradients[transport.rank].clone(), whole, setting.op, n)
        exchange = Exchange(bucket, posting, MessageBuffers(), timer, setting.options)
        return steps_of(scheme, exchange)

    cluster.run(start)
    total_s = cluster.modelled_s + setting.host_s_per_bucket
    return VirtualTiming(total_s, max(timer.charged_s for timer in timers))


def steps_of(scheme: str, exchange: Exchange) -> Steps:
    """Selects all that is not zero, and runs a collective. Overwrites `exchange.bucket`'s gradient.

    Args:
        scheme: a name in `SCHEMES`.
        exchange: its timer charges the work to the rank's clock.
    """
    bucket, options, entry = exchange.bucket, exchange.options, SCHEMES[scheme]
    if entry.takes is Input.DENSE:
        return entry.run(exchange, bucket.grad_N, 0)
    residuals = ResidualStore(torch.float32, undo=False, outcome=Outcome.ASSUMED)
    residuals.begin(bucket)  # Memory that a run takes once is no cost of a step.
    rank = exchange.transport.rank
    selector = Selector(CompressionConfig(), residuals, rank, exchange.buffers)
    message = selector.select(
        bucket,
        MessageSpec(
            1.0,
            format="rice" if entry.sends_whole else entry.message_format(options),
            block_size=options.block_size,
            sharded=entry.is_sharded(bucket.op),
            extra_cuts=entry.extra_cuts(bucket),
            value_bits=dense_value_bits(None) if entry.sends_whole else None,
            whole=entry.sends_whole,
        ),
        step=0,
        timer=exchange.timer,
    )
    return entry.run(exchange, message)


class HostedTransport:
    """A rank's transport whose messages cost its host time before they are posted.

    Args:
        transport: moves them.
        host_s: for each that the rank sends or receives, whichever are more in an exchange.
    """

    def __init__(self, transport: VirtualTransport, host_s: float) -> None:
        self._transport, self._host_s = transport, host_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def exchange(self, sends: Sequence[Any], receives: Sequence[Any], tag: int) -> Any:
        """See `Transport`."""
        counts = [sum(data.numel() > 0 for _, data in side) for side in (sends, receives)]
        self._transport.charge(self._host_s * max(counts))
        return self._transport.exchange(sends, receives, tag)

    def all_gather(self, gathered: torch.Tensor, own_M: torch.Tensor) -> Any:
        """See `Transport`."""
        self._transport.charge(self._host_s * (self._transport.world_size - 1))
        return self._transport.all_gather(gathered, own_M)
