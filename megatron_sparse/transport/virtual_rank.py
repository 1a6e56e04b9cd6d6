"""One rank's side of a `VirtualCluster`: its transports, and its works."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatron_sparse.transport.base import ArrivalCounter, PeerTensors
from megatron_sparse.transport.nccl_communicator import NcclCommunicator
from megatron_sparse.transport.topology import Topology

TAG_OF_COLLECTIVES = -1
"""Of the whole cluster's all-gathers; those of `VirtualCluster.group` count down from it."""


class VirtualWork:
    """See `Work`. Done when the cluster has delivered everything that belongs to it.

    Args:
        rank: in the cluster.
        clock_s: the modelled clock of each rank of the cluster, in seconds.
        what: the operation, for errors.
    """

    def __init__(self, rank: int, clock_s: list[float], what: str) -> None:
        self.rank = rank
        self.what = what
        self.undelivered = 0
        self.done_s = clock_s[rank]
        self.waits_for: Counter[str] = Counter()
        self._clock_s = clock_s

    def ready(self) -> bool:
        """See `Work`."""
        return self.undelivered == 0

    def when_ready(self, wake: Callable[[], None]) -> None:
        """See `Work`; the cluster resumes the rank by itself."""

    def finish(self) -> None:
        """Advances the rank's modelled clock to the work's end."""
        assert self.ready(), "the cluster resumes a rank only when its work is done"
        self._clock_s[self.rank] = max(self._clock_s[self.rank], self.done_s)


ReductionKey = tuple[tuple[int, ...], int, int]
"""The ranks of a group, the tag of its collectives, and the number of the reduction in it."""


class Cluster(Protocol):
    """The part of a `VirtualCluster` that its ranks' transports use."""

    topology: Topology
    device: torch.device
    clock_s: list[float]

    def open_arrival_counter(self, rank: int, ranks: Sequence[int]) -> ArrivalCounter:
        """See `Transport`."""
        ...

    def post_half(
        self, work: VirtualWork, peer: int, data: torch.Tensor, tag: int, *, is_send: bool
    ) -> None:
        """Takes one side of a message."""
        ...

    def post_reduction(
        self, key: ReductionKey, work: VirtualWork, values_N: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Takes one rank's part of a group's reduction."""
        ...


class VirtualTransport:
    """See `Transport`; one rank of a `VirtualCluster`, or of a group of its ranks.

    Args:
        cluster: moves the messages.
        rank: in the group.
        ranks: the cluster's rank of each rank of the group, in order.
        tag: of the group's all-gathers, below 0.
    """

    def __init__(
        self, cluster: Cluster, rank: int, ranks: tuple[int, ...], tag: int = TAG_OF_COLLECTIVES
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.world_size = len(ranks)
        self.device = cluster.device
        self.nodes = tuple(cluster.topology.nodes[each] for each in ranks)
        self.communicator: NcclCommunicator | None = None
        self.may_post = True
        self._cluster = cluster
        self._own = ranks[rank]
        self._tag = tag
        self._reductions = 0

    def charge(self, seconds: float) -> None:
        """Adds local work to this rank's modelled clock."""
        self._cluster.clock_s[self._own] += seconds

    def open_arrival_counter(self) -> ArrivalCounter:
        """See `Transport`."""
        return self._cluster.open_arrival_counter(self._own, self.ranks)

    def all_reduce_(self, values_N: torch.Tensor) -> VirtualWork:
        """See `Transport`. Timed and counted as a ring; sums in rank order in the input dtype."""
        return self._reduce("all_reduce", values_N, values_N)

    def reduce_scatter(
        self, shard_M: torch.Tensor, values_N: torch.Tensor, *, average: bool = False
    ) -> VirtualWork:
        """See `Transport`. Timed and counted as a ring; sums in rank order in the input dtype."""
        assert not average, "only Megatron's own buckets are averaged by the backend"
        return self._reduce("reduce_scatter", values_N, shard_M)

    def all_gather(self, gathered: torch.Tensor, own_M: torch.Tensor) -> VirtualWork:
        """See `Transport`. Every rank sends directly to every other."""
        places = gathered.tensor_split(self.world_size)
        places[self.rank].copy_(own_M)
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        return self._post(
            "all_gather",
            [(peer, own_M) for peer in peers],
            [(peer, places[peer]) for peer in peers],
            self._tag,
        )

    def exchange(self, sends: PeerTensors, receives: PeerTensors, tag: int) -> VirtualWork:
        """See `Transport`."""
        assert tag >= 0, "tags are 0 to 2^31 - 1"
        return self._post("exchange", sends, receives, tag)

    def _post(self, what: str, sends: PeerTensors, receives: PeerTensors, tag: int) -> VirtualWork:
        assert self.may_post, f"rank {self.rank} posts {what} after it said that it would not"
        cluster = self._cluster
        work = VirtualWork(self._own, cluster.clock_s, what)
        for peer, data in receives:
            if data.numel():
                cluster.post_half(work, self.ranks[peer], data, tag, is_send=False)
        for peer, data in sends:
            if data.numel():
                cluster.post_half(work, self.ranks[peer], data, tag, is_send=True)
        return work

    def _reduce(self, kind: str, values_N: torch.Tensor, output: torch.Tensor) -> VirtualWork:
        assert self.may_post, f"rank {self.rank} posts {kind} after it said that it would not"
        work = VirtualWork(self._own, self._cluster.clock_s, kind)
        key = self.ranks, self._tag, self._reductions
        self._cluster.post_reduction(key, work, values_N, output)
        self._reductions += 1
        return work
