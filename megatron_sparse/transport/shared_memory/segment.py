"""How the ranks of a node come to share memory.

The first rank of the node makes the memory without a name (memfd), and hands its descriptor to the
others over a Unix socket. When all have mapped it, the descriptors are closed. So nothing has to be
removed: however ranks end, the kernel frees the memory with the last of them. The socket's name is
abstract, which has two consequences: it is in no file system, and only processes of the same
network namespace can connect. Ranks that merely have equal host names do not.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import closing

from megatron_sparse.cuda_ext.shared_memory import Engine, Geometry, segment_bytes
from megatron_sparse.errors import MegatronSparseError

SLOTS = 4
RANK_BYTES = 2**23
"""For the slots of all rings that a rank fills; with many ranks each ring has less of it."""
MOST_SLOT_BYTES = 2**18
LINE = 64
"""Bytes of a cache line, of which a slot is a multiple."""
MEETING_S = 20.0
"""How long the ranks of a node wait for one another's connections."""
NAME_BYTES = 200
"""Of the text that each rank tells the others."""

type Gather = Callable[[bytes], list[bytes]]


def geometry_of(ranks: int) -> Geometry:
    """The shape of the memory of a node with so many ranks: at most 8 MiB for each rank.

    Example:
        >>> geometry_of(4).slot_bytes, geometry_of(64).slot_bytes
        (262144, 16640)
    """
    slot_bytes = RANK_BYTES // (2 * SLOTS * (ranks - 1)) // LINE * LINE
    return Geometry(ranks, SLOTS, min(slot_bytes, MOST_SLOT_BYTES))


def share_memory(
    members: list[int], rank: int, gather: Gather
) -> tuple[Engine | None, dict[int, str]]:
    """Connects the ranks of this rank's node. Collective over the whole group.

    Args:
        members: the group's ranks on this node, in order.
        rank: of this process, in the group.
        gather: returns the argument of each rank of the group, at most `NAME_BYTES` long.

    Returns:
        This rank's engine; None where the node has one rank, or a rank of it could not join. And
        the reasons, by rank of the group.
    """
    meeting = _Meeting(members, rank)
    told = gather(meeting.prepare())
    name = None if _refusals(told, members) else told[members[0]]
    told = gather(meeting.join(name))
    refusals = _refusals(told, range(len(told)))
    return meeting.outcome(agreed=not _refusals(told, members)), refusals


def _refusals(told: list[bytes], ranks: list[int] | range) -> dict[int, str]:
    return {
        rank: told[rank][1:].decode(errors="replace") for rank in ranks if told[rank][:1] == b"!"
    }


def _refusal(error: Exception) -> bytes:
    text = error.what if isinstance(error, MegatronSparseError) else str(error)
    # Cut between characters.
    return b"!" + text.splitlines()[0].encode()[: NAME_BYTES - 1].decode(errors="ignore").encode()


class _Meeting:
    """One rank's part in making the memory of its node. A step that fails tells so in words."""

    def __init__(self, members: list[int], rank: int) -> None:
        self._members, self._place = members, members.index(rank)
        self._engine: Engine | None = None
        self._memory = -1
        self._listener: socket.socket | None = None
        self._refused = b""

    def prepare(self) -> bytes:
        """The first rank makes the memory, and returns the name of its socket."""
        if len(self._members) == 1:
            return b""
        try:
            self._geometry = geometry_of(len(self._members))
            size = segment_bytes(self._geometry)
            if self._place:
                return b""
            self._memory = os.memfd_create("megatron_sparse", os.MFD_CLOEXEC)
            # Allocated now: memory that is missing is an error here, and a crash at the first use.
            os.posix_fallocate(self._memory, 0, size)
            name = f"megatron_sparse-{secrets.token_hex(16)}".encode()
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(b"\0" + name)
            self._listener.listen(len(self._members))
            return name
        except (OSError, MegatronSparseError) as error:
            self._refused = _refusal(error)
            return self._refused

    def join(self, name: bytes | None) -> bytes:
        """Shares the memory over the socket of that name; None where a rank refused."""
        try:
            if len(self._members) > 1 and name is not None:
                if self._listener is not None:
                    self._hand_over(self._listener)
                else:
                    self._memory = _received(name, self._geometry)
                self._engine = Engine(self._memory, self._geometry, self._place)
        except (OSError, MegatronSparseError) as error:
            self._refused = _refusal(error)
        finally:
            if self._listener is not None:
                self._listener.close()
            if self._memory >= 0:
                os.close(self._memory)
        return self._refused

    def _hand_over(self, listener: socket.socket) -> None:
        deadline_s = time.monotonic() + MEETING_S
        missing = len(self._members) - 1
        while missing:
            listener.settimeout(max(deadline_s - time.monotonic(), 0.001))
            connection, _ = listener.accept()
            with closing(connection):
                if _user_of(connection) == os.geteuid():
                    socket.send_fds(connection, [repr(self._geometry).encode()], [self._memory])
                    missing -= 1

    def outcome(self, *, agreed: bool) -> Engine | None:
        """The engine, if all ranks of the node have one."""
        if self._engine is not None and not agreed:
            self._engine.stop()
            self._engine.free()
            return None
        return self._engine


def _received(name: bytes, geometry: Geometry) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(MEETING_S)
        connection.connect(b"\0" + name)
        if _user_of(connection) != os.geteuid():
            raise PermissionError("the ranks of a host run as different users")
        shape, descriptors, _, _ = socket.recv_fds(connection, 256, 1)
    if not descriptors:
        raise ConnectionError("the first rank of the host sent no memory")
    if shape != repr(geometry).encode():
        os.close(descriptors[0])
        raise ConnectionError("the ranks of the host run different versions of megatron_sparse")
    return descriptors[0]


def _user_of(connection: socket.socket) -> int:
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return struct.unpack("3i", credentials)[1]
