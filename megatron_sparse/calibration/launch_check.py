"""Checks that the ranks of a launch fit together; `calibrate` prints the result first.

Its lines say that all ranks are there; that their versions, devices and clocks agree, or
which ranks differ; and which link inside a node, and between nodes, is the slowest.

Links are those of rings: one through the ranks of each node, and one through each lane, which has
one rank of each node. Ring collectives take these links, and they use every rank's network port.
They are timed in phases in which no rank has two links, so that a slow link does not slow others.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.errors import CommunicationError, first_line
from megatron_sparse.extras import installed_version
from megatron_sparse.planner.fingerprint import processor
from megatron_sparse.planner.link_timing import (
    TAG,
    Clock,
    Measuring,
    complete,
    gather_rows,
    times_by_rank,
)
from megatron_sparse.transport import ProcessGroupTransport, Transport
from megatron_sparse.transport.topology import members_of
from megatron_sparse.version import __version__

CLOCK_S = 0.1
"""Clocks that differ by more make logs of several nodes unreadable and confuse leases and files."""
FACTS_BYTES = 2048
"""Room for a rank's facts; host names have at most 253 letters, versions far fewer."""
MESSAGE_BYTES = 2**22
REPEATS = 5
MOST_NAMED = 8
"""Ranks that one line names; it counts the others."""


@dataclass(frozen=True)
class RankFacts:
    """Properties of a rank that must be the same on every rank; and its host, which need not."""

    host: str
    torch: str
    megatron_core: str
    megatron_sparse: str
    device: str

    @classmethod
    def here(cls, device: torch.device) -> RankFacts:
        """Reads this rank's facts."""
        core = installed_version("megatron-core") or "not installed"
        return cls(socket.gethostname(), torch.__version__, core, __version__, processor(device))


@dataclass(frozen=True)
class RingLink:
    """A link of a ring, in one direction.

    Attributes:
        kind: inside a node, or between nodes.
        sender: rank.
        receiver: rank.
        gbit_s: rate of a message of `MESSAGE_BYTES`, by the time of its slower end.
    """

    kind: str
    sender: int
    receiver: int
    gbit_s: float


