"""A simulated network of n ranks in one process: real messages, counted bytes, a modelled clock.

Every message is really copied, so a collective computes the same here as over a network, and every
byte is counted on its directed link (sender, receiver).

The time is a MODEL; label it so wherever you show it. A message of m bytes from a to b starts when
both ranks have posted their sides of it (send and receive) and both ports are free. It occupies the
ports for beta m and arrives after alpha + beta m; alpha and beta are those of the topology's link.
Messages start in the order of their modelled times; at equal times, in the order in which their
later sides were posted. Local work takes no time unless `charge` adds it.

A real network shows some errors only by chance; here they always show. A receive buffer is
overwritten with 0xFF when it is posted, and filled as late as possible. A sent buffer is read at
that moment. So a rank that uses either before the work is finished gets wrong results.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
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
"""Tag of the whole cluster's all-gathers. Each `VirtualCluster.group` has its own: -2, -3, ..."""

Steps = Generator[Any, None, Any]
ReductionKey = tuple[tuple[int, ...], int, int]
"""The ranks of a group, the tag of its collectives, and the number of the reduction in it."""


@dataclass
class _Side:
    """One side of a message: the send or the receive that a rank has posted."""

    rank: int
    data: torch.Tensor
    work: VirtualWork  # the operation that the side belongs to
    posted_s: float
    number: int  # sides are numbered in the order in which they were posted
    priced_bytes: float  # what the clock takes the message's size for
    waiting_for: str  # the missing side, for errors


