"""The modelled clocks of all ranks: the time of a collective's rounds on a topology.

A cost model runs a collective's rounds without data, on expected sizes. The network is the
alpha-beta model (Hockney; SpCCL's equation 1) on two levels of links, as in `VirtualCluster`: a
message starts when both ends have posted it and both ports are free, occupies the ports for beta m,
and arrives after alpha + beta m. A rank goes on when its own message has left and its peer's
message has arrived, so one slow rank holds up every rank that waits for it.

With one level, equal pieces of m bytes and no local work, n - 1 rounds take
(n - 1)(alpha + beta m): the ring of the equations 2 of SpCCL and PCCL, and with m halved or doubled
from round to round their recursive algorithms.

Legend: n ranks.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_sparse.transport.topology import Topology


@dataclass(frozen=True)
class Round:
    """One round of all ranks; each sends at most one message and receives at most one.

    Attributes:
        target_n: the rank that each rank sends to; -1 for none.
        nbytes_n: bytes of the message, by sender; 0 sends no message.
        meanwhile_n: seconds of local work of each rank while its messages are on their way.
    """

    target_n: np.ndarray
    nbytes_n: np.ndarray
    meanwhile_n: np.ndarray

    @property
    def senders(self) -> np.ndarray:
        """The ranks that send a message, ascending."""
        return np.flatnonzero((self.target_n >= 0) & (self.nbytes_n > 0))


Sent = tuple[np.ndarray, float | np.ndarray, float | np.ndarray]
"""A `Round`, with one value for all ranks or one for each rank."""


class RankClocks:
    """The modelled clocks of all ranks, which begin at 0; see the module's docstring.

    Attributes:
        now_n: seconds, of each rank. Mutated by every method that takes time.
        ranks_n: the ranks: 0, 1, ... n - 1.
        card_free_s: the time from which each node's card is free, by port. Mutated.

    `host_s` are the seconds that a message costs each of its two ends before it is posted.
    """

    def __init__(self, topology: Topology, host_s: float) -> None:
        n = topology.world_size
        self.topology, self.host_s = topology, host_s
        self.now_n = np.zeros(n)
        self.ranks_n = np.arange(n)
        self._node_n = np.array(topology.nodes)
        self.card_free_s: dict[tuple[str, int], float] = defaultdict(float)  # by `Topology.ports`

    def work(self, seconds: float | np.ndarray) -> None:
        """Local work of every rank."""
        self.now_n = self.now_n + seconds

    def in_rounds(self, rounds: Iterable[Sent]) -> None:
        """Runs rounds in sequence; each rank begins one when it has ended the one before."""
        # Numbers that hold for all ranks become arrays with a value for each rank.
        arrays = [Round(*np.broadcast_arrays(*sent)) for sent in rounds]
        if self.topology.nic == "node" and len(self.topology.node_sizes) > 1:
            QueuedRounds(self, arrays).run()  # ranks of a node wait for one another at its card
            return
        for each in arrays:
            self._round(each)

    def _round(self, each: Round) -> None:
        """Moves the clocks on by one round, in which every rank has ports of its own.

        A rank ends it when its work is done, its own message has left and the one to it has come.
        """
        senders = each.senders
        targets, nbytes = each.target_n[senders], each.nbytes_n[senders]
        # First the CPUs post: once for all that a rank sends and receives in the round.
        posts_n = np.zeros_like(self.now_n)
        posts_n[senders] = posts_n[targets] = 1.0
        self.now_n = self.now_n + self.host_s * posts_n
        same_node = self._node_n[senders] == self._node_n[targets]
        intra, inter = self.topology.intra, self.topology.inter
        start_s = np.maximum(self.now_n[senders], self.now_n[targets])
        left_s = start_s + np.where(same_node, intra.beta_s, inter.beta_s) * nbytes
        arrived_s = left_s + np.where(same_node, intra.alpha_s, inter.alpha_s)
        done_n = self.now_n.copy()
        done_n[senders] = left_s
        done_n[targets] = np.maximum(done_n[targets], arrived_s)
        self.now_n = np.maximum(self.now_n + each.meanwhile_n, done_n)

    def wait_for(self, others: RankClocks) -> None:
        """All ranks wait for a phase that some of them run; `others` are its clocks, from 0 on.

        The phase begins when the slowest of all ranks is ready.
        """
        self.now_n = np.full(self.ranks_n.size, self.now_n.max() + others.now_n.max())

    def everybody_at_once(self, nbytes: float) -> None:
        """Every rank sends `nbytes` to every other, all posted at once; all end at the same time.

        Exact if all ranks begin at the same time.
        """
        n = self.ranks_n.size
        if n == 1:
            return
        # The latency, and the seconds that a rank's n - 1 messages take for each byte of `nbytes`.
        alpha_s, all_beta_s = _all_pairs(self.topology)
        latest_s = self.now_n.max() + self.host_s * (n - 1)
        self.now_n = np.full(n, latest_s + alpha_s + all_beta_s * nbytes)


class QueuedRounds:
    """Rounds where the ranks of a node share a network card: messages take turns at it.

    A rank that is ahead uses the card while another waits for its peer, so rounds cannot be
    computed one by one. Here every message is an event, as in `VirtualCluster`.
    """

    def __init__(self, clocks: RankClocks, rounds: Sequence[Round]) -> None:
        self._clocks, self._topology = clocks, clocks.topology
        n = self._topology.world_size
        # By round and rank; lists, whose single numbers Python reads faster than an array's.
        self._source = [self._sources(each) for each in rounds]
        self._target = [each.target_n.tolist() for each in rounds]
        self._nbytes = [each.nbytes_n.tolist() for each in rounds]
        self._meanwhile = [each.meanwhile_n.tolist() for each in rounds]
        self._round_index = [0] * n
        """The round that each rank is in."""
        self._pending = [0] * n
        """How many of its messages of that round each rank has not ended."""
        self._done_s = [0.0] * n
        """The end of the last message that each rank has ended in that round."""
        self._now_s = clocks.now_n.tolist()
        """Each rank's clock, at the beginning of its round."""
        self._ready: list[tuple[float, int, int, int]] = []
        """A heap of messages that both ends have posted: (time, sender, receiver, round)."""

    def _sources(self, each: Round) -> list[int]:
        """The rank that each rank receives from in a round; -1 for none."""
        source_n = np.full(each.target_n.shape, -1)
        source_n[each.target_n[each.senders]] = each.senders
        return source_n.tolist()

    def run(self) -> None:
        """Moves the clocks on to the end of the last round. Mutates them.

        Messages start in the order of time. One whose port is busy is queued again for the time at
        which the port is free.
        """
        free_s = self._clocks.card_free_s
        for rank in range(len(self._now_s)):
            self._enter(rank)
        while self._ready:
            since_s, sender, receiver, number = heapq.heappop(self._ready)
            ports = self._topology.ports(sender, receiver)
            start_s = max(since_s, *(free_s[port] for port in ports))
            if start_s > since_s:
                heapq.heappush(self._ready, (start_s, sender, receiver, number))
                continue
            link = self._topology.link(sender, receiver)
            left_s = start_s + link.beta_s * self._nbytes[number][sender]
            for port in ports:
                free_s[port] = left_s
            for end, done_s in ((sender, left_s), (receiver, left_s + link.alpha_s)):
                self._done_s[end] = max(self._done_s[end], done_s)
                self._pending[end] -= 1
                if not self._pending[end]:
                    self._leave(end)
        self._clocks.now_n = np.array(self._now_s)

    def _enter(self, rank: int) -> None:
        """Posts a rank's messages of its next round that has any; passes over empty rounds."""
        while (number := self._round_index[rank]) < len(self._target):
            target, source = self._target[number][rank], self._source[number][rank]
            messages = []  # of this rank: (peer, sender, receiver)
            if target >= 0 and self._nbytes[number][rank] > 0:
                messages.append((target, rank, target))
            if source >= 0:
                messages.append((source, source, rank))
            self._pending[rank] = len(messages)
            if not messages:  # empty for this rank: local work only
                self._now_s[rank] += self._meanwhile[number][rank]
                self._round_index[rank] += 1
                continue
            self._now_s[rank] += self._clocks.host_s
            self._done_s[rank] = self._now_s[rank]
            for peer, sender, receiver in messages:
                # Of sender and receiver, the one that posts second finds its peer waiting in this
                # round; the message is then ready. No rank sends a message to itself.
                is_peer_waiting = self._round_index[peer] == number and self._pending[peer] > 0
                if is_peer_waiting:
                    since_s = max(self._now_s[rank], self._now_s[peer])
                    heapq.heappush(self._ready, (since_s, sender, receiver, number))
            return

    def _leave(self, rank: int) -> None:
        """Ends a rank's round when its messages and its local work are done; enters the next."""
        number = self._round_index[rank]
        worked_s = self._now_s[rank] + self._meanwhile[number][rank]
        self._now_s[rank] = max(worked_s, self._done_s[rank])
        self._round_index[rank] += 1
        self._enter(rank)


def _all_pairs(topology: Topology) -> tuple[float, float]:
    """The time of an exchange in which all ranks send to all: (alpha, seconds a byte of a message).

    A `VirtualCluster` starts messages by rank, as soon as both ports are free. If each rank has its
    own ports, the messages of n ranks take p - 1 turns, where p is n rounded up to a power of two
    (if n < p, a better order would need fewer turns). A port that the ranks of a node share takes
    the sum of all messages that cross it.
    """
    n, sizes = topology.world_size, topology.node_sizes
    largest = max(sizes)
    # Seconds for each byte of a message: of all messages within nodes, of all between nodes.
    within = (_next_power(largest) - 1) * topology.intra.beta_s
    between = 0.0
    if len(sizes) > 1 and topology.nic == "node":
        between = max(size * (n - size) for size in sizes) * topology.inter.beta_s
    elif len(sizes) > 1:
        between = (_next_power(n) - largest) * topology.inter.beta_s  # largest - 1 turns are inside
    alpha_s = max(
        topology.intra.alpha_s if largest > 1 else 0.0,
        topology.inter.alpha_s if len(sizes) > 1 else 0.0,
    )
    return alpha_s, max(within, between)


def _next_power(number: int) -> int:
    return 1 << (number - 1).bit_length()
