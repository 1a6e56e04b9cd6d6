"""Times a bucket at level `node` on a virtual cluster with held-out prices: a MODEL.

The steps inside the nodes are those of training (`reduction.level`), on groups of the virtual
cluster; across runs the collective, as in `truth`. All lanes share the clock and the
network cards. Each node's gradient is on one of its ranks and the others' are zero, so that a
node's sum has the density that is asked for. All lanes have the same: in training each of them
selects the target density from its own part.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from megatron_sparse.bench.exchange.path import virtual_groups
from megatron_sparse.bench.exchange.truth import (
    FullSizeCluster,
    HostedTransport,
    Setting,
    VirtualTiming,
    steps_of,
)
from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import Exchange
from megatron_sparse.compression.schedule import Phase
from megatron_sparse.config.level import NODE
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.recording import BucketRecord
from megatron_sparse.reduction.job import without_gates
from megatron_sparse.reduction.level import NodeLevel
from megatron_sparse.reduction.level_choice import LevelChoice
from megatron_sparse.simulate.pricing import ChargingTimer
from megatron_sparse.transport.topology import members_of
from megatron_sparse.transport.virtual_rank import VirtualTransport


def run_at_node(scheme: str, parts: Sequence[torch.Tensor], setting: Setting) -> VirtualTiming:
    """Runs one collective across the nodes, and the dense steps inside them.

    Args:
        scheme: a name in `SCHEMES`.
        parts: of each node, fp32; see `truth.run`. Every part of a node's sum is this one.
            Not mutated.
        setting: the topology has nodes of one size; `full_numel` is that of the whole bucket.

    Raises:
        MegatronSparseError: the collective failed.
    """
    topology = setting.topology
    n, lanes = topology.world_size, topology.node_sizes[0]
    numel = lanes * parts[0].numel()
    scale = setting.full_numel / numel
    price = setting.price(numel)
    cluster = FullSizeCluster(n, topology, message_scale=scale)
    members = tuple(map(tuple, members_of(topology.nodes)))
    groups = virtual_groups(cluster, LevelChoice(NODE, "as asked", members))
    timers: list[ChargingTimer] = []

    def start(transport: VirtualTransport) -> Generator[Any, None, int]:
        rank = transport.rank
        timer = ChargingTimer(transport, price)
        timers.append(timer)
        own, own_N = groups[rank].level, torch.zeros(numel)
        assert own is not None, "level node was asked for"
        if own.inside.rank == 0:
            own_N = _of_parts(parts[topology.nodes[rank]], lanes, setting)
        bucket = Bucket("truth", own_N, [ParameterSlice("w", 0, numel)], setting.op, n)
        buffers = MessageBuffers()
        virtual = cast("VirtualTransport", own.across)
        lane: Any = HostedTransport(virtual, setting.host_s_per_message)
        level = NodeLevel(replace(own, across=lane), setting.options, buffers)
        record = BucketRecord("truth", 0, scheme, Phase.TARGET, 1.0, numel, timer=timer)
        yield from without_gates(level.inside(bucket, record))
        exchange = Exchange(level.part(bucket), lane, buffers, timer, setting.options)
        steps = level.after(steps_of(scheme, exchange), exchange, bucket, record)
        return (yield from without_gates(steps))

    cluster.run(start)
    total_s = cluster.modelled_s + setting.host_s_per_bucket
    return VirtualTiming(total_s, max(timer.charged_s for timer in timers))


def _of_parts(part: torch.Tensor, lanes: int, setting: Setting) -> torch.Tensor:
    """A gradient whose parts, as `reduction.level` cuts them, are all equal to `part`."""
    if setting.op is CollectiveOp.ALL_REDUCE:
        return part.repeat(lanes)
    nodes = len(setting.topology.node_sizes)
    return part.view(nodes, 1, -1).expand(nodes, lanes, -1).flatten()
