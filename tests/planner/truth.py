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

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from megatron_sparse.bench.exchange.case import BucketCase, BucketPath, virtual_groups
from megatron_sparse.bench.exchange.options import CollectiveSweep
from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES, Input
from megatron_sparse.config.level import NODE, RANK
from megatron_sparse.errors import ConfigError
from megatron_sparse.formats.hash_record import SUB_HEADER_BYTES
from megatron_sparse.formats.header import Header
from megatron_sparse.pricing.cluster import ClusterModel
from megatron_sparse.recording import BucketRecord
from megatron_sparse.reduction.level_choice import LevelChoice
from megatron_sparse.reduction.reducer import Groups
from megatron_sparse.simulate.pricing import ChargingTimer, Measure, moved_bytes
from megatron_sparse.transport import Topology, VirtualCluster
from megatron_sparse.transport.topology import members_of
from megatron_sparse.transport.virtual import VirtualTransport
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

SWEEP = CollectiveSweep()
"""Messages in the format that is smallest, of sizes that travel with them."""
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


@dataclass(frozen=True, eq=False)
class TruthSetting:
    """Where and how a collective runs.

    Attributes:
        cluster: its links and its host; its codec table is not looked at.
        world_size: ranks.
        codec_rate: bytes a second that local work reads and writes; None makes it free.
        op: all-reduce or reduce-scatter.
        full_numel: elements of the bucket that the simulated one represents.
    """

    cluster: ClusterModel
    world_size: int
    codec_rate: float | None
    op: CollectiveOp
    full_numel: int

    @property
    def topology(self) -> Topology:
        """Nodes and links."""
        return self.cluster.topology(self.world_size)

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


def run(
    scheme: str, gradients: Sequence[torch.Tensor], setting: TruthSetting, level: str = RANK
) -> VirtualTiming:
    """Runs one bucket on all ranks' gradients, through the reducer of training.

    Args:
        scheme: a name in `SCHEMES`.
        gradients: fp32, one for each rank, mostly zeros; all that is not zero is selected. Not
            mutated.
        setting: where.
        level: `rank`, or `node`: nodes add up first, dense.

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
    if SCHEMES[scheme].takes is Input.DENSE and level == RANK:
        return _run_dense(scheme, len(gradients), setting)
    return _run(scheme, gradients, setting, level)


@lru_cache(maxsize=4096)
def _run_dense(scheme: str, world_size: int, setting: TruthSetting) -> VirtualTiming:
    # All that they send and add grows with the bucket; any number of equal shards will do.
    numel = min(PICI_TILE, setting.full_numel // world_size) * world_size
    return _run(scheme, [torch.ones(numel)] * world_size, setting, RANK)


def _run(
    scheme: str, gradients: Sequence[torch.Tensor], setting: TruthSetting, level: str
) -> VirtualTiming:
    n, numel = len(gradients), gradients[0].numel()
    case = BucketCase(setting.op, scheme, "fp32", 1.0, numel, level=level)
    cluster = FullSizeCluster(n, setting.topology, message_scale=setting.full_numel / numel)
    members = members_of(setting.topology.nodes) if level == NODE else []
    choice = LevelChoice(level, "as asked", tuple(map(tuple, members)))
    groups = virtual_groups(cluster, choice)
    paths = [BucketPath(case, SWEEP, _hosted(each, setting)) for each in groups]
    timers = [ChargingTimer(each, setting.price(numel)) for each in cluster.transports]

    def start(transport: VirtualTransport) -> Generator[Any, None, BucketRecord]:
        rank = transport.rank
        path, bucket = paths[rank], case.bucket(gradients[rank].clone(), n)
        if SCHEMES[scheme].takes is Input.SPARSE:  # memory taken once is no cost of a step
            path.residuals.begin(path.reducer.part(bucket))
        return path.steps(bucket, 0, timers[rank])

    cluster.run(start)
    total_s = cluster.modelled_s + setting.cluster.host_s_per_bucket
    return VirtualTiming(total_s, max(timer.charged_s for timer in timers))


def _hosted(groups: Groups, setting: TruthSetting) -> Groups:
    """The groups of a rank whose messages across cost its host time."""

    def hosted(transport: Any) -> Any:
        return HostedTransport(transport, setting.cluster.host_s_per_message)

    if groups.level is None:
        return replace(groups, data_parallel=hosted(groups.data_parallel))
    return replace(groups, level=replace(groups.level, across=hosted(groups.level.across)))


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
