"""Liveness of peers: which ranks of a group are gone, so that operations fail before their timeout.

gloo and NCCL wait out their timeout for a rank that is stopped, and often for one that has died. So
every group also has a side channel: each member holds one TCP connection to the group's first rank,
which passes on which ranks have died, have failed, or are silent (`peer_links`). A process has one
thread for this, however many groups it is in; the data path pays only two attribute reads per
operation. Cost: each rank sends a line of some 20 bytes a second and receives one; the first rank
of a group of n does so n - 1 times.

A process that ends (killed, crashed, or ended by an error) is noticed at once, and so is one that
reports a failure of its own. A process that is stopped, or a host that is cut off, is noticed when
it has been silent for `SILENCE_FRACTION` of the timeout, at least `SHORTEST_SILENCE_S`. Silence
alone is no error: it becomes one when an operation waits for the group of the silent rank.
"""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

from megatron_sparse.errors import CommunicationError, first_line
from megatron_sparse.transport.peer_links import PeerLinks

SILENCE_FRACTION = 0.5
SHORTEST_SILENCE_S = 3.0
"""Three beats: a process that merely holds the interpreter's lock may miss one or two."""
GRACE_S = 0.3
"""A rank counts as lost only after this time: its last messages may still be on their way."""
NAMING_S = 1.5
"""How long an operation that failed waits for the side channel to name the rank at fault."""

_lock = threading.Lock()
_links: PeerLinks | None = None
_users = 0


class PeerLiveness:
    """Knows which ranks of one group are gone. Made by `open_liveness`.

    Args:
        links: the process's side channel.
        ranks: global rank of each member.
        timeout_s: of the group's operations.
    """

    def __init__(self, links: PeerLinks, ranks: Sequence[int], timeout_s: float) -> None:
        self._links = links
        self._number = {rank: number for number, rank in enumerate(ranks)}
        self._silence_s = max(timeout_s * SILENCE_FRACTION, SHORTEST_SILENCE_S)
        self._found: str | None = None

    def trouble(self) -> str | None:
        """Which rank of the group is gone and why, in words; None while all are alive.

        Once it has found a rank, it always returns the same text. Does not block.
        """
        if self._found is None and (self._links.lost or self._links.silent_s):
            self._found = self._find()
        return self._found

    def _find(self) -> str | None:
        """The first lost or long silent rank of the group, in words; None if there is none."""
        for rank, loss in self._links.lost.items():
            # Not before the grace ends: messages that the rank has sent may still arrive.
            if rank in self._number and time.monotonic() - loss.noticed_s >= GRACE_S:
                return f"{self._name(rank)} {loss.why}"
        for rank, silent_s in self._links.silent_s.items():
            if rank in self._number and silent_s >= self._silence_s:
                return f"{self._name(rank)} is stopped or cut off: silent for {silent_s:.1f} s"
        return None

    def await_trouble(self) -> str | None:
        """Waits until `trouble` finds a rank, at most `NAMING_S`; returns its text, or None."""
        deadline_s = time.monotonic() + NAMING_S
        while (found := self.trouble()) is None and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return found

    def close(self, *, broken: bool = False) -> None:
        """Ends this group's use of the side channel; the process's last group closes it.

        Args:
            broken: an operation has failed: the channel is then closed without a goodbye, so that
                the other ranks count this one as gone.
        """
        global _links, _users
        with _lock:
            if self._links is not _links:  # closed already, or in a forked child
                return
            _users -= 1
            if _users == 0:
                # Nor is there a goodbye if an exception is ending this process (`close` in a
                # `finally`): peers may wait for this rank, and should learn that it is gone.
                error = sys.exception()
                ends_well = error is None or (isinstance(error, SystemExit) and not error.code)
                self._links.close(goodbye=ends_well and not broken)
                _links = None

    def _name(self, rank: int) -> str:
        number = self._number[rank]
        return f"rank {number}" if number == rank else f"rank {number} (global rank {rank})"


def open_liveness(
    ranks: Sequence[int], rank: int, timeout_s: float, broadcast: Callable[[bytes], bytes]
) -> PeerLiveness:
    """Connects this process to a group's side channel. Collective over the group; blocks.

    Args:
        ranks: global rank of each member; all others connect to the first one.
        rank: the global rank of this process.
        timeout_s: of the group's operations.
        broadcast: returns the first member's argument, at most 1000 bytes, on every member.

    Raises:
        CommunicationError: the first rank cannot be reached.
    """
    global _links, _users
    with _lock:
        if _links is None:  # no other group of this process has a side channel
            _links = PeerLinks(rank)
        links = _links
    # The first member's addresses, port and token; every other member passes in nothing.
    invitation = links.invite() if rank == ranks[0] else {}
    invitation = json.loads(broadcast(json.dumps(invitation).encode()))
    if rank != ranks[0]:
        try:
            links.join(ranks[0], invitation)
        except OSError as error:
            raise CommunicationError(
                f"the side channel to rank {ranks[0]} cannot be opened",
                expected=f"a TCP connection to one of {invitation['hosts']}, "
                f"port {invitation['port']}",
                got=error,
                remedy="let the ranks reach one another on any port, set GLOO_SOCKET_IFNAME to the "
                "right interface, or do without: scheme.watch_peers=false",
            ) from None
    with _lock:
        _users += 1
    return PeerLiveness(links, ranks, timeout_s)


def announce_failure(error: BaseException) -> None:
    """Tells the peers in all groups of this process that it fails. Does not block; never raises."""
    links = _links  # a local name: another thread may set the global one to None
    if links is not None:
        links.announce(f"has given up: {first_line(error)}")


def _forget_in_child() -> None:
    """Closes a forked child's (a data loader's) copies of its parent's connections."""
    global _links, _users
    if _links is not None:
        _links.abandon()
    _links, _users = None, 0


def _say_goodbye() -> None:
    # After an uncaught exception no goodbye: the other ranks should count this one as gone.
    if _links is not None and not hasattr(sys, "last_exc"):
        _links.close(goodbye=True)


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_say_goodbye)
