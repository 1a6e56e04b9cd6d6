"""Times a bucket at level `node` on a virtual cluster with held-out prices: a MODEL.

The steps inside the nodes are those of training (`reduction.level`), on groups of the virtual
cluster; across runs the collective, as in `virtual_truth`. All lanes share the clock and the
network cards. Each node's gradient is on one of its ranks and the others' are zero, so that a
node's sum has the density that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from megatron_sparse.bench.cost_models.virtual_truth import (
    FullSizeCluster,
    HostedTransport,
    Setting,
    VirtualTiming,
    steps_of,
)
from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import Exchange
from megatron_sparse.collectives.base import Steps, Yielded
from megatron_sparse.compression.schedule import Phase
from megatron_sparse.errors import ConfigError
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.recording import BucketRecord
from megatron_sparse.reduction.job import GATE
from megatron_sparse.reduction.level import LevelGroups, NodeLevel
from megatron_sparse.simulate.pricing import ChargingTimer
from megatron_sparse.transport.topology import members_of
from megatron_sparse.transport.virtual_rank import VirtualTransport


def run_at_node(scheme: str, gradients: Sequence[torch.Tensor], setting: Setting) -> VirtualTiming:
    """Runs one collective across the nodes, and the dense steps inside them.

    Args:
        scheme: a name in `SCHEMES`.
        gradients: of each node, fp32; see `virtual_truth.run`. Not mutated.
        setting: the topology has nodes of one size.

    Raises:
        ConfigError: there is not one gradient for each node.
        MegatronSparseError: the collective failed.
    """
    topology, numel = setting.topology, gradients[0].numel()
    if len(gradients) != len(topology.node_sizes):
        raise ConfigError(
            "level node cannot be run on a virtual cluster",
            expected=f"a gradient for each of {len(topology.node_sizes)} nodes",
            got=len(gradients),
        )
    n, scale = topology.world_size, setting.full_numel / numel
    price = None if setting.prices is None else setting.prices.measure(scale)
    cluster = FullSizeCluster(n, topology, message_scale=scale)
    members = members_of(topology.nodes)
    inside, across = (
        {rank: each for group in groups for rank, each in _group(cluster, group)}
        for groups in (members, list(zip(*members, strict=True)))
    )
    timers: list[ChargingTimer] = []

    def start(transport: VirtualTransport) -> Steps:
        rank = transport.rank
        timer = ChargingTimer(transport, price)
        timers.append(timer)
        own = gradients[topology.nodes[rank]] if inside[rank].rank == 0 else gradients[0] * 0
        bucket = Bucket("truth", own.clone(), [ParameterSlice("w", 0, numel)], setting.op, n)
        buffers = MessageBuffers()
        lane: Any = HostedTransport(across[rank], setting.host_s_per_message)
        level = NodeLevel(LevelGroups(inside[rank], lane), setting.options, buffers)
        record = BucketRecord("truth", 0, scheme, Phase.TARGET, 1.0, numel, timer=timer)
        for yielded in level.inside(bucket, record):
            if yielded is not GATE:
                yield cast("Yielded", yielded)
        exchange = Exchange(level.part(bucket), lane, buffers, timer, setting.options)
        return (yield from level.after(steps_of(scheme, exchange), exchange, bucket, record))

    cluster.run(start)
    total_s = cluster.modelled_s + setting.host_s_per_bucket
    return VirtualTiming(total_s, max(timer.charged_s for timer in timers))


def _group(
    cluster: FullSizeCluster, ranks: Sequence[int]
) -> Iterator[tuple[int, VirtualTransport]]:
    """A group of the cluster's ranks, each with its transport there."""
    return zip(ranks, cluster.group(ranks), strict=True)


def lane_parts(
    gradients: Sequence[torch.Tensor], lanes: int, op: CollectiveOp
) -> list[torch.Tensor]:
    """The first lane's parts of each node's gradient, as `reduction.level` cuts them.

    Of a gradient whose entries lie at its beginning that is the densest lane, which ends last.
    """
    if op is CollectiveOp.ALL_REDUCE:
        return [gradient[: gradient.numel() // lanes] for gradient in gradients]
    shards = len(gradients) * lanes
    return [gradient.view(shards, -1)[::lanes].flatten() for gradient in gradients]
