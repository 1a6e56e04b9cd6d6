"""Transport over torch.distributed (c10d): gloo on CPU, NCCL on CUDA, any group.

Streams, watchdog, flight recorder and timeouts are c10d's. The transport uses a group of its own,
with its own timeout, so that its operations cannot interleave with Megatron's on one communicator.

For gloo the transport adds:

- An operation ends as soon as a rank of the group is known to be gone (`liveness`), and at the
  latest `timeout_s` after it was posted. Its error names the rank.
- A pairwise message that is shorter than its receive buffer is an error.

With NCCL the next operation posted after a rank is gone raises the error; the watchdog ends the
operations already posted.
"""

import os
import secrets
import socket
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.errors import CommunicationError, ConfigError
from megatron_sparse.transport.arrival_counter import StoreArrivalCounter
from megatron_sparse.transport.base import Arrive, PeerTensors, Work, to_everyone
from megatron_sparse.transport.groups import borrow_group, return_group
from megatron_sparse.transport.liveness import PeerLiveness, open_liveness
from megatron_sparse.transport.membership import NodeAnswer, agreed_nodes
from megatron_sparse.transport.nccl_communicator import NcclCommunicator, refusal, require_supported
from megatron_sparse.transport.nccl_library import loaded_nccl
from megatron_sparse.transport.operation import Operation, StreamWork, WaitedWork, Waiters, wait_all

# torch 2.13 renamed these two; older ones only have the first name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SMALL_GATHER_BYTES = 4096
"""gloo gathers round a ring: n - 1 messages one after the other. Up to this size of a rank's tensor
direct messages between all ranks are faster."""
SMALL_GATHER_TAG = 1
"""Of those direct messages. They match in the order in which they are posted."""
BROADCAST_BYTES = 1024
CANARY = torch.frombuffer(bytearray(secrets.token_bytes(8)), dtype=torch.uint8)
"""Written to the end of every receive buffer, to find messages that are too short: gloo fills only
as much as the peer sent, and reports no error. No complete message ends in these random bytes."""


