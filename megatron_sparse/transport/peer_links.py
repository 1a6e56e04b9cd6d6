"""The side channel of `liveness`: connections between processes, and the thread that serves them.

A process that is the first rank of a group listens; the others connect to it, once, however many
groups they share. Messages are lines of JSON, each an object with some of these keys:

- `hello` (rank) and `token`: the handshake, the first line to a listener; answered by `welcome`.
- `silent`: {rank: seconds} for all ranks that the listener has not heard from for 2 `BEAT_S`; the
  listener sends it every `BEAT_S` (a beat). The others send an empty object as often.
- `lost`: a rank, and `why` it is gone; sent by a rank that fails, and passed on by the listener.
- `bye`: an orderly end; a connection that ends without it belonged to a process that died.

A listener's invitation, which the group's own broadcast carries to the others (`open_liveness`),
has its addresses, its port and a random token. The listener drops a connection whose handshake
lacks the token: it may come from anyone. A member of a listener is a process that has connected.
"""

import fcntl
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any

from megatron_sparse.errors import ConfigError

BEAT_S = 1.0
CONNECT_S = 5.0
LONGEST_LINE = 1 << 20
MOST_HOSTS = 8
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Loss:
    """Why a rank is gone, and when this process learned of it (`time.monotonic`)."""

    why: str
    noticed_s: float


