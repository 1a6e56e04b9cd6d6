"""The compressed all-gather of one bucket's parameters: a job of the progress thread.

Each of n ranks owns a shard. The shard's *old bits* are those that all ranks gathered last, its
*new bits* those that they hold after this gather. A *record* is a message that turns old into new.

    encode      makes the record of this rank's shard
                -- the gate: from here on the job may use the network, see `reduction.reducer` --
    announce    one all-gather of 16 bytes a rank: size of the record, method, number of the gather,
                and, where ranks verify, hashes of the shard's old and new bits
    exchange    n - 1 rounds of records, one peer at a time, or once per node;
                decodes each record into its owner's shard, in place: on a CPU as soon as it
                arrives, on CUDA all together when the last one has arrived
    keep        stores the new bits of this rank's shard as the next gather's old bits; where it is
                exact, notes the directions of its moves, as decoders do

`ShardGather` has these stages; a subclass makes and decodes records. `ExactGather` sends moves
(`formats.moves`); `lossy.LossyGather` sends quantised differences.

The first gather is raw, and so is the one after `forget`: the backend's own all-gather of the bits,
in place, after the same announcement. The old bits are always those that were gathered last, not
those before the optimizer step. So a step may gather twice or never, and steps may be skipped.

Cost: (n - 1) |record| bytes sent by each rank, and (2 + n) words in the announcement; one copy of
the own shard is kept, for exact gathers also a bit for each parameter. `per_node` has its own
bytes. On CUDA the progress thread waits for the device once, for the size of its own record. The
announcements, the headers of all received records and the outcomes are copied to the CPU, and
meanwhile it works for other buckets.

With `per_node` records cross to each other node once: across nodes compressed, inside them raw.

    across    every rank sends its record to one rank of each other node: the one with its own
              number in the node, modulo the ranks there. That rank turns the old bits of the
              sender's shard into the new ones.
    inside    every rank sends its own shard and those it has decoded, raw, to the other ranks of
              its node, in place.

In nodes of equal size these are the lanes of `collectives.dense_hierarchical`. On k nodes of m
ranks a rank decodes k - 1 records instead of n - 1, and sends k raw shards to m - 1 others.

A corrupted, truncated or replayed record leaves its shard as it was, and ends the job with an
error that names the sending rank, the bucket and the field; other shards may be new by then.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives import POSTED
from megatron_sparse.collectives.base import (
    Identity,
    Phase,
    Round,
    Steps,
    Subgroup,
    whole_group,
)
from megatron_sparse.collectives.gather import Arrived, pairwise_all_gather, pairwise_rounds
from megatron_sparse.cuda_ext.reports import waiting_for
from megatron_sparse.errors import WireFormatError
from megatron_sparse.formats.moves import (
    apply_moves_,
    check_applied,
    coders_of,
    down_words,
    encode_moves,
    keep_moves_,
    most_bytes,
)
from megatron_sparse.parameters.agreement import (
    EXACT,
    NUMBER_BITS,
    RAW,
    Announcement,
    check_held,
    exchange_announcements,
    hash_of,
)
from megatron_sparse.recording import GatherRecord, RecordSink, StageTimer
from megatron_sparse.reduction.job import GATE, Pending, Stage, used_here
from megatron_sparse.reduction.progress import Progress
from megatron_sparse.transport import Transport
from megatron_sparse.transport.topology import members_of

NOTHING = torch.empty(0, dtype=torch.uint8)
Records = list[tuple[int, torch.Tensor]]
"""Records that have come and are not decoded yet, each with its sender."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """The options of an exact gather, the same on every rank; a subclass has those of lossy ones.

    Attributes:
        verify_every: every so many gathers ranks compare hashes.
        per_node: each record is sent to every other node only once.
    """

    verify_every: int
    per_node: bool = False


def dense_gather_bytes(values_N: torch.Tensor, world_size: int) -> int:
    """Bytes that each rank of a ring all-gather of N raw parameters sends."""
    return values_N.nbytes * (world_size - 1) // world_size


class ShardGather[W: Way](ABC):
    """Gathers one bucket; a subclass encodes and decodes the records.

    Args:
        bucket: names the bucket; its gradient is not used. `values_N` has as many elements.
        values_N: the parameters, 1-D and contiguous, on a CPU or a GPU; each rank owns one of n
            equal shards, in rank order. Gathers overwrite the shards of the other ranks.
        transport: the group, 2 ranks at least.
        way: the options; the same on every rank of the group.
        progress: its thread runs the gathers.
        sink: receives a `GatherRecord` of each gather.
    """

    method: ClassVar[str]

    def __init__(
        self,
        bucket: Bucket,
        values_N: torch.Tensor,
        transport: Transport,
        way: W,
        progress: Progress,
        sink: RecordSink,
    ) -> None:
        """Stores the arguments, and views of the shards; the first gather will be raw."""
        self._bucket = bucket
        self._values_N = values_N
        self._transport = transport
        self._way = way
        self._progress = progress
        self._sink = sink
        self._shards = values_N.view(transport.world_size, -1)
        self._own_M = self._shards[transport.rank]
        # Of this rank's shard: old bits (exact), master or replica (see `lossy`).
        self._kept_M: torch.Tensor | None = None  # None: the next gather is raw
        self._number = 0  # of the next gather, the same on all ranks

    @property
    def nbytes(self) -> int:
        """Bytes of the shard that is kept between gathers."""
        return 0 if self._kept_M is None else self._kept_M.nbytes

    def forget(self) -> None:
        """Makes the next gather raw: the ranks may no longer hold the bits that were gathered last.

        Call it on every rank, between two gathers. The raw gather takes the parameters from the
        buffer; what lossy gathers have rounded off is lost.
        """
        self._kept_M = None

    def release(self) -> None:
        """As `forget`, before a raw gather that this object does not see."""
        self.forget()

    @property
    @abstractmethod
    def _replica_M(self) -> torch.Tensor | None:
        """The own shard as the other ranks hold it; None if the next gather is raw."""

    @property
    @abstractmethod
    def _manner(self) -> str:
        """The settings that all ranks must have in common; part of the agreement."""

    @abstractmethod
    def _encode_own(self, number: int) -> torch.Tensor:
        """The record of this gather; then `_own_M` has the bits that it gives the other ranks."""

    @abstractmethod
    def _decode_(self, records: Records, number: int, timer: StageTimer) -> Phase:
        """Turns ranks' shards into what their records say; one that is refused changes nothing."""

    @abstractmethod
    def _most_bytes(self) -> int:
        """The most bytes that a record of a shard can have."""

    @abstractmethod
    def _keep(self) -> None:
        """From now on every rank holds the bits of `_own_M`."""

    def start(self, step: int) -> Pending[None]:
        """Launches a gather and returns at once. This rank's shard must be final.

        The bucket must not be read or written before `Pending.wait` has returned. Gathers are
        started in the same order on every rank of the group.

        Args:
            step: the training step, the same on every rank.
        """
        record = GatherRecord(
            bucket=self._bucket.name,
            step=step,
            method=RAW if self._replica_M is None else self.method,
            numel=self._values_N.numel(),
            dense_bytes=dense_gather_bytes(self._values_N, self._transport.world_size),
            launched_s=time.perf_counter(),
            timer=StageTimer(self._values_N.device),
        )
        number = self._number
        self._number = (number + 1) % 2**NUMBER_BITS
        stages = self._gather(record, number)
        return self._progress.submit(
            Pending(record.bucket, stages, record.timer, record, self._sink)
        )

    def _gather(self, record: GatherRecord, number: int) -> Stage[None]:
        """Runs the stages of the module's docstring in order: encode, announce, exchange, keep.

        A generator for the progress thread. `record` receives the bytes and times of the gather.
        """
        sent, announcement = self._encode(record.timer, number)
        yield GATE
        used_here([sent])  # allocated on the stream of `encode`; from here on another one reads it
        # What must be the same on all ranks.
        identity = Identity(
            f"parameters {self._manner}", self._bucket, str(self._own_M.dtype), record.step
        )
        announced = yield from exchange_announcements(announcement, identity, self._transport)
        self._check_sizes(announced)
        if announcement.method != RAW:
            sizes = [theirs.nbytes for theirs in announced]
            waiting: Records = []

            def take(sender: int, received: torch.Tensor) -> None:
                """Takes a record of another rank; on a CPU decodes it at once."""
                if sender != self._transport.rank:
                    waiting.append((sender, received))
                    if not received.is_cuda:
                        waiting_for(decode())

            def decode() -> Phase:
                """Decodes the records that have not been decoded yet."""
                if waiting:
                    yield from self._check_and_decode(waiting, announced, record.timer)
                    waiting.clear()

            record.message_bytes = sent.numel()
            record.wire_bytes = yield from self._exchange(sent, sizes, identity.tag, take, decode)
        else:
            gathered = self._transport.all_gather(self._values_N, self._own_M)
            yield POSTED  # the next job may pass the gate
            yield gathered  # waits until it is done
            record.wire_bytes = record.dense_bytes
        self._verify_new(announced)
        self._keep()

    def _exchange(
        self,
        sent: torch.Tensor,
        sizes: list[int],
        tag: int,
        take: Arrived,
        decode: Callable[[], Phase],
    ) -> Steps:
        """Exchanges records between all ranks or once per node; returns the bytes this rank sent.

        `take` is called with a sender and its record when that has arrived, `decode` when all have.
        """
        if not any(sizes):  # no shard has changed
            yield POSTED
            return 0
        if self._way.per_node:
            gather = gather_per_node(sent, sizes, self._shards, self._transport, tag, take, decode)
            return (yield from gather)
        group = whole_group(self._transport, tag)
        received = sent.new_empty(sum(sizes) - sent.numel())
        yield from pairwise_all_gather(sent, received, sizes, group, take)
        yield from decode()
        return group.sent_bytes

    def _encode(self, timer: StageTimer, number: int) -> tuple[torch.Tensor, Announcement]:
        """Returns this rank's record, which is empty in a raw gather, and its announcement."""
        verifies = self._verifies(number)
        method, old_hash, new_hash = RAW, 0, 0
        sent, nbytes = NOTHING, self._own_M.nbytes
        with timer.stage("encode"):
            if self._replica_M is not None:
                method = self.method
                old_hash = hash_of(self._replica_M) if verifies else 0
                sent = self._encode_own(number)  # lossy: writes the new bits to `_own_M`, too
                nbytes = sent.numel()
            new_hash = hash_of(self._own_M) if verifies else 0
        return sent, Announcement(nbytes, method, number, old_hash, new_hash)

    def _verifies(self, number: int) -> bool:
        return number > 0 and number % self._way.verify_every == 0

    def _check_sizes(self, announced: Sequence[Announcement]) -> None:
        """Refuses a size that no record of a shard can have, before memory is allocated for it."""
        for rank, theirs in enumerate(announced):
            most = self._own_M.nbytes if theirs.method == RAW else self._most_bytes()
            if theirs.nbytes > most:
                raise WireFormatError(
                    f"rank {rank}: field size is out of range",
                    expected=f"at most {most} bytes for {self._own_M.numel()} parameters",
                    got=theirs.nbytes,
                    remedy="use the same version of megatron_sparse on every rank",
                )

    def _check_and_decode(
        self, records: Records, announced: Sequence[Announcement], timer: StageTimer
    ) -> Phase:
        """Decodes records: turns the old bits of the senders' shards into the new ones.

        Raises:
            ReplicaError: this rank's copy of a shard is not the old bits, where ranks verify.
            WireFormatError: a record is damaged; its shard is unchanged.
        """
        own_rank, number = self._transport.rank, announced[0].number
        if self._verifies(number):
            when = f"before gather number {number}"
            for sender, _ in records:
                old_hash = announced[sender].old_hash
                check_held(self._shards[sender], old_hash, sender, own_rank, when)
        yield from self._decode_(records, number, timer)

    def _verify_new(self, announced: Sequence[Announcement]) -> None:
        """Compares the other ranks' new shards with the hashes they announced, where ranks verify.

        Raises:
            ReplicaError: this rank does not hold the new bits of a shard.
        """
        own_rank, number = self._transport.rank, announced[0].number
        when = f"after gather number {number}"
        for owner, theirs in enumerate(announced):
            if owner != own_rank and self._verifies(number):
                check_held(self._shards[owner], theirs.new_hash, owner, own_rank, when)