class ProcessGroupTransport:
    """See `Transport`. Making one is collective over the group.

    Args:
        group: the group whose ranks take part; a second group over the same ranks is made. Or the
            global ranks themselves, this one among them.
        timeout_s: seconds after which an operation fails.
        device: CPU for gloo, the current CUDA device for NCCL.
        liveness: notice ranks that die or stop, by a side channel (`liveness`).
        nccl_engine: make a communicator of NCCL's beside the group.

    Raises:
        ConfigError: the device does not fit the backend, or `nccl_engine` is set on a CPU or with a
            backend that the engine does not support, or the ranks disagree on which of them share a
            node (`membership`).
        DependencyError: NCCL's functions cannot be called.
        CommunicationError: the ranks cannot reach one another.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Sequence[int],
        timeout_s: float,
        device: torch.device,
        *,
        liveness: bool = SchemeConfig.watch_peers,
        nccl_engine: bool = SchemeConfig.nccl_engine,
    ) -> None:
        is_ranks = isinstance(group, Sequence)
        parent = dist.distributed_c10d._get_default_group() if is_ranks else group
        backend = dist.get_backend(parent)
        if (backend == "nccl") != (device.type == "cuda"):
            raise ConfigError(
                "the gradients' device does not fit the group's backend",
                expected="cuda with nccl, cpu with gloo",
                got=f"{device.type} with {backend}",
                remedy="choose --distributed-backend to match",
            )
        if nccl_engine:  # checked before `borrow_group`: after it, an error must return the group
            if device.type != "cuda":
                raise refusal(device.type)
            require_supported(parent)
            loaded_nccl()
        own_rank = dist.get_rank()  # the global one
        ranks = list(group) if is_ranks else dist.get_process_group_ranks(parent)
        self.rank = ranks.index(own_rank)
        self.world_size = len(ranks)
        self.device = device
        self.group = borrow_group(ranks, backend, timeout_s)
        self._timeout_s = timeout_s
        self._liveness: PeerLiveness | None = None
        self._waiters = Waiters()
        self._arrival_counters: list[StoreArrivalCounter] = []
        self.communicator: NcclCommunicator | None = None
        if liveness and self.world_size > 1:
            self._liveness = open_liveness(ranks, own_rank, timeout_s, self._broadcast)
        # Also a barrier: when this all-gather ends, every rank has joined the side channel.
        try:
            self.nodes = self._find_nodes()
        except ConfigError:
            self.close()
            raise
        if nccl_engine:
            self.communicator = NcclCommunicator(
                loaded_nccl(),
                self.rank,
                self.world_size,
                device,
                timeout_s,
                self._broadcast,
                self._announce,
            )

    def _broadcast(self, text: bytes) -> bytes:
        """Returns rank 0's text on every rank, padded with spaces to `BROADCAST_BYTES`; blocks."""
        padded = bytearray(text.ljust(BROADCAST_BYTES))
        characters = torch.frombuffer(padded, dtype=torch.uint8).to(self.device)
        operation = Operation("broadcast", None, self._timeout_s)  # None: open_liveness calls this
        try:
            dist.broadcast(characters, group=self.group, group_src=0)
        except RuntimeError as error:
            raise operation.error(error) from error
        return bytes(characters.tolist())

    def _find_nodes(self) -> tuple[int, ...]:
        """For each rank the number of its node (`membership`); blocks for a small all-gather."""
        answer = NodeAnswer.of(os.environ, socket.gethostname())
        own = torch.tensor(answer, dtype=torch.int64, device=self.device)
        gathered = own.new_empty(self.world_size * len(answer))
        self.all_gather(gathered, own).finish()
        return agreed_nodes(gathered.view(self.world_size, -1).tolist())

    def open_arrival_counter(self) -> Arrive:
        """See `Transport`. Opens another connection to the default group's store."""
        token = self._broadcast(secrets.token_hex(8).encode()).decode().strip()
        store = dist.distributed_c10d._get_default_store()
        counter = StoreArrivalCounter(
            store.clone(),  # type: ignore[attr-defined] - missing from torch's stubs
            f"megatron_sparse/{token}",
            self.world_size,
            self.device,
            lambda name: Operation(name, self._liveness, self._timeout_s),
        )
        self._arrival_counters.append(counter)
        return counter.arrive

    def _announce(self, name: str) -> Operation:
        """Makes an operation that is about to be posted; its deadline starts now.

        Raises:
            CommunicationError: a rank of the group is gone.
        """
        operation = Operation(name, self._liveness, self._timeout_s)
        if self._liveness is not None and self._liveness.trouble() is not None:
            raise operation.error()
        return operation

    def _collective(self, name: str, post: Callable[[], dist.Work | None]) -> Work:
        """Posts one of the backend's own collectives."""
        return self._post(self._announce(name), lambda: [post()])

    def all_reduce_(self, values_N: torch.Tensor) -> Work:
        """See `Transport`."""
        return self._collective(
            "all_reduce", lambda: dist.all_reduce(values_N, group=self.group, async_op=True)
        )

    def reduce_scatter(
        self, shard_M: torch.Tensor, values_N: torch.Tensor, *, average: bool = False
    ) -> Work:
        """See `Transport`."""
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return self._collective(
            "reduce_scatter",
            lambda: _reduce_scatter(shard_M, values_N, op=op, group=self.group, async_op=True),
        )

    def all_gather(self, gathered: torch.Tensor, own_M: torch.Tensor) -> Work:
        """See `Transport`."""
        if self.device.type != "cuda" and own_M.nbytes <= SMALL_GATHER_BYTES:
            return self.exchange(*to_everyone(self, gathered, own_M), SMALL_GATHER_TAG)
        return self._collective(
            "all_gather", lambda: _all_gather(gathered, own_M, group=self.group, async_op=True)
        )

    def exchange(self, sends: PeerTensors, receives: PeerTensors, tag: int) -> Work:
        """See `Transport`. NCCL has no tags; it matches messages by the order of the posts.

        With gloo a message that is longer than its receive buffer aborts the process: agree on
        sizes first. One that is shorter by 8 bytes or more is an error.
        """
        # An all-to-all: one tensor to, and one from, every other rank. Decided with empty tensors
        # included, because all ranks with messages must make the same NCCL call.
        is_all_to_all = all(
            len(pieces) == len({peer for peer, _ in pieces}) == self.world_size - 1
            for pieces in (sends, receives)
        )
        sends = [(peer, values) for peer, values in sends if values.numel()]
        receives = [(peer, values) for peer, values in receives if values.numel()]
        peers = {peer for peer, _ in [*sends, *receives]}
        assert self.rank not in peers, "a rank exchanges nothing with itself"
        if not peers:  # no peer posts a message to or from this rank either
            return StreamWork(Operation("an empty exchange", None, self._timeout_s), [])
        operation = self._announce(f"exchange with ranks {sorted(peers)}")
        if self.device.type == "cuda":
            if is_all_to_all:
                return self._post(operation, lambda: self._post_all_to_all(sends, receives))
            return self._post(operation, lambda: self._post_batch(sends, receives, tag))
        bytes_in = [(peer, values.view(torch.uint8).view(-1)) for peer, values in receives]
        for _, received in bytes_in:
            if received.numel() >= CANARY.numel():  # `_check_filled` raises if it is still there
                received[-CANARY.numel() :] = CANARY

        def post() -> list[dist.Work | None]:
            # Receives first: a message that arrives before its receive is posted has to wait.
            posted = [
                dist.irecv(received, group=self.group, group_src=peer, tag=tag)
                for peer, received in bytes_in
            ]
            return posted + [
                dist.isend(values.view(torch.uint8), group=self.group, group_dst=peer, tag=tag)
                for peer, values in sends
            ]

        return self._post(operation, post, lambda: _check_filled(operation, bytes_in))

    def _post(
        self,
        operation: Operation,
        post: Callable[[], Sequence[dist.Work | None]],
        check: Callable[[], None] | None = None,
    ) -> Work:
        """Calls `post`, and makes one `Work` of the c10d works that it returns.

        With gloo a thread waits for them, then `check` is called: gloo has no completion callback,
        and some works complete only inside wait(): pairwise messages, and the reduce-scatter.
        """
        try:
            posted = post()
        except RuntimeError as error:
            raise operation.error(error) from error
        if self.device.type == "cuda":
            return StreamWork(operation, posted)
        return WaitedWork(operation, self._waiters.submit(lambda: wait_all(posted)), check)

    def _post_all_to_all(self, sends: PeerTensors, receives: PeerTensors) -> list[dist.Work | None]:
        """`_post_batch` with every rank, in one call of c10d instead of one for each message."""
        _, any_values = (sends or receives)[0]
        empty = any_values.new_empty(0, dtype=torch.uint8)  # on the device of the tensors
        outputs, inputs = self._by_rank(receives, empty), self._by_rank(sends, empty)
        return [dist.all_to_all(outputs, inputs, group=self.group, async_op=True)]

    def _post_batch(self, sends: PeerTensors, receives: PeerTensors, tag: int) -> list[dist.Work]:
        """Posts all messages in one NCCL group call: sends and receives do not block each other."""
        operations = [(dist.irecv, peer, values) for peer, values in receives]
        operations += [(dist.isend, peer, values) for peer, values in sends]
        return dist.batch_isend_irecv(
            [
                dist.P2POp(post, values, group=self.group, tag=tag, group_peer=peer)
                for post, peer, values in operations
            ]
        )

    def _by_rank(self, pieces: PeerTensors, empty: torch.Tensor) -> list[torch.Tensor]:
        """For each rank the bytes of its tensor in `pieces`, or `empty` if it has none."""
        by_rank = [empty] * self.world_size
        for peer, values in pieces:
            by_rank[peer] = values.view(torch.uint8).view(-1)
        return by_rank

    def close(self, *, broken: bool = False) -> None:
        """Ends the transport; its group returns to the pool. Never waits for pending operations.

        Args:
            broken: an operation has failed. The group is not used again, and the other ranks learn
                that this one is gone.
        """
        for counter in self._arrival_counters:
            counter.close()
        self._arrival_counters.clear()
        if self.communicator is not None:
            self.communicator.close(broken=broken)
        if self._liveness is not None:
            self._liveness.close(broken=broken)
            self._liveness = None
        self._waiters.close()
        return_group(self.group, broken=broken)


def _check_filled(operation: Operation, bytes_in: PeerTensors) -> None:
    """Raises if the end of a received message still holds the `CANARY`."""
    for peer, received in bytes_in:
        if received.numel() >= CANARY.numel() and torch.equal(received[-CANARY.numel() :], CANARY):
            raise CommunicationError(
                f"{operation.name} failed: rank {peer}'s message is too short",
                expected=f"{received.numel()} bytes",
                got="fewer; the end of the buffer was not written to",
                remedy="run the same version of megatron_sparse with the same configuration on all "
                "ranks",
            )