class _Link:
    """One connection to another process.

    Attributes:
        rank: of the process at the other end; None until the handshake.
        token: of the invitation by which this process connected; empty if the other connected.
        is_member: whether the other process connected to this one, which listens.
        heard_s: when bytes arrived last.
        relayed_silent_s: content of the last `silent` message: rank -> seconds.
    """

    def __init__(self, sock: socket.socket, rank: int | None = None, token: str = ""):
        self.socket = sock
        self.rank = rank
        self.token = token
        self.is_member = not token
        self.heard_s = time.monotonic()
        self.relayed_silent_s: dict[int, float] = {}
        self._received = b""  # the start of an incomplete line
        self._unsent = b""  # what the socket did not take yet

    def send(self, message: dict[str, Any]) -> None:
        """Sends as much as the socket takes, the rest with the next message. Raises OSError."""
        self._unsent += json.dumps(message).encode() + b"\n"
        try:
            sent = self.socket.send(self._unsent)
        except BlockingIOError:  # the socket's buffer is full
            return
        self._unsent = self._unsent[sent:]

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived.

        Raises:
            OSError: the connection has broken.
            EOFError: the connection has ended.
            ValueError: a line is no message of this protocol.
        """
        try:
            data = self.socket.recv(LONGEST_LINE)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        self.heard_s = time.monotonic()
        # What follows the last line break is incomplete, or empty: the next call completes it.
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > LONGEST_LINE:
            raise OSError("a line is too long")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError:  # brackets in brackets, thousands of them
            raise ValueError("not a message of a rank") from None
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("not a message of a rank")
        return messages


class PeerLinks:
    """All connections of this process, and the thread that serves them.

    Args:
        rank: the global rank of this process.

    Attributes:
        lost: rank -> why it is gone, in the order in which it was noticed.
        silent_s: rank -> seconds since its last message, only for those above 2 `BEAT_S`.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lost: dict[int, Loss] = {}
        self.silent_s: dict[int, float] = {}
        self._lock = threading.RLock()
        self._links: list[_Link] = []
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._invitation: dict[str, Any] = {}
        self._closing = False  # tells the thread to end
        threading.Thread(target=self._serve, name="megatron_sparse_peers", daemon=True).start()

    def invite(self) -> dict[str, Any]:
        """Starts to listen, if it does not yet; returns the invitation, for `join`."""
        with self._lock:
            if self._listener is None:
                dual = socket.has_dualstack_ipv6()
                family = socket.AF_INET6 if dual else socket.AF_INET
                self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
                self._listener.setblocking(False)
                port = self._listener.getsockname()[1]
                self._invitation = {
                    "hosts": own_hosts(),
                    "port": port,
                    "token": secrets.token_hex(8),
                }
                self._selector.register(self._listener, selectors.EVENT_READ, None)
            return self._invitation

    def join(self, rank: int, invitation: dict[str, Any]) -> None:
        """Connects to a listening rank, unless this process is connected to it already.

        Args:
            rank: the global rank of the listener.
            invitation: the listener's addresses (`hosts`), which are tried in turn, `port` and
                `token`.

        Raises:
            OSError: the listener cannot be reached at any of its addresses.
        """
        token = invitation["token"]  # unique to the listener
        with self._lock:
            if any(link.token == token for link in self._links):
                return
        failures = []
        for host in invitation["hosts"]:
            try:
                link = self._connect(host, invitation["port"], rank, token)
            except (OSError, EOFError, ValueError) as error:
                failures.append(f"{host}: {error or type(error).__name__}")
                continue
            self._add(link)
            return
        raise OSError("; ".join(failures) or "it has no address")

    def _connect(self, host: str, port: int, rank: int, token: str) -> _Link:
        """Connects and shakes hands; raises as `receive`, and OSError if another rank answers."""
        connected = socket.create_connection((host, port), timeout=CONNECT_S)
        try:
            link = _Link(connected, rank, token)
            link.send({"hello": self.rank, "token": token})
            # The first message is the answer; others may have arrived together with it.
            answers = []
            while not answers:
                answers = link.receive()
            if answers[0].get("welcome") != rank:
                raise OSError("another process listens there")
            with self._lock:
                for message in answers[1:]:
                    self._take(link, message)
        except BaseException:
            connected.close()
            raise
        connected.setblocking(False)  # from here on the serving thread reads it
        return link

    def announce(self, why: str) -> None:
        """Tells all connected processes that this one has failed."""
        with self._lock:
            self._tell({"lost": self.rank, "why": why}, self._links)

    def close(self, *, goodbye: bool) -> None:
        """Ends all connections and the thread; with `goodbye` it sends `bye` first."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            if goodbye:
                self._tell({"bye": 1}, self._links)
            self.abandon()

    def abandon(self) -> None:
        """Closes the sockets and sends nothing: in a forked child, the parent still uses them."""
        for link in self._links:
            link.socket.close()
        if self._listener is not None:
            self._listener.close()

    def _serve(self) -> None:
        """The thread: reads what arrives, and sends a beat every `BEAT_S`."""
        next_beat_s = time.monotonic()
        while not self._closing:
            ready = self._selector.select(max(0.0, next_beat_s - time.monotonic()))
            with self._lock:
                if self._closing:
                    break
                for key, _ in ready:
                    if key.data is None:  # the listener; a connection's data is its `_Link`
                        self._accept()
                    else:
                        self._read(key.data)
                if time.monotonic() >= next_beat_s:
                    # Only after all messages were read: a process that was itself stopped must
                    # not report the others as silent.
                    next_beat_s = time.monotonic() + BEAT_S
                    self._beat()
        self._selector.close()

    def _accept(self) -> None:
        """Accepts a connection; its rank is unknown until its `hello` arrives."""
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
        except OSError:  # the peer has closed it already
            return
        accepted.setblocking(False)
        self._add(_Link(accepted))

    def _add(self, link: _Link) -> None:
        """Lets the thread serve a new connection."""
        with self._lock:
            self._links.append(link)
            self._selector.register(link.socket, selectors.EVENT_READ, link)

    def _read(self, link: _Link) -> None:
        """Handles the messages that have arrived on a connection; ends it on `bye` or a fault."""
        if link not in self._links:  # dropped since `select` has reported it
            return
        try:
            for message in link.receive():
                if link.rank is None and not self._welcome(link, message):
                    return
                self._take(link, message)
                if "bye" in message:  # an orderly end: the rank is not lost
                    self._drop(link)
                    return
        except (OSError, EOFError, ValueError):
            self._end(link)

    def _welcome(self, link: _Link, message: dict[str, Any]) -> bool:
        """Checks the token of a new member's `hello`, answers it, and sends which ranks are lost.

        Returns False, and drops the connection, if the token is wrong.
        """
        if message.get("token") != self._invitation["token"]:
            self._drop(link)
            return False
        link.rank = int(message["hello"])
        link.send({"welcome": self.rank})
        for rank, loss in self.lost.items():
            link.send({"lost": rank, "why": loss.why})
        return True

    def _take(self, link: _Link, message: dict[str, Any]) -> None:
        """Stores what a message says of other ranks: which are `silent`, which is `lost`."""
        if "silent" in message:
            silent_s = {int(rank): float(s) for rank, s in message["silent"].items()}
            silent_s.pop(self.rank, None)  # this rank is alive, if slow to send
            link.relayed_silent_s = silent_s
        if "lost" in message:
            self._lose(int(message["lost"]), message["why"], link)

    def _end(self, link: _Link) -> None:
        """Handles a connection that broke without a goodbye."""
        self._drop(link)
        if link.rank is not None and not self._closing:
            self._lose(link.rank, f"has died: its connection to rank {self.rank} is gone", link)

    def _lose(self, rank: int, why: str, source: _Link) -> None:
        """Adds a rank to `lost`, once, and passes that on to all members but the source."""
        if rank in self.lost or rank == self.rank:
            return
        # A new dict, because other threads iterate over the old one without a lock.
        self.lost = {**self.lost, rank: Loss(why, time.monotonic())}
        others = [link for link in self._links if link.is_member and link is not source]
        self._tell({"lost": rank, "why": why}, others)

    def _beat(self) -> None:
        """Updates `silent_s`; sends `silent` to members, and a sign of life to listeners."""
        now_s = time.monotonic()
        silent_here_s: dict[int, float] = {}
        for link in self._links:
            if link.rank is not None and now_s - link.heard_s > 2 * BEAT_S:
                silent_here_s[link.rank] = round(now_s - link.heard_s, 1)
        relayed_s: dict[int, float] = {}
        for link in self._links:
            relayed_s |= link.relayed_silent_s
        self.silent_s = relayed_s | silent_here_s  # for a rank in both: as measured here
        known = [link for link in self._links if link.rank is not None]
        self._tell({"silent": silent_here_s}, [link for link in known if link.is_member])
        self._tell({}, [link for link in known if not link.is_member])

    def _tell(self, message: dict[str, Any], links: list[_Link]) -> None:
        """Sends a message on these connections; ends those that are broken."""
        for link in list(links):
            try:
                link.send(message)
            except OSError:
                self._end(link)

    def _drop(self, link: _Link) -> None:
        if link in self._links:
            self._links.remove(link)
            self._selector.unregister(link.socket)
            link.socket.close()


def check_gloo_interfaces() -> None:
    """Raises ConfigError if GLOO_SOCKET_IFNAME names an interface that this host does not have.

    gloo's own error would consist of the name alone.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    existing = [name for _, name in socket.if_nameindex()]
    absent = [name for name in chosen.split(",") if chosen and name not in existing]
    if absent:
        raise ConfigError(
            "gloo's network interface does not exist",
            expected=f"in GLOO_SOCKET_IFNAME one of {', '.join(existing)}",
            got=f"{', '.join(absent)}, on {socket.gethostname()}",
            remedy="set cluster.env.GLOO_SOCKET_IFNAME to the interface between the nodes; an "
            "exported GLOO_SOCKET_IFNAME comes before it",
        )