class ExactGather(ShardGather[Way]):
    """Sends moves; keeps a copy of the old bits of this rank's shard.

    Each rank also keeps the directions of the last moves of all shards, one bit for each parameter.
    A raw gather forgets these on all ranks. Parameters are bf16, fp16 or fp32.
    """

    method = EXACT
    _down_NW: torch.Tensor  # [ranks, words]: directions of each shard; set by raw gathers

    @property
    def nbytes(self) -> int:
        """Bytes of the old bits and the directions."""
        return 0 if self._kept_M is None else self._kept_M.nbytes + self._down_NW.nbytes

    @property
    def _replica_M(self) -> torch.Tensor | None:
        return self._kept_M

    @property
    def _manner(self) -> str:
        return "rans"

    def _encode_own(self, number: int) -> torch.Tensor:
        assert self._kept_M is not None, "else the gather is raw"
        down_W = self._down_NW[self._transport.rank]
        return encode_moves(self._kept_M, self._own_M, epoch=number, down=down_W)

    def _decode_(self, records: Records, number: int, timer: StageTimer) -> Phase:
        ranks, moves = zip(*records, strict=True)
        held = [self._shards[rank] for rank in ranks]
        coders = yield from coders_of(moves, held, epoch=number, ranks=ranks)
        with timer.stage("decode"):
            down = [self._down_NW[rank] for rank in ranks]
            statuses = apply_moves_(moves, held, coders, down)
        yield from check_applied(statuses, ranks)

    def _most_bytes(self) -> int:
        return most_bytes(self._own_M.numel(), self._own_M.dtype)

    def _keep(self) -> None:
        if self._kept_M is not None:
            keep_moves_(self._kept_M, self._own_M, self._down_NW[self._transport.rank])
            return
        self._kept_M = self._own_M.clone()
        ranks, words = self._transport.world_size, down_words(self._own_M.numel())
        self._down_NW = torch.zeros(ranks, words, dtype=torch.int32, device=self._own_M.device)


