"""n ranks in one process: real messages and codecs, counted bytes, and a modelled clock.

Every message is really copied, so a collective computes the same here as over a network, and every
byte is counted on its directed link.

The time is a MODEL; label it so wherever you show it. A message of m bytes from a to b starts when
both ranks have posted it and both ports are free. It occupies the ports for beta m and arrives
after alpha + beta m; alpha and beta are those of the topology's link. Messages start in the order
of their modelled times. At equal times they start in the order in which the later of their two
ranks posted them. Local work costs nothing unless the caller charges it.

A real network shows some errors only by chance; here they always show. A receive buffer is
overwritten with 0xFF when it is posted, and filled at the last moment. A sent buffer is read at
that moment. So touching either before the work is finished gives wrong results.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, count, pairwise
from typing import Any

import torch

from megatron_sparse.errors import CommunicationError
from megatron_sparse.transport.base import Arrive, Marker, PeerTensors, to_everyone
from megatron_sparse.transport.nccl_communicator import NcclCommunicator
from megatron_sparse.transport.topology import NO_TIME, Topology
from megatron_sparse.transport.virtual_work import Arrivals, VirtualWork, arrival_counter

POISON = 0xFF
GATHER_TAG = -1
"""Of the whole cluster's all-gathers; those of `VirtualCluster.group` count down from it."""

Steps = Generator[Any, None, Any]
ReductionKey = tuple[tuple[int, ...], int, int]
"""The ranks of a group, the tag of its collectives, and the number of the reduction in it."""


@dataclass
class _Half:
    """One side of a message, waiting for the other."""

    rank: int
    data: torch.Tensor
    work: VirtualWork
    posted_s: float
    number: int
    priced_bytes: float
    waiting_for: str


@dataclass
class _Reduction:
    """The parts of a backend's own reduction that have been posted."""

    kind: str
    inputs: dict[int, torch.Tensor]
    outputs: dict[int, torch.Tensor]
    works: dict[int, VirtualWork]