def own_hosts() -> list[str]:
    """Addresses at which other ranks may reach this host, the most likely first.

    They belong to the interfaces that gloo or NCCL is told to use, to the route to MASTER_ADDR, and
    to the host's name; at most `MOST_HOSTS`.
    """
    found: list[str] = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        name = os.environ.get(variable, "").split(",")[0]
        if name in {known for _, known in socket.if_nameindex()}:
            found += _interface_address(name)
    if master := os.environ.get("MASTER_ADDR"):
        found += _address_towards(master)
    try:
        addresses = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found += [str(address[0]) for *_, address in addresses]
    except socket.gaierror:  # a host that does not know its own name
        found += ["127.0.0.1"]
    return list(dict.fromkeys(found))[:MOST_HOSTS]


def _interface_address(name: str) -> list[str]:
    """The IPv4 address of a network interface, as a list; empty if it has none."""
    # A `struct ifreq`: the name, of 15 bytes at most; the answer has the address at byte 20.
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError:  # it has no IPv4 address
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _address_towards(host: str) -> list[str]:
    """The address of this host on the route to `host`, as a list; empty if there is no route.

    Sends nothing: connecting a datagram socket only looks up the route.
    """
    try:  # any port will do
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return [str(probe.getsockname()[0])]
    except OSError:
        return []
