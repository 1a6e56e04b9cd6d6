"""Measures a rank's links to all other ranks, and continues after a broken link.

Two ways, because they tell different things:

- Plain TCP to the network that ranks meet on: who can be reached, how long a message takes there
  and back, and what the other's clock says. A link that is broken is one entry in the answer.
- The backend of training (NCCL, gloo): pairs of ranks exchange messages, so many pairs at a time
  as there are, in world_size - 1 rounds (one more for an odd number).

Every operation has a deadline.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from megatron_sparse.transport.peer_links import own_hosts

PINGS = 20
"""Number of pings; the fastest counts, because a busy machine delays the others."""
EXCHANGES = 3
"""Number of exchanges; the fastest counts."""
EXCHANGE_BYTES = 2**22
CONNECT_S = 5.0
"""Longer than a lost packet of the handshake, which costs 1 and then 2 seconds."""
_MAGIC = b"msdoctor"
_CLOCK = struct.Struct("!d")


@dataclass(frozen=True)
class Invitation:
    """Where a rank answers.

    Attributes:
        hosts: its addresses, best first.
        port: the same for all of them.
    """

    hosts: tuple[str, ...]
    port: int


@dataclass(frozen=True)
class Ping:
    """A measurement of a link over plain TCP.

    Attributes:
        latency_us: half of the fastest round trip; None where the link is broken.
        offset_s: the other's clock less our own, known to within the latency.
        error: why it is broken; empty where it is not.
    """

    latency_us: float | None
    offset_s: float
    error: str = ""


class Answerer:
    """Answers pings on a thread of its own; a context manager that ends it."""

    def __init__(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=dual, backlog=1024
        )
        self.invitation = Invitation(tuple(own_hosts()), self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Closing alone does not wake a thread that accepts.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(CONNECT_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    """Sends the clock for each magic word, until the other closes."""
    with connection:
        connection.settimeout(CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while _receive(connection, len(_MAGIC)) == _MAGIC:
                connection.sendall(_CLOCK.pack(time.time()))
        except OSError:
            return  # the peer has gone, or is not a doctor


def ping(invitation: Invitation) -> Ping:
    """Measures the link to the rank that sent the invitation; never raises."""
    error = "it has no address"
    for host in invitation.hosts:
        try:
            with socket.create_connection((host, invitation.port), CONNECT_S) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return _ping(connection)
        except OSError as problem:
            error = f"{host}, port {invitation.port}: {problem}"
    return Ping(None, 0.0, error)


def _ping(connection: socket.socket) -> Ping:
    best_s, offset_s = float("inf"), 0.0
    for _ in range(PINGS):
        sent_s, begin_s = time.time(), time.perf_counter()
        connection.sendall(_MAGIC)
        (answer_s,) = _CLOCK.unpack(_receive(connection, _CLOCK.size))
        spent_s = time.perf_counter() - begin_s
        if spent_s < best_s:
            best_s, offset_s = spent_s, answer_s - (sent_s + spent_s / 2)
    return Ping(best_s / 2 * 1e6, offset_s)


def _receive(connection: socket.socket, n_bytes: int) -> bytes:
    received = b""
    while len(received) < n_bytes:
        part = connection.recv(n_bytes - len(received))
        if not part:
            raise ConnectionError("closed by the other side")
        received += part
    return received


def rounds(world_size: int) -> list[list[tuple[int, int]]]:
    """Every pair of ranks once, in rounds in which no rank has two partners.

    The circle method: one rank stays, the others move on by one place.

    Example:
        >>> rounds(4)
        [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    places = list(range(world_size + world_size % 2))  # an odd number gets a dummy partner
    found = []
    for _ in range(len(places) - 1):
        pairs = zip(places[: len(places) // 2], reversed(places), strict=False)
        found.append(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < world_size))
        places = [places[0], places[-1], *places[1:-1]]
    return found


def exchange_rates(rank: int, world_size: int, device: torch.device) -> dict[int, float]:
    """Gbit/s in each direction of the link to every other rank, over the default process group.

    Args:
        rank: of this process.
        world_size: ranks, all of which call this.
        device: what the group's backend takes.

    Raises:
        RuntimeError: from the backend, if a rank does not answer within the group's timeout.
    """
    sent = torch.zeros(EXCHANGE_BYTES, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    found: dict[int, float] = {}
    for pairs in rounds(world_size):
        for pair in pairs:
            if rank in pair:
                peer = pair[0] + pair[1] - rank
                found[peer] = _exchange_rate(peer, sent, received)
    return found


def _exchange_rate(peer: int, sent: torch.Tensor, received: torch.Tensor) -> float:
    best_s = float("inf")
    for _ in range(EXCHANGES):
        # So that waiting for the peer's last round does not count.
        exchange(peer, sent[:1], received[:1])
        begin_s = time.perf_counter()
        exchange(peer, sent, received)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return sent.nbytes * 8 / best_s / 1e9


def exchange(peer: int, sent: torch.Tensor, received: torch.Tensor) -> None:
    """Sends to and receives from `peer`; on CUDA waits for the device."""
    operations = [
        dist.P2POp(dist.isend, sent, peer),
        dist.P2POp(dist.irecv, received, peer),
    ]
    works: Sequence[dist.Work] = dist.batch_isend_irecv(operations)
    for work in works:
        work.wait()
    if sent.is_cuda:
        torch.cuda.synchronize(sent.device)