class NodeRoutes:
    """Which ranks exchange records in a gather once per node, see the module's docstring.

    Attributes:
        here: the ranks of this rank's node, ascending.
        targets: for each round across nodes the rank that this rank sends its record to.
        sources: for each round the ranks that send their record to this rank.

    Args:
        nodes: the node of each rank.
        rank: this rank.

    Example:
        Ranks 0 and 1 share a node; rank 2 is alone on its own and takes both records.
        >>> routes = NodeRoutes((0, 0, 1), 2)
        >>> routes.targets, routes.sources, routes.carried_by(2)
        ([0], [[0, 1]], [2, 0, 1])
    """

    def __init__(self, nodes: Sequence[int], rank: int) -> None:
        """Computes the routes: in round i >= 1 this node receives from the i-th node after it."""
        members = members_of(nodes)
        own_node = next(node for node, ranks in enumerate(members) if rank in ranks)
        node_count = len(members)
        self.here = members[own_node]
        # For each round i the ranks of the i-th node after this one.
        self._others = [members[(own_node + i) % node_count] for i in range(1, node_count)]
        number = self.here.index(rank)  # this rank's number in its node
        # In round i it sends to the i-th node before this one: the i-th in the reversed list.
        self.targets = [ranks[number % len(ranks)] for ranks in reversed(self._others)]
        self.sources = [self._sent_to(rank, ranks) for ranks in self._others]

    def _sent_to(self, rank: int, there: Sequence[int]) -> list[int]:
        """The ranks of another node whose records go to a rank of this one."""
        return list(there[self.here.index(rank) :: len(self.here)])

    def carried_by(self, rank: int) -> list[int]:
        """The owners of the shards that a rank of this node hands on inside it, itself first."""
        return [rank] + [owner for there in self._others for owner in self._sent_to(rank, there)]


