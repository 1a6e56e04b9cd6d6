"""Measures the links between ranks, and the backend's own all-reduce, as alpha and beta.

Collectives send in rounds: every rank sends to one peer while it receives from another. So this
module measures such rounds. A ping-pong would never load a port both ways. The ranks of a node form
a ring, and all send to the next rank at once (`intra`). The first ranks of all nodes do the same
(`inter`). If nodes have several ranks, all ranks also send between nodes at once: if that takes as
long as taking turns, the ranks of a node share a port (`nic`).

Several rounds run between two readings of the clock. A repetition's time is the slowest rank's; the
result is the median of the repetitions. `fit_link` says how alpha and beta follow.

Everything is a generator over a `Transport` with a given clock, so a virtual cluster's links can be
measured in the same way as real ones.
"""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch

from megatron_sparse.collectives.base import Round, Yielded, without
from megatron_sparse.cuda_ext.reports import waiting_for
from megatron_sparse.errors import ConfigError
from megatron_sparse.transport import Link, Topology, Transport, Work
from megatron_sparse.transport.base import Marker
from megatron_sparse.transport.topology import members_of

type Clock = Callable[[], float]
type Measuring[T] = Generator[Work, None, T]

SMALL_BYTES = 1024
"""Size up to which a message takes no longer than an empty one on training networks."""
TAG = 1


@dataclass(frozen=True)
class LinkSweep:
    """The messages that are measured.

    Attributes:
        message_bytes: sizes, multiples of 8 in ascending order; at least one is small
            (`SMALL_BYTES`), and at least two are more than twice `SMALL_BYTES`.
        repeats: how often each size is timed.
        rounds: exchanges between two readings of the clock.
    """

    message_bytes: Sequence[int]
    repeats: int
    rounds: int


QUICK = LinkSweep((8, 1024, 2**16, 2**18, 2**20), repeats=5, rounds=4)
FULL = LinkSweep((8, 256, 1024, 2**16, 2**18, 2**20, 2**22, 2**23), repeats=11, rounds=4)


@dataclass(frozen=True)
class MeasuredLinks:
    """The measured links; the fields are those of `ClusterModel`."""

    nodes: tuple[int, ...]
    nic: str
    intra: Link
    inter: Link
    dense: Link


def measure_links(transport: Transport, sweep: LinkSweep, clock: Clock) -> Measuring[MeasuredLinks]:
    """Measures the links; the result is the same on all ranks.

    There are at least 2 ranks. `clock` is this rank's, in seconds.

    Raises:
        ConfigError: there is one rank only.
    """
    topology = yield from measure_topology(transport, sweep, clock)
    dense = yield from _measure_dense(transport, sweep, clock)
    return MeasuredLinks(topology.node_sizes, topology.nic, topology.intra, topology.inter, dense)


def measure_topology(transport: Transport, sweep: LinkSweep, clock: Clock) -> Measuring[Topology]:
    """Measures the ranks' nodes and links as `measure_links`, without the backend's all-reduce.

    On one node, or with one rank on each node, the missing kind of link gets the other's numbers.
    """
    if transport.world_size < 2:
        raise one_rank()
    nodes = members_of(transport.nodes)
    node_rings = [ranks for ranks in nodes if len(ranks) > 1]
    measured: dict[str, Link] = {}
    nic = "rank"  # each rank has a port of its own
    if node_rings:
        measured["intra"] = yield from _measure_rings(transport, node_rings, sweep, clock)
    if len(nodes) > 1:
        first_ranks = [ranks[0] for ranks in nodes]
        measured["inter"] = yield from _measure_rings(transport, [first_ranks], sweep, clock)
        nic = yield from _measure_nic(transport, nodes, sweep, clock)
    either = next(iter(measured.values()))  # at least one of the two kinds was measured
    sizes = tuple(len(ranks) for ranks in nodes)
    return Topology(sizes, measured.get("intra", either), measured.get("inter", either), nic)


def one_rank() -> ConfigError:
    """The error for a group without links."""
    return ConfigError(
        "calibrate: one rank has no links", expected="at least 2 ranks", got=1, remedy="--ranks 2"
    )


def fit_link(message_bytes: Sequence[float], times_s: Sequence[float]) -> Link:
    """Fits a link's alpha and beta to the times of messages, one for each of `message_bytes`.

    Beta is the slope of the least-squares line through all sizes that are not small; small sizes
    are left out because some networks do not limit the rate of short bursts. If noise hides the
    slope, beta is the largest message's time divided by its bytes: that overestimates beta, but a
    slope of 0 would make bytes free. Alpha is the median, over the small sizes, of the time minus
    beta times the bytes.

    Example:
        >>> fit_link([0, 2000, 4000], [1.0, 5.0, 9.0])
        Link(alpha_s=1.0, beta_s=0.002)
    """
    pairs = list(zip(message_bytes, times_s, strict=True))
    large_pairs = [pair for pair in pairs if pair[0] > SMALL_BYTES]
    large, large_s = zip(*large_pairs, strict=True)
    slope = float(f"{np.polyfit(large, large_s, 1)[0]:.6g}")  # 6 digits keep the file legible
    beta_s = slope if slope > 0 else times_s[-1] / message_bytes[-1]
    alphas_s = [spent_s - beta_s * size for size, spent_s in pairs if size <= SMALL_BYTES]
    return Link(max(median(alphas_s), 0.0), beta_s)


def complete[T](steps: Generator[Yielded, None, T]) -> T:
    """Runs the generator `steps`, waiting for each operation that it yields; returns its result."""
    return waiting_for(without(steps, Marker))  # a marker is no operation to wait for


