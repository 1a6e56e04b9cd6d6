"""A posted operation: its name, its deadline, and the typed error that its failure becomes."""

from __future__ import annotations

import time

from megatron_sparse.errors import CommunicationError
from megatron_sparse.transport.liveness import PeerLiveness


class Operation:
    """A posted operation's name, its deadline, and how its failure becomes a typed error.

    Args:
        name: the operation and its peers, for errors.
        liveness: knows which of the group's ranks are gone; None if `scheme.watch_peers` is off.
        timeout_s: seconds that it may take.
    """

    def __init__(self, name: str, liveness: PeerLiveness | None, timeout_s: float) -> None:
        self.name = name
        self._liveness = liveness
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s

    def is_hopeless(self) -> bool:
        """Whether waiting is pointless: a rank is gone, or time is up."""
        return self.is_late() or (
            self._liveness is not None and self._liveness.trouble() is not None
        )

    def is_late(self) -> bool:
        """Whether its time is up."""
        return time.monotonic() >= self._deadline_s

    def error(self, cause: Exception | None = None) -> CommunicationError:
        """The error to raise; may block briefly to learn which rank is at fault.

        Args:
            cause: the backend's exception; None if the backend still waits.
        """
        is_late = self.is_late() or "Timed out" in str(cause)
        trouble, got = None, str(cause).splitlines()[0] if str(cause) else repr(cause)
        if cause is None or is_late:
            got = f"no answer within {self._timeout_s:g} s"
        if self._liveness is not None:
            trouble = self._liveness.trouble() if is_late else self._liveness.await_trouble()
            if trouble is None and is_late:
                got += f"; {self._liveness.whereabouts()}"
        return CommunicationError(
            f"{self.name} failed" + (f": {trouble}" if trouble else ""),
            expected="every rank of the group takes part within scheme.timeout_s "
            f"({self._timeout_s:g} s)",
            got=trouble or got,
            remedy="look at that rank's log, and restart from the last checkpoint"
            if trouble
            else "look at the other ranks' logs for the one that stopped first or does something "
            "else; raise scheme.timeout_s if one is only slow",
        )