def gather_per_node(
    own_record: torch.Tensor,
    sizes: Sequence[int],
    shards: torch.Tensor,
    transport: Transport,
    tag: int,
    take: Arrived,
    decode: Callable[[], Phase],
) -> Steps:
    """Gathers all shards on every rank, once per node; returns the bytes that this rank sent.

    Args:
        own_record: this rank's record.
        sizes: bytes of each rank's record.
        shards: [n, M], the parameters. `take` and `decode` write the shards whose records this rank
            receives; the exchange inside the node writes the rest.
        transport: the group; the routes follow from its `nodes`.
        tag: of the messages.
        take: called with a sender and its record, for each record that this rank receives.
        decode: run after the last of them. Then all these shards must be written: they are sent on.
    """
    routes = NodeRoutes(transport.nodes, transport.rank)
    across = whole_group(transport, tag)
    received: list[list[tuple[int, torch.Tensor]]] = []  # for each round: senders and records
    rounds: list[Round] = []  # for each: what is sent, and what is received
    for target, senders in zip(routes.targets, routes.sources, strict=True):
        received.append([(sender, own_record.new_empty(sizes[sender])) for sender in senders])
        rounds.append(([(target, own_record)], received[-1]))

    def arrived(number: int) -> None:
        """Called when the round before `number`, if any, has arrived: takes its records."""
        for sender, record in received[number - 1] if number else ():
            take(sender, record)

    yield from across.in_rounds(rounds, arrived, independent=True)
    yield from decode()
    inside = Subgroup(transport, routes.here, tag)
    # For each rank of this node, the raw shards that it sends to the others: its own and those it
    # has decoded. They are received in place.
    carried = [[shards[owner] for owner in routes.carried_by(rank)] for rank in routes.here]
    own_carried = carried[inside.rank]
    exchanged = pairwise_rounds([own_carried] * inside.world_size, carried, inside)
    yield from inside.in_rounds(exchanged, independent=True, last=True)  # the job posts no more
    return across.sent_bytes + inside.sent_bytes