def gather_rows(numbers: Sequence[float], transport: Transport) -> Measuring[torch.Tensor]:
    """All-gathers this rank's numbers; returns a row for each rank, as fp64 on the CPU.

    It also serves as a barrier: no rank has the rows before every rank has come.
    """
    row = torch.tensor(numbers, dtype=torch.float64, device=transport.device)
    gathered = row.new_empty(transport.world_size * row.numel())
    yield transport.all_gather(gathered, row)
    return gathered.view(transport.world_size, -1).cpu()


def times_by_rank(
    transport: Transport, repeats: int, clock: Clock, action: Callable[[], Iterable[Yielded]]
) -> Measuring[torch.Tensor]:
    """Seconds of an action: a row for each rank, a column for each repetition after a warm-up.

    A barrier before each of the `repeats` makes the ranks begin together. `action` yields
    operations, one after the other; its own time between them counts too. `clock` is this rank's,
    in seconds.
    """
    spent = []
    for _ in range(repeats + 1):
        yield from gather_rows([0.0], transport)  # a barrier
        start_s = clock()
        for work in action():
            if not isinstance(work, Marker):  # a marker is no operation to wait for
                yield work
        spent.append(clock() - start_s)
    return (yield from gather_rows(spent[1:], transport))  # without the warm-up


def timed(
    transport: Transport, repeats: int, clock: Clock, action: Callable[[], Iterable[Yielded]]
) -> Measuring[float]:
    """The median over repetitions of the slowest rank's seconds; see `times_by_rank`."""
    rows = yield from times_by_rank(transport, repeats, clock, action)
    return float(rows.max(0).values.median())


def ring_times(
    transport: Transport, rings: Sequence[Sequence[int]], sweep: LinkSweep, clock: Clock
) -> Measuring[list[float]]:
    """Times rounds in which each rank of a ring sends to the next one.

    All ranks take part; those outside the `rings` send nothing, and no rank is in two of them.
    `clock` is this rank's, in seconds.

    Returns:
        Seconds of a round for each size, the same on all ranks.
    """

    def exchange_rounds(messages: Round) -> Iterable[Work]:
        """The exchanges between two readings of the clock."""
        for _ in range(sweep.rounds):
            yield transport.exchange(*messages, TAG)

    times_s = []
    for nbytes in sweep.message_bytes:
        sent = torch.zeros(nbytes, dtype=torch.uint8, device=transport.device)
        action = partial(exchange_rounds, neighbours(transport.rank, rings, sent))
        spent = yield from timed(transport, sweep.repeats, clock, action)
        times_s.append(spent / sweep.rounds)
    return times_s


def neighbours(rank: int, rings: Sequence[Sequence[int]], sent: torch.Tensor) -> Round:
    """A rank's messages in a round: `sent` to the next rank of its ring, a buffer for the previous
    rank's message. Both lists of (peer, tensor) are empty for a rank outside the rings.
    """
    for ring in rings:
        if rank in ring and len(ring) > 1:
            index = ring.index(rank)
            after, before = ring[(index + 1) % len(ring)], ring[index - 1]
            return [(after, sent)], [(before, torch.empty_like(sent))]
    return [], []


def _measure_rings(
    transport: Transport, rings: Sequence[Sequence[int]], sweep: LinkSweep, clock: Clock
) -> Measuring[Link]:
    times_s = yield from ring_times(transport, rings, sweep, clock)
    return fit_link(sweep.message_bytes, times_s)


def _measure_nic(
    transport: Transport, nodes: Sequence[Sequence[int]], sweep: LinkSweep, clock: Clock
) -> Measuring[str]:
    """Measures whether each `rank` has a network port, or each `node` one that its ranks share."""
    lanes = min(map(len, nodes))
    if lanes == 1:  # some node has one rank: there is no second ring to compare with
        return "rank"
    largest_only = LinkSweep(sweep.message_bytes[-1:], sweep.repeats, sweep.rounds)
    # Each ring is a lane: it has one rank of every node.
    rings = [[ranks[lane] for ranks in nodes] for lane in range(lanes)]
    (one_s,) = yield from ring_times(transport, rings[:1], largest_only, clock)
    (all_s,) = yield from ring_times(transport, rings, largest_only, clock)
    # With a port for each rank, all_s is about one_s; with a shared port, lanes * one_s.
    return "node" if all_s > one_s * (1 + lanes) / 2 else "rank"


def _measure_dense(transport: Transport, sweep: LinkSweep, clock: Clock) -> Measuring[Link]:
    """The alpha and beta of one round of the backend's all-reduce, a ring of 2 (n - 1) rounds."""
    n = transport.world_size

    def all_reduce(values_N: torch.Tensor) -> Iterable[Work]:
        """The one all-reduce between two readings of the clock."""
        yield transport.all_reduce_(values_N)

    round_bytes, times_s = [], []
    for nbytes in sweep.message_bytes:
        piece = nbytes // 8  # fp32 elements of the ring's messages: half of `nbytes` each
        values_N = torch.zeros(n * piece, dtype=torch.float32, device=transport.device)
        action = partial(all_reduce, values_N)
        spent = yield from timed(transport, sweep.repeats, clock, action)
        round_bytes.append(4.0 * piece)  # the ring cuts the buffer into n pieces
        times_s.append(spent / (2 * (n - 1)))
    return fit_link(round_bytes, times_s)


def host_clock(device: torch.device) -> Clock:
    """The CPU's clock in seconds; on CUDA each reading first waits for the GPU's queued work."""
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read
