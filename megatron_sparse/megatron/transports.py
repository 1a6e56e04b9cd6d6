"""The transports of one attachment: one for each of Megatron's groups that it uses."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_sparse.bucket import Bucket
from megatron_sparse.config.level import INSTANCE, NODE, RANK
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.megatron.buckets import GroupBuckets
from megatron_sparse.planner.levels import shapes_of
from megatron_sparse.reduction.level import LevelGroups
from megatron_sparse.reduction.level_choice import choose_level
from megatron_sparse.reduction.reducer import Groups
from megatron_sparse.transport import ProcessGroupTransport

logger = logging.getLogger("megatron_sparse")


class Transports:
    """Makes transports, and closes all of them.

    Args:
        config: timeouts, how dead ranks are noticed, and the level of compression.
        device: of the gradients.

    Attributes:
        lines: the levels of compression and why, in words; none with `compression.level=rank`.
    """

    def __init__(self, config: SparseConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self.lines: list[str] = []
        self._made: list[ProcessGroupTransport] = []

    def make(
        self, group: dist.ProcessGroup | Sequence[int], *, nccl_engine: bool = False
    ) -> ProcessGroupTransport:
        """A transport over the ranks of a group, or over global ranks. Collective over them.

        Args:
            group: the ranks.
            nccl_engine: see `ProcessGroupTransport`.
        """
        scheme = self._config.scheme
        transport = ProcessGroupTransport(
            group,
            scheme.timeout_s,
            self._device,
            liveness=scheme.watch_peers,
            nccl_engine=nccl_engine,
        )
        self._made.append(transport)
        return transport

    def groups_of(self, group: GroupBuckets, buckets: Sequence[Bucket]) -> Groups:
        """Makes the groups with which buckets of a data-parallel group are synchronised.

        Chooses the level of compression for them, and notes it in `lines`.

        Collective over their data-parallel ranks. Rank 0 of them logs the level of compression,
        unless `compression.level=rank`.

        Args:
            group: any bucket group of that data-parallel group.
            buckets: of all its bucket groups; with `planner.cluster` their prices choose the level.
        """
        config = self._config
        others = group.instances_group
        instance_count = 1 if others is None else dist.get_world_size(others)
        engine = config.scheme.nccl_engine
        whole = self.make(group.process_group, nccl_engine=engine)
        choice = choose_level(config, whole.nodes, instance_count, shapes_of(buckets, config))
        if config.compression.level != RANK:
            line = f"gradients are compressed at level {choice.level}: {choice.reason}"
            if line not in self.lines:
                self.lines.append(line)
                if whole.rank == 0:
                    logger.info(line)
        if choice.level == INSTANCE:
            assert others is not None, "the choice needs several instances"
            # The sum inside an instance is compressed; the instances exchange selections.
            level = LevelGroups(whole, self.make(others, nccl_engine=engine), INSTANCE)
            return Groups(whole, level=level)
        instances = None if others is None else self.make(others)
        if choice.level != NODE:
            return Groups(whole, instances)
        ranks = dist.get_process_group_ranks(group.process_group)
        # This rank's node, and its lane, which has a rank of each node.
        node, lane = (
            [ranks[member] for member in members]
            for members in (choice.inside(whole.rank), choice.across(whole.rank))
        )
        # All ranks make their groups in this order.
        inside, across = self.make(node), self.make(lane, nccl_engine=engine)
        return Groups(whole, instances, LevelGroups(inside, across))

    def close(self, *, broken: bool) -> None:
        """See `ProcessGroupTransport.close`."""
        for transport in self._made:
            transport.close(broken=broken)