class VirtualCluster:
    """See the module's docstring.

    Args:
        world_size: ranks.
        topology: nodes and links; None for one node whose links take no time.
        device: where the ranks' tensors live.
        message_scale: the clock prices each byte as this many, so that a small bucket can stand
            for a large one. All-gathers and int64 words, with which ranks agree about sizes, do
            not grow with the bucket and are not scaled; neither are the byte counters.

    Attributes:
        transports: one for each rank.
        link_bytes: (sender, receiver) -> bytes.
        link_messages: (sender, receiver) -> messages.
        clock_s: the modelled clock of each rank, in seconds.
        pending_arrivals: the arrivals of every visit to a bucket at which ranks are missing
            (`virtual_work`).

    Example:
        >>> cluster = VirtualCluster(2)
        >>> def swap(transport):
        ...     peer, own = 1 - transport.rank, torch.tensor([transport.rank])
        ...     got = torch.empty_like(own)
        ...     yield transport.exchange([(peer, own)], [(peer, got)], tag=0)
        ...     return got.item()
        >>> cluster.run(swap), cluster.link_bytes[0, 1]
        ([1, 0], 8)
    """

    def __init__(
        self,
        world_size: int,
        topology: Topology | None = None,
        device: torch.device | None = None,
        message_scale: float = 1.0,
    ) -> None:
        self.topology = topology or Topology((world_size,), NO_TIME, NO_TIME)
        assert self.topology.world_size == world_size, "the topology's ranks are the cluster's"
        self.device = device or torch.device("cpu")
        self.message_scale = message_scale
        self.link_bytes: Counter[tuple[int, int]] = Counter()
        self.link_messages: Counter[tuple[int, int]] = Counter()
        self.clock_s = [0.0] * world_size
        everyone = tuple(range(world_size))
        self.transports = [VirtualTransport(self, rank, everyone) for rank in everyone]
        # Sides that wait for the other, by (sender, receiver, tag, whether it is the sender's).
        self._halves: dict[tuple[int, int, int, bool], deque[_Half]] = defaultdict(deque)
        # A heap of messages: when their later side was posted, that side's number, both sides.
        self._matched: list[tuple[float, int, _Half, _Half]] = []
        self._numbers = count()  # of sides, in the order of posting
        self._port_free_s: dict[tuple[str, int], float] = defaultdict(float)
        self._reductions: dict[ReductionKey, _Reduction] = {}
        # For the all-gathers of each group of ranks; `GATHER_TAG` is for those of all ranks.
        self._group_tags = count(GATHER_TAG - 1, -1)
        self._ended: list[VirtualWork] = []  # since ranks were last resumed
        self.pending_arrivals: Arrivals = {}

    @property
    def modelled_s(self) -> float:
        """Modelled seconds until the last rank was done."""
        return max(self.clock_s)

    def sent_bytes(self, rank: int) -> int:
        """Bytes that a rank has sent, on all its links."""
        return sum(size for (source, _), size in self.link_bytes.items() if source == rank)

    def group(self, ranks: Sequence[int]) -> list[VirtualTransport]:
        """A group of these ranks: its transports, in the order of `ranks`.

        They share the clock, the ports and the byte counters of the cluster, and their messages
        meet those of no other group. A rank uses them in the generator that `run` drives.

        Example:
            >>> inside = VirtualCluster(4).group([2, 3])
            >>> inside[1].rank, inside[1].world_size
            (1, 2)
        """
        tag = next(self._group_tags)
        return [VirtualTransport(self, place, tuple(ranks), tag) for place in range(len(ranks))]

    def run(self, start: Callable[[VirtualTransport], Steps]) -> list[Any]:
        """Drives one generator for each rank to its end.

        A generator yields works and, at most once, a marker after which it posts nothing more.

        Args:
            start: transport of a rank -> that rank's generator.

        Returns:
            What each rank's generator returned.

        Raises:
            CommunicationError: deadlock: every rank waits and none sends; the two ends of a message
                differ in length; a message was sent and not received.
            MegatronSparseError: the first error that a rank raised.
        """
        results: dict[int, Any] = {}
        waiting: dict[int, VirtualWork] = {}
        generators = []
        for transport in self.transports:
            transport.may_post = True
            generators.append(start(transport))
        movable = deque(range(len(generators)))
        while movable or waiting:
            while movable:
                rank = movable.popleft()
                self._advance(rank, generators[rank], waiting, results)
            if waiting:
                movable.extend(self._deliver_next(waiting))
        self._check_nothing_left()
        return [results[rank] for rank in range(len(generators))]

    def _advance(
        self, rank: int, generator: Steps, waiting: dict[int, VirtualWork], results: dict[int, Any]
    ) -> None:
        """Runs one rank until it waits for something or ends."""
        while True:
            try:
                outcome = next(generator)
            except StopIteration as end:
                results[rank] = end.value
                return
            if outcome is Marker.UNORDERED or outcome is Marker.QUEUED:
                continue
            if isinstance(outcome, Enum):
                assert self.transports[rank].may_post, "the marker comes once"
                self.transports[rank].may_post = False
            elif not isinstance(outcome, VirtualWork) or outcome.ready():
                # Works that are no messages, such as a copy to the host, take no modelled time.
                outcome.finish()
            else:
                waiting[rank] = outcome
                return

    def post_half(
        self, work: VirtualWork, peer: int, data: torch.Tensor, tag: int, *, is_send: bool
    ) -> None:
        """Takes one side of a message, and matches it with the other if that has been posted.

        Called by the transports. A matched message waits to be delivered.
        """
        rank = work.rank
        assert peer != rank, "a rank exchanges nothing with itself"
        assert data.is_contiguous(), "messages are contiguous"
        waiting_for = f"rank {peer} to {'receive' if is_send else 'send'}"
        gathers = work.what == "all_gather" and not data.is_floating_point()
        is_agreement = gathers or data.dtype == torch.int64
        # A receive buffer holds nothing yet; the sender's side sets the price.
        scale = 1.0 if is_agreement or not is_send else self.message_scale
        priced = scale * data.nbytes
        half = _Half(rank, data, work, self.clock_s[rank], next(self._numbers), priced, waiting_for)
        work.undelivered += 1
        work.waits_for[waiting_for] += 1
        if not is_send:
            data.view(torch.uint8).fill_(POISON)
        pair = (rank, peer) if is_send else (peer, rank)  # sender, receiver
        others = self._halves[*pair, tag, not is_send]
        if not others:
            self._halves[*pair, tag, is_send].append(half)
            return
        other = others.popleft()
        send, receive = (half, other) if is_send else (other, half)
        if send.data.nbytes != receive.data.nbytes:
            raise CommunicationError(
                f"{work.what}: rank {send.rank}'s message to rank {receive.rank} has the wrong "
                "size",
                expected=f"{receive.data.nbytes} bytes, which rank {receive.rank} waits for",
                got=send.data.nbytes,
                remedy="agree on sizes before the exchange",
            )
        posted_s, number = max((half.posted_s, half.number) for half in (send, receive))
        heapq.heappush(self._matched, (posted_s, number, send, receive))

    def post_reduction(
        self, key: ReductionKey, work: VirtualWork, values_N: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Takes one rank's part of a backend's own reduction; called by the transports."""
        reduction = self._reductions.setdefault(key, _Reduction(work.what, {}, {}, {}))
        for rank, values in reduction.inputs.items():
            if reduction.kind != work.what or values.nbytes != values_N.nbytes:
                raise CommunicationError(
                    f"ranks {rank} and {work.rank} are not in the same collective",
                    expected=f"{reduction.kind} of {values.nbytes} bytes, as on rank {rank}",
                    got=f"{work.what} of {values_N.nbytes} bytes",
                )
        work.undelivered = 1
        reduction.inputs[work.rank] = values_N
        reduction.outputs[work.rank] = output
        reduction.works[work.rank] = work
        ranks, *_ = key
        missing = [rank for rank in ranks if rank not in reduction.inputs]
        for other in reduction.works.values():
            other.waits_for = Counter(f"rank {rank} to join" for rank in missing)
        if not missing:
            del self._reductions[key]
            self._reduce(reduction, ranks)

    def _reduce(self, reduction: _Reduction, ranks: Sequence[int]) -> None:
        """Writes the sum, added in rank order, to all outputs, and ends the works.

        Counts and times the steps of a ring over the ranks.
        """
        n, scatter = len(ranks), reduction.kind == "reduce_scatter"
        first, *others = (reduction.inputs[rank] for rank in ranks)
        sum_N = first.clone()
        for values_N in others:
            sum_N += values_N
        cuts = [sum_N.numel() * piece // n for piece in range(n + 1)]
        sizes = [(stop - start) * sum_N.element_size() for start, stop in pairwise(cuts)]
        done_s = self._run_ring(ranks, sizes, halves=1 if scatter else 2)
        for place, rank in enumerate(ranks):
            own = slice(cuts[place], cuts[place + 1]) if scatter else slice(None)
            reduction.outputs[rank].copy_(sum_N[own])
            work = reduction.works[rank]
            work.undelivered, work.done_s = 0, done_s
            self._ended.append(work)

    def _run_ring(self, ranks: Sequence[int], sizes: Sequence[int], halves: int) -> float:
        """Counts the bytes of a ring on its links, and takes its ports; returns its modelled end.

        Args:
            ranks: in the ring's order.
            sizes: bytes of each rank's piece.
            halves: 1 for the reduce-scatter; 2 for the all-gather, too.
        """
        n = len(ranks)
        steps = (n - 1) * halves
        step_s = port_s = 0.0
        ports = set()
        for place, rank in enumerate(ranks if n > 1 else ()):  # one rank alone sends nothing
            following = (place + 1) % n
            after = ranks[following]
            # A rank passes on every piece except the one that ends with it (reduce-scatter), then
            # every piece except its successor's own (all-gather).
            kept = [sizes[place], sizes[following]][:halves]
            self.link_bytes[rank, after] += halves * sum(sizes) - sum(kept)
            self.link_messages[rank, after] += steps
            link = self.topology.link(rank, after)
            piece_s = link.beta_s * self.message_scale * max(sizes)
            step_s, port_s = max(step_s, link.alpha_s + piece_s), max(port_s, piece_s)
            ports.update(self.topology.ports(rank, after))
        # Rings of other groups may share the ports of a node: they take turns.
        ready_s = [self.clock_s[rank] for rank in ranks]
        start_s = max(ready_s + [self._port_free_s[port] for port in ports])
        self._port_free_s.update(dict.fromkeys(ports, start_s + port_s * steps))
        return start_s + step_s * steps

    def _deliver_next(self, waiting: dict[int, VirtualWork]) -> list[int]:
        """Returns the ranks that can go on; delivers messages until there is one.

        The message that starts first is delivered first. Finishes the works of these ranks.
        """
        awaited = [work for work in self._ended if waiting.get(work.rank) is work]
        ready = [work.rank for work in awaited if work.ready()]
        self._ended.clear()
        while not ready:
            if not self._matched:
                raise self._deadlock(waiting)
            since_s, number, send, receive = heapq.heappop(self._matched)
            ports = self.topology.ports(send.rank, receive.rank)
            start_s = max(since_s, *(self._port_free_s[port] for port in ports))
            if start_s > since_s:  # a port is busy until then: others may start before it
                heapq.heappush(self._matched, (start_s, number, send, receive))
                continue
            self._deliver(send, receive, start_s, ports)
            ready = [
                half.rank
                for half in (send, receive)
                if half.work.ready() and waiting.get(half.rank) is half.work
            ]
        for rank in ready:
            waiting.pop(rank).finish()
        return ready

    def _deliver(
        self, send: _Half, receive: _Half, start_s: float, ports: Sequence[tuple[str, int]]
    ) -> None:
        """Copies a message, counts it, and sets the modelled ends of its two works."""
        link = self.topology.link(send.rank, receive.rank)
        sent_s = start_s + link.beta_s * send.priced_bytes
        for port in ports:
            self._port_free_s[port] = sent_s
        receive.data.view(torch.uint8).copy_(send.data.view(torch.uint8))
        self.link_bytes[send.rank, receive.rank] += send.data.nbytes
        self.link_messages[send.rank, receive.rank] += 1
        for half, done_s in ((send, sent_s), (receive, sent_s + link.alpha_s)):
            half.work.undelivered -= 1
            half.work.done_s = max(half.work.done_s, done_s)
            half.work.waits_for[half.waiting_for] -= 1

    def _deadlock(self, waiting: dict[int, VirtualWork]) -> CommunicationError:
        """The error for ranks that all wait: says for which peers."""
        lines = []
        for rank, work in sorted(waiting.items()):
            missing = sorted(+work.waits_for)  # the plus leaves out counts of 0
            lines.append(f"rank {rank} ({work.what}) for {', '.join(missing)}")
        ended = [r for r in range(self.topology.world_size) if r not in waiting]
        return CommunicationError(
            "deadlock: every rank waits, and no rank does what another waits for",
            expected="matching sends and receives on all ranks",
            got="; ".join(lines) + (f"; ranks {ended} have ended" if ended else ""),
            remedy="look for a rank that takes another branch than its peer",
        )

    def _check_nothing_left(self) -> None:
        """Raises if a message or a reduction was posted and not matched or waited for."""
        left = [*chain.from_iterable(self._halves.values())]
        if left or self._matched or self._reductions:
            waits = sorted(f"rank {half.rank} waits for {half.waiting_for}" for half in left)
            raise CommunicationError(
                "all ranks have ended and left operations behind",
                expected="every posted operation is waited for and has a counterpart",
                got="; ".join(waits) or "operations that were not waited for",
            )


class VirtualTransport:
    """See `Transport`; one rank of a `VirtualCluster`, or of a group of its ranks.

    Args:
        cluster: moves the messages.
        rank: in the group.
        ranks: the cluster's rank of each rank of the group, in order.
        tag: of the group's all-gathers, below 0.
    """

    def __init__(
        self, cluster: VirtualCluster, rank: int, ranks: tuple[int, ...], tag: int = GATHER_TAG
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.world_size = len(ranks)
        self.device = cluster.device
        self.nodes = tuple(cluster.topology.nodes[member] for member in ranks)
        self.communicator: NcclCommunicator | None = None
        self.may_post = True
        self._cluster = cluster
        self._cluster_rank = ranks[rank]
        self._tag = tag
        self._reductions = 0

    def charge(self, seconds: float) -> None:
        """Adds local work to this rank's modelled clock."""
        self._cluster.clock_s[self._cluster_rank] += seconds

    def open_arrival_counter(self) -> Arrive:
        """See `Transport`."""
        cluster = self._cluster
        return arrival_counter(
            self._cluster_rank, self.ranks, cluster.clock_s, cluster.pending_arrivals
        )

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
        return self._post("all_gather", *to_everyone(self, gathered, own_M), self._tag)

    def exchange(self, sends: PeerTensors, receives: PeerTensors, tag: int) -> VirtualWork:
        """See `Transport`."""
        assert tag >= 0, "tags are 0 to 2^31 - 1"
        return self._post("exchange", sends, receives, tag)

    def _post(self, what: str, sends: PeerTensors, receives: PeerTensors, tag: int) -> VirtualWork:
        """Posts the messages of one work, receives first; empty ones are skipped."""
        assert self.may_post, f"rank {self.rank} posts {what} after it said that it would not"
        cluster = self._cluster
        work = VirtualWork(self._cluster_rank, cluster.clock_s, what)
        for peer, data in receives:
            if data.numel():
                cluster.post_half(work, self.ranks[peer], data, tag, is_send=False)
        for peer, data in sends:
            if data.numel():
                cluster.post_half(work, self.ranks[peer], data, tag, is_send=True)
        return work

    def _reduce(self, kind: str, values_N: torch.Tensor, output: torch.Tensor) -> VirtualWork:
        """Posts this rank's part of a backend's own reduction."""
        assert self.may_post, f"rank {self.rank} posts {kind} after it said that it would not"
        work = VirtualWork(self._cluster_rank, self._cluster.clock_s, kind)
        key = self.ranks, self._tag, self._reductions
        self._cluster.post_reduction(key, work, values_N, output)
        self._reductions += 1
        return work