def open_store(timeout_s: float) -> tuple[Any, int, int]:
    """Opens torch's key-value store of the launch; returns it, this rank and the number of ranks.

    Reads RANK, MASTER_ADDR and the like. The store is in the process of rank 0, or of torchrun's
    agent on that node; rank 0 does not wait here for the other ranks.

    Raises:
        CommunicationError: rank 0 cannot be reached.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    has_store = rank == 0 and not has_agent
    try:
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] - documented there
            host, port, world_size, has_store, timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except (dist.DistError, RuntimeError) as error:
        raise CommunicationError(
            f"rank {rank} on {socket.gethostname()} cannot reach rank 0",
            expected=f"an answer at MASTER_ADDR={host}, MASTER_PORT={port} within {timeout_s:g} s",
            got=first_line(error),
            remedy="look at the first node: is rank 0 there, and is the port open?",
        ) from None
    return store, rank, world_size


def meet(store: Any, rank: int, world_size: int, timeout_s: float) -> None:
    """Waits until every rank has called this.

    `store` is that of `open_store`; the others may take `timeout_s`.

    Raises:
        CommunicationError: names the ranks that are missing.
    """
    keys = [f"megatron_sparse/met/{each}" for each in range(world_size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:
        absent = [each for each, key in enumerate(keys) if not store.check([key])]
        raise CommunicationError(
            f"{len(absent)} of {world_size} ranks have not come",
            expected=f"every rank within {timeout_s:g} s",
            got=f"no answer from {_named(absent)}",
            remedy="look at their output and nodes, or go around a node: sbatch --exclude",
        ) from None


def check_launch(transport: ProcessGroupTransport, clock: Clock) -> list[str]:
    """Runs all checks; returns lines to print, the same on every rank. Collective.

    The group has 2 ranks at least. `clock` is this rank's, in seconds; it times the links.

    Raises:
        CommunicationError: a rank is gone.
    """
    facts = complete(gather_facts(RankFacts.here(transport.device), transport))
    offsets_s = complete(clock_offsets(transport))
    links = complete(ring_links(transport, clock))
    return describe(facts, offsets_s, links)


def gather_facts(own: RankFacts, transport: Transport) -> Measuring[list[RankFacts]]:
    """Gathers every rank's facts, as JSON, because pickled objects could run code.

    `gather_rows` takes numbers, here the text's bytes. Spaces make all ranks' rows equally long.
    """
    text = json.dumps(asdict(own)).encode()
    rows = yield from gather_rows(list(text.ljust(FACTS_BYTES)), transport)
    return [RankFacts(**json.loads(bytes(row.to(torch.uint8).tolist()))) for row in rows]


def clock_offsets(transport: Transport) -> Measuring[list[float]]:
    """Reads all wall clocks after barriers; returns each clock less the median one, in seconds."""
    readings = []
    for _ in range(REPEATS):
        yield from gather_rows([0.0], transport)  # a barrier
        readings.append(time.time())
    rows = yield from gather_rows(readings, transport)
    offsets_s = rows - rows.median(0).values  # a row for each rank, a column for each reading
    return offsets_s.median(1).values.tolist()


def ring_links(transport: Transport, clock: Clock) -> Measuring[list[RingLink]]:
    """Measures the rates of all links of the rings; the result is the same on all ranks."""
    nodes = members_of(transport.nodes)
    # There are as many lanes as the smallest node has ranks.
    lanes = [list(lane) for lane in zip(*nodes, strict=False)] if len(nodes) > 1 else []
    found = []
    for kind, rings in (("inside a node", nodes), ("between nodes", lanes)):
        for phase in range(3):
            links = [link for ring in rings for link in ring_phase(ring, phase)]
            times_s = yield from _seconds(transport, links, clock)
            for sender, receiver in links:
                slower_s = max(times_s[sender], times_s[receiver])
                found.append(RingLink(kind, sender, receiver, MESSAGE_BYTES * 8e-9 / slower_s))
    return found


def ring_phase(ring: Sequence[int], phase: int) -> list[tuple[int, int]]:
    """Lists the links (sender, receiver) of a ring that are timed in a phase, 0 to 2.

    Phases 0 and 1 have every second link, phase 2 the last link of a ring of odd length. So no rank
    has two links in a phase.

    Example:
        >>> [ring_phase([0, 1, 2], phase) for phase in range(3)]
        [[(0, 1)], [(1, 2)], [(2, 0)]]
        >>> [ring_phase([4, 5], phase) for phase in range(3)]
        [[(4, 5)], [(5, 4)], []]
    """
    n = len(ring)
    links = [(ring[i], ring[(i + 1) % n]) for i in range(n)] if n > 1 else []
    paired = n - n % 2
    return links[paired:] if phase == 2 else links[phase:paired:2]


def _seconds(
    transport: Transport, links: Sequence[tuple[int, int]], clock: Clock
) -> Measuring[list[float]]:
    """Sends a message over each of the links at once; returns each rank's median seconds.

    Collective. No rank is an end of two links, so it either sends or receives its one buffer.
    """
    message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=transport.device)
    sent = [(receiver, message) for sender, receiver in links if sender == transport.rank]
    received = [(sender, message) for sender, receiver in links if receiver == transport.rank]
    rows = yield from times_by_rank(
        transport, REPEATS, clock, lambda: [transport.exchange(sent, received, TAG)]
    )
    return rows.median(1).values.tolist()


def describe(
    facts: Sequence[RankFacts], offsets_s: Sequence[float], links: Sequence[RingLink]
) -> list[str]:
    """Writes the lines that `check_launch` returns, from what the ranks have measured."""
    hosts = [each.host for each in facts]
    met = f"all {len(facts)} ranks have met, on {len(set(hosts))} hosts"
    kinds = dict.fromkeys(link.kind for link in links)
    slowest = [_slowest([each for each in links if each.kind == kind], hosts) for kind in kinds]
    return [met, *_compared(facts, hosts), _clocks(offsets_s, hosts), *slowest]


def _compared(facts: Sequence[RankFacts], hosts: Sequence[str]) -> list[str]:
    """Writes a line for each unusual value of a fact, and a line of all facts that are the same."""
    lines, same = [], []
    compared = [field.name for field in fields(RankFacts) if field.name != "host"]
    for name in compared:
        values = [getattr(each, name) for each in facts]
        # The most frequent value first.
        (usual, _), *unusual = Counter(values).most_common()
        if not unusual:
            same.append(usual if name == "device" else f"{name} {usual}")
        for value, _ in unusual:
            different = [rank for rank, each in enumerate(values) if each == value]
            lines.append(
                f"{name} differs: {usual} on most ranks, {value} on {_named(different, hosts)}"
            )
    return [*lines, f"the same on all ranks: {', '.join(same)}"]


def _clocks(offsets_s: Sequence[float], hosts: Sequence[str]) -> str:
    """Writes the line about clocks, from the difference of each rank's clock to the median."""
    wrong = [rank for rank, offset_s in enumerate(offsets_s) if abs(offset_s) > CLOCK_S]
    if not wrong:
        return f"clocks agree within {CLOCK_S:g} s"
    most = f"by {max(offsets_s, key=abs):+.3g} s at most"
    return f"clocks differ: {_named(wrong, hosts)}, {most}; start chrony or ntpd there"


def _slowest(links: Sequence[RingLink], hosts: Sequence[str]) -> str:
    """Writes the line about links of one kind: the slowest one, and the median rate."""
    slowest = min(links, key=lambda link: link.gbit_s)
    middle = median(link.gbit_s for link in links)
    ends = " to ".join(f"rank {end} ({hosts[end]})" for end in (slowest.sender, slowest.receiver))
    rates = f"{slowest.gbit_s:.3g} Gbit/s; the median has {middle:.3g}"
    return f"slowest link {slowest.kind}: {ends}, {rates}"


def _named(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """The ranks with their hosts, where known: `rank 2 (n1), rank 3 (n1) and 6 more`."""
    names = [f"rank {rank} ({hosts[rank]})" if hosts else f"rank {rank}" for rank in ranks]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
