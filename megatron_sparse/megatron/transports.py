"""Makes the transports of one attached model: one for each group of ranks that it uses.

A transport sends and receives tensors among the ranks of one group, over gloo or NCCL.
"""

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
        """Makes a transport over a group of ranks. Collective over them.

        Args:
            group: a process group, or the global ranks.
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
        """Chooses the level of compression of a data-parallel group, and makes its transports.

        Collective over the data-parallel ranks. Adds the choice to `lines`, and rank 0 logs it,
        unless `compression.level=rank`.

        Args:
            group: any bucket group of the data-parallel group.
            buckets: of all its bucket groups. With `planner.cluster` the level is chosen by the
                predicted time of synchronising them.
        """
        config = self._config
        # Ranks that own the same shard in the instances of Megatron's distributed optimizer.
        owners = group.instances_group
        instance_count = 1 if owners is None else dist.get_world_size(owners)
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
            assert owners is not None, "choose_level needs several instances for this level"
            # Ranks of an instance add up densely; then instances exchange selections of the sums.
            level = LevelGroups(whole, self.make(owners, nccl_engine=engine), INSTANCE)
            return Groups(whole, level=level)
        instances = None if owners is None else self.make(owners)
        if choice.level != NODE:
            return Groups(whole, instances)
        # Global ranks of this rank's node, and of its lane, which has one rank of each node.
        ranks = dist.get_process_group_ranks(group.process_group)
        node = [ranks[member] for member in choice.inside(whole.rank)]
        lane = [ranks[member] for member in choice.across(whole.rank)]
        # Every rank makes its node's group first: making a group is collective.
        inside = self.make(node)
        across = self.make(lane, nccl_engine=engine)
        return Groups(whole, instances, LevelGroups(inside, across))

    def close(self, *, broken: bool) -> None:
        """See `ProcessGroupTransport.close`."""
        for transport in self._made:
            transport.close(broken=broken)