@dataclass
class _Reduction:
    """An all-reduce or reduce-scatter: what each rank, by number, has posted so far."""

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
        message_scale: for the clock each byte counts as this many, so that a small bucket can
            stand for a large one. Not scaled are the byte counters, and the messages by which ranks
            agree on sizes (all-gathers of integers, int64 words): they do not grow with a bucket.

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
        # (sender, receiver, tag, whether it is the send) -> sides whose other side is missing.
        self._unmatched: dict[tuple[int, int, int, bool], deque[_Side]] = defaultdict(deque)
        # A heap of messages to deliver: (modelled start, number of the later side, send, receive).
        self._matched: list[tuple[float, int, _Side, _Side]] = []
        self._numbers = count()  # of sides
        self._port_free_s: dict[tuple[str, int], float] = defaultdict(float)
        self._reductions: dict[ReductionKey, _Reduction] = {}
        self._group_tags = count(GATHER_TAG - 1, -1)  # see `GATHER_TAG`
        self._ended: list[VirtualWork] = []  # works of reductions that ended since the last resume
        self.pending_arrivals: Arrivals = {}

    @property
    def modelled_s(self) -> float:
        """Modelled seconds until the last rank was done."""
        return max(self.clock_s)

    def sent_bytes(self, rank: int) -> int:
        """Bytes that a rank has sent, on all its links."""
        return sum(size for (source, _), size in self.link_bytes.items() if source == rank)

    def group(self, ranks: Sequence[int]) -> list[VirtualTransport]:
        """Makes a group of these ranks; returns its transports, in the order of `ranks`.

        They use the cluster's clock, ports and byte counters; their all-gathers and reductions
        meet no other group's. A rank uses its transport in the generator that `run` drives.

        Example:
            >>> inside = VirtualCluster(4).group([2, 3])
            >>> inside[1].rank, inside[1].world_size
            (1, 2)
        """
        tag = next(self._group_tags)
        return [VirtualTransport(self, rank, tuple(ranks), tag) for rank in range(len(ranks))]

    def run(self, start: Callable[[VirtualTransport], Steps]) -> list[Any]:
        """Runs one generator for each rank to its end.

        A generator yields works to wait for, and markers (`base.Marker`); `POSTED` at most once.

        Args:
            start: transport of a rank -> that rank's generator.

        Returns:
            What each rank's generator returned.

        Raises:
            CommunicationError: deadlock: every rank waits and none sends; the two ends of a message
                differ in length; a message was sent and not received.
            MegatronSparseError: the first error that a rank raised.
        """
        results: dict[int, Any] = {}  # rank -> what its generator returned
        waiting: dict[int, VirtualWork] = {}  # rank -> the work that it waits for
        generators = []
        for transport in self.transports:
            transport.may_post = True
            generators.append(start(transport))
        runnable = deque(range(len(generators)))  # ranks to resume
        while runnable or waiting:
            while runnable:
                rank = runnable.popleft()
                self._advance(rank, generators[rank], waiting, results)
            if waiting:
                runnable.extend(self._deliver_next(waiting))
        self._check_nothing_left()
        return [results[rank] for rank in range(len(generators))]

    def _advance(
        self, rank: int, generator: Steps, waiting: dict[int, VirtualWork], results: dict[int, Any]
    ) -> None:
        """Resumes one rank until it waits for a work, in `waiting`, or ends, in `results`."""
        while True:
            try:
                outcome = next(generator)
            except StopIteration as end:
                results[rank] = end.value
                return
            if outcome is Marker.UNORDERED or outcome is Marker.QUEUED:
                continue  # they promise nothing that is checked here
            if outcome is Marker.POSTED:
                assert self.transports[rank].may_post, "`POSTED` comes once"
                self.transports[rank].may_post = False
            elif not isinstance(outcome, VirtualWork) or outcome.ready():
                # Works other than messages (a copy to the CPU) take no modelled time.
                outcome.finish()
            else:
                waiting[rank] = outcome
                return

    def post_side(
        self, work: VirtualWork, peer: int, data: torch.Tensor, tag: int, *, is_send: bool
    ) -> None:
        """Posts one side of a message for a transport; matches it with the other side, if posted.

        A matched message goes to the heap, from which `_deliver_next` takes it.

        Args:
            work: the posting rank's operation, to which the side belongs.
            peer: the cluster's rank at the other side.
            data: what to send, or where to receive.
            tag: sides match only if their tags are the same.
            is_send: whether this is the send.
        """
        rank = work.rank
        assert peer != rank, "a rank exchanges nothing with itself"
        assert data.is_contiguous(), "messages are contiguous"
        waiting_for = f"rank {peer} to {'receive' if is_send else 'send'}"
        gathers_integers = work.what == "all_gather" and not data.is_floating_point()
        is_agreement = gathers_integers or data.dtype == torch.int64  # see `message_scale`
        scale = 1.0 if is_agreement else self.message_scale
        priced = scale * data.nbytes  # used only where `is_send`
        side = _Side(rank, data, work, self.clock_s[rank], next(self._numbers), priced, waiting_for)
        work.undelivered += 1
        work.waits_for[waiting_for] += 1
        if not is_send:
            data.view(torch.uint8).fill_(POISON)
        pair = (rank, peer) if is_send else (peer, rank)  # sender, receiver
        opposite_sides = self._unmatched[*pair, tag, not is_send]
        if not opposite_sides:
            self._unmatched[*pair, tag, is_send].append(side)
            return
        opposite = opposite_sides.popleft()  # the one posted first
        send, receive = (side, opposite) if is_send else (opposite, side)
        if send.data.nbytes != receive.data.nbytes:
            raise CommunicationError(
                f"{work.what}: rank {send.rank}'s message to rank {receive.rank} has the wrong "
                "size",
                expected=f"{receive.data.nbytes} bytes, which rank {receive.rank} waits for",
                got=send.data.nbytes,
                remedy="agree on sizes before the exchange",
            )
        posted_s, number = max((side.posted_s, side.number) for side in (send, receive))
        heapq.heappush(self._matched, (posted_s, number, send, receive))

    def post_reduction(
        self, key: ReductionKey, work: VirtualWork, values_N: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Posts one rank's part of an all-reduce or reduce-scatter (`work.what`), for a transport.

        `output` gets the sum of all ranks' `values_N`, or this rank's shard of it.
        """
        new = _Reduction(work.what, inputs={}, outputs={}, works={})
        reduction = self._reductions.setdefault(key, new)
        for rank, values in reduction.inputs.items():
            if reduction.kind != work.what or values.nbytes != values_N.nbytes:
                raise CommunicationError(
                    f"ranks {rank} and {work.rank} are not in the same collective",
                    expected=f"{reduction.kind} of {values.nbytes} bytes, as on rank {rank}",
                    got=f"{work.what} of {values_N.nbytes} bytes",
                )
        work.undelivered = 1  # not ready before `_reduce`
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
        """Writes the sum, or each rank's shard of it, to all outputs, and ends the works.

        Adds in rank order; bytes and time are those of a ring over the ranks.
        """
        n, scatter = len(ranks), reduction.kind == "reduce_scatter"
        first, *others = (reduction.inputs[rank] for rank in ranks)
        sum_N = first.clone()
        for values_N in others:
            sum_N += values_N
        cuts = [sum_N.numel() * piece // n for piece in range(n + 1)]  # of n nearly equal pieces
        sizes = [(stop - start) * sum_N.element_size() for start, stop in pairwise(cuts)]
        done_s = self._run_ring(ranks, sizes, phases=1 if scatter else 2)
        for index, rank in enumerate(ranks):
            own = slice(cuts[index], cuts[index + 1]) if scatter else slice(None)
            reduction.outputs[rank].copy_(sum_N[own])
            work = reduction.works[rank]
            work.undelivered, work.done_s = 0, done_s
            self._ended.append(work)

    def _run_ring(self, ranks: Sequence[int], sizes: Sequence[int], phases: int) -> float:
        """Counts a ring's bytes on its links and occupies its ports; returns its modelled end.

        `sizes`: bytes of each rank's piece, in the ring's order. `phases`: 1: only the
        reduce-scatter; 2: also the all-gather.
        """
        n = len(ranks)
        steps = (n - 1) * phases
        step_s = port_s = 0.0  # of the slowest link: a step's time, and how long a port is busy
        ports = set()
        for index, rank in enumerate(ranks if n > 1 else ()):  # a single rank sends nothing
            next_index = (index + 1) % n
            successor = ranks[next_index]
            # A rank sends every piece but one: in the reduce-scatter not its own piece, in the
            # all-gather not that of its successor.
            not_sent = [sizes[index], sizes[next_index]][:phases]
            self.link_bytes[rank, successor] += phases * sum(sizes) - sum(not_sent)
            self.link_messages[rank, successor] += steps
            link = self.topology.link(rank, successor)
            piece_s = link.beta_s * self.message_scale * max(sizes)
            step_s, port_s = max(step_s, link.alpha_s + piece_s), max(port_s, piece_s)
            ports.update(self.topology.ports(rank, successor))
        # Rings of other groups may use the same ports of a node: one ring starts after the other.
        ready_s = [self.clock_s[rank] for rank in ranks]
        start_s = max(ready_s + [self._port_free_s[port] for port in ports])
        self._port_free_s.update(dict.fromkeys(ports, start_s + port_s * steps))
        return start_s + step_s * steps

    def _deliver_next(self, waiting: dict[int, VirtualWork]) -> list[int]:
        """Delivers messages, the one that starts first, until a rank's work is ready.

        Takes the ranks whose works are ready out of `waiting`, finishes the works, and returns the
        ranks. A reduction may have made some works ready before any message.
        """
        awaited = [work for work in self._ended if waiting.get(work.rank) is work]
        ready = [work.rank for work in awaited if work.ready()]
        self._ended.clear()
        while not ready:
            if not self._matched:
                raise self._deadlock(waiting)
            planned_s, number, send, receive = heapq.heappop(self._matched)
            ports = self.topology.ports(send.rank, receive.rank)
            start_s = max(planned_s, *(self._port_free_s[port] for port in ports))
            if start_s > planned_s:  # a port is busy: other messages may start before this one
                heapq.heappush(self._matched, (start_s, number, send, receive))
                continue
            self._deliver(send, receive, start_s, ports)
            ready = [
                side.rank
                for side in (send, receive)
                if side.work.ready() and waiting.get(side.rank) is side.work
            ]
        for rank in ready:
            waiting.pop(rank).finish()
        return ready

    def _deliver(
        self, send: _Side, receive: _Side, start_s: float, ports: Sequence[tuple[str, int]]
    ) -> None:
        """Copies a message, counts its bytes, and updates the two works that it belongs to."""
        link = self.topology.link(send.rank, receive.rank)
        sent_s = start_s + link.beta_s * send.priced_bytes
        for port in ports:
            self._port_free_s[port] = sent_s
        receive.data.view(torch.uint8).copy_(send.data.view(torch.uint8))
        self.link_bytes[send.rank, receive.rank] += send.data.nbytes
        self.link_messages[send.rank, receive.rank] += 1
        for side, done_s in ((send, sent_s), (receive, sent_s + link.alpha_s)):
            side.work.undelivered -= 1
            side.work.done_s = max(side.work.done_s, done_s)
            side.work.waits_for[side.waiting_for] -= 1

    def _deadlock(self, waiting: dict[int, VirtualWork]) -> CommunicationError:
        """Makes the error of ranks that all wait; it says which rank waits for which."""
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
        """Raises if a message has only one side, or an operation was not waited for."""
        left = [*chain.from_iterable(self._unmatched.values())]
        if left or self._matched or self._reductions:
            waits = sorted(f"rank {side.rank} waits for {side.waiting_for}" for side in left)
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
        self._reductions = 0  # posted so far; numbers them in `ReductionKey`

    def charge(self, seconds: float) -> None:
        """Adds local work to this rank's modelled clock."""
        self._cluster.clock_s[self._cluster_rank] += seconds

    def open_arrival_counter(self) -> Arrive:
        """See `Transport`."""
        rank, cluster = self._cluster_rank, self._cluster
        return arrival_counter(rank, self.ranks, cluster.clock_s, cluster.pending_arrivals)

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
        """Posts the messages of one operation; empty ones are skipped."""
        assert self.may_post, f"rank {self.rank} posts {what} after it said that it would not"
        cluster = self._cluster
        work = VirtualWork(self._cluster_rank, cluster.clock_s, what)
        for peer, data in receives:
            if data.numel():
                cluster.post_side(work, self.ranks[peer], data, tag, is_send=False)
        for peer, data in sends:
            if data.numel():
                cluster.post_side(work, self.ranks[peer], data, tag, is_send=True)
        return work

    def _reduce(self, kind: str, values_N: torch.Tensor, output: torch.Tensor) -> VirtualWork:
        """Posts this rank's tensors of an all-reduce or reduce-scatter (`kind`)."""
        assert self.may_post, f"rank {self.rank} posts {kind} after it said that it would not"
        work = VirtualWork(self._cluster_rank, self._cluster.clock_s, kind)
        key = self.ranks, self._tag, self._reductions  # the same on all ranks of the group
        self._cluster.post_reduction(key, work, values_N, output)
        self._reductions += 1
        return work
