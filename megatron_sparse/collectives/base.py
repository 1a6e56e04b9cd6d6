"""Shared parts of collectives: their arguments, the agreement, and messages between ranks.

- The *agreement* opens a collective: an all-gather in which every rank sends a fingerprint of what
  it takes part in (`Identity`) and the sizes of its coming messages.
- To *post* an operation is to hand it to gloo or NCCL, which returns a `Work` to wait for.
- `POSTED` and `UNORDERED` (`Marker`) tell the thread that drives a collective when the next
  bucket's collective may post.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives.checksummed import checksummed_row, verified_row
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.cuda_ext.codec_cuda import to_device
from megatron_sparse.cuda_ext.reports import on_cpu
from megatron_sparse.errors import CommunicationError
from megatron_sparse.formats.message import Message, MessageBuffers
from megatron_sparse.recording import StageTimer
from megatron_sparse.transport import ProcessGroupTransport, Transport, Work
from megatron_sparse.transport.base import Marker, PeerTensors, SubsetTransport

SMALL_BYTES = 2**19
"""gloo: messages of a bucket up to this total size are posted at once: rounds would take longer."""

ALIGNMENT = 4096
"""Elements: a tile of the sparse formats, and whole pages of memory."""
MIN_UNITS = 256
"""Least number of alignment units in a piece; keeps the sizes of pieces within 1 %."""

POSTED, UNORDERED, QUEUED = Marker.POSTED, Marker.UNORDERED, Marker.QUEUED

Yielded = Work | Marker
"""What a collective yields to the thread that drives it."""

Steps = Generator[Yielded, None, int]
"""Yields works to wait for and, at most once each, `UNORDERED`, `POSTED` and, in capacity mode on
CUDA, `QUEUED`; returns the bytes that this rank sent.

The count covers pairwise messages, sizes included, but not the all-gathers of the agreement. For
`dense` it is the count of a ring.
"""

Phase = Generator[Yielded, None, None]
"""A part of a collective."""


def without[Y, T](steps: Generator[Y, None, T], kind: type) -> Generator[Y, None, T]:
    """Runs a collective, or a stage of a job, and drops the values of one type that it yields.

    Args:
        steps: the collective, or the stage.
        kind: the type to drop. `Marker` if the job posts more messages after these steps: their
            `POSTED` comes too early. They must not yield `QUEUED`, which is a `Marker` too.
            `job.Gate` if another gate orders the posts, or if the posts need no order.
    """
    while True:
        try:
            yielded = next(steps)
        except StopIteration as end:
            return end.value
        if not isinstance(yielded, kind):
            yield yielded


Round = tuple[PeerTensors, PeerTensors]
"""The sends and the receives of one exchange."""


@dataclass(frozen=True)
class Exchange:
    """The arguments that every collective takes: one rank's bucket and the means to synchronise it.

    A sparse collective is `run(exchange, message)`, a dense one `run(exchange, values_N, step)`.

    Attributes:
        bucket: receives the sum: all of it, or this rank's shard for a reduce-scatter.
        transport: the group of ranks.
        buffers: where received messages, partial sums and a narrower gradient's fp32 sum live.
        timer: receives the seconds of network, encoding and decoding.
        options: `scheme` of the configuration, the same on every rank. Options that change the
            messages are part of a collective's `Identity`.
        straggler: the rank of the group that is expected to come last to this bucket; None if no
            straggler is known. All ranks have agreed on it.
        averages: the backend must average, because gradients have not been divided: for `dense` and
            a reduce-scatter only.
        is_agreed: ranks have agreed about this bucket since compression was switched off, so
            `dense` skips the agreement.
        stream: on CUDA, where its stages run; buckets share the buffers of each stream.
    """

    bucket: Bucket
    transport: Transport
    buffers: MessageBuffers
    timer: StageTimer
    options: SchemeConfig
    straggler: int | None = None
    averages: bool = False
    is_agreed: bool = False
    stream: str = "network"

    @property
    def scatters(self) -> bool:
        """Whether each rank gets its own shard of the sum only."""
        return self.bucket.op is CollectiveOp.REDUCE_SCATTER

    def take(self, purpose: str, numel: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """A buffer for the job's network and decoding stages, valid until the bucket's job ends.

        On CUDA all buckets share one buffer for each purpose and `stream`, which runs bucket after
        bucket (`reduction.job`). On a CPU, and with a straggler to skip, each bucket has its own
        buffer, because several buckets are in flight at once.
        """
        device = self.bucket.grad_N.device
        shared = device.type == "cuda" and self.straggler is None
        name = f"{purpose}:{self.stream if shared else self.bucket.name}"
        return self.buffers.take(name, numel, device, dtype)


SparseCollective = Callable[[Exchange, Message], Steps]
"""Adds up all ranks' messages."""

DenseCollective = Callable[[Exchange, torch.Tensor, int], Steps]
"""Adds up all ranks' `values_N`, the whole gradients of one step. It may overwrite them."""


@dataclass(frozen=True)
class Identity:
    """What all ranks of a collective must agree on.

    Attributes:
        scheme: the collective's name, followed by the options that its messages depend on.
        bucket: the bucket; ranks must agree on its name, op and size.
        value_dtype: dtype on the wire.
        step: the training step.
    """

    scheme: str
    bucket: Bucket
    value_dtype: str
    step: int

    @classmethod
    def of_message(cls, scheme: str, exchange: Exchange, message: Message) -> Identity:
        """Of a sparse collective."""
        return cls(scheme, exchange.bucket, message.value_dtype, message.step)

    @classmethod
    def of_values(
        cls, scheme: str, exchange: Exchange, values_N: torch.Tensor, step: int
    ) -> Identity:
        """Of a dense collective."""
        return cls(scheme, exchange.bucket, str(values_N.dtype), step)

    @cached_property
    def fingerprint(self) -> int:
        """A checksum of all fields: it differs between ranks that disagree."""
        bucket = self.bucket
        text = (
            f"{bucket.name}|{bucket.op}|{bucket.numel}|{self.scheme}|{self.value_dtype}|{self.step}"
        )
        return zlib.crc32(text.encode())

    @property
    def tag(self) -> int:
        """The tag of all pairwise messages of the collective.

        gloo matches only messages with the same tag. So ranks that disagree time out, with an
        error that names the bucket, and overrun no buffer.
        """
        return self.fingerprint & 0x7FFFFFFF  # a tag has 31 bits

    def _word(self, count: int | None) -> int:
        """The fingerprint; with a `count`, a checksum of both."""
        own = self.fingerprint
        return own if count is None else zlib.crc32(str(count).encode(), own)

    def row(
        self, sizes: Sequence[int], room: int, device: torch.device, count: int | None = None
    ) -> torch.Tensor:
        """This rank's row of the agreement: fingerprint, count with a checksum, up to `room` sizes.

        int64 [2 + `room`]; unused words are 0. `count` is len(sizes) where every rank must send the
        same number of sizes (it is then part of the fingerprint), else None.
        """
        own = checksummed_row(self._word(count), sizes)
        words = torch.zeros(2 + room, dtype=torch.int64)
        words[: len(own)] = torch.tensor(own)
        return to_device(words, device)

    def read_row(self, words: Sequence[int], rank: int, count: int | None = None) -> list[int]:
        """Checks a row that `rank` has made with `row`, and returns its sizes.

        `count`: the number of sizes that the sender must have passed to `row`; None for any.

        Raises:
            CommunicationError: that rank takes part in another collective.
            WireFormatError: the row is damaged.
        """
        own = self._word(count)
        theirs, sizes = verified_row(words, rank)
        if theirs != own:
            bucket = self.bucket
            raise CommunicationError(
                f"rank {rank} of the group is not in the same collective",
                expected=f"bucket {bucket.name}: {self.scheme} {bucket.op} of {bucket.numel} "
                f"elements as {self.value_dtype}, step {self.step} (fingerprint {own:#010x})",
                got=f"fingerprint {theirs:#010x} with {len(sizes)} sizes",
                remedy="use the same configuration, model and step on every rank",
            )
        return sizes


def exchange_sizes(
    sizes: list[int],
    identity: Identity,
    transport: Transport | SubsetTransport,
    *,
    unordered: bool = False,
) -> Generator[Yielded, None, list[list[int]]]:
    """The agreement: all-gathers identities and coming messages' sizes; returns each rank's sizes.

    A rank sends 8 (2 + max(n, 2)) bytes, for n ranks and any number of sizes, because gloo ends a
    process whose row has another length than its peers'.

    Args:
        sizes: at most max(n, 2), the same count on every rank.
        identity: of the collective; it must be the same on every rank.
        transport: moves the rows.
        unordered: the collective's later messages are small and carry its own tag. So on a CPU the
            next bucket may post its agreement while this one is in flight.

    Raises:
        CommunicationError: a rank has another identity or number of sizes.
        WireFormatError: a rank's row is damaged.
    """
    n = transport.world_size
    words = identity.row(sizes, max(n, 2), transport.device, len(sizes))
    gathered = words.new_empty(n * words.numel())
    work = transport.all_gather(gathered, words)
    if unordered and transport.device.type != "cuda":
        yield UNORDERED
    yield work
    found = yield from on_cpu(gathered)
    rows = zip(found.view(n, -1).tolist(), names_of(transport), strict=True)
    return [identity.read_row(row, rank, len(sizes)) for row, rank in rows]


def names_of(transport: Transport | SubsetTransport) -> Sequence[int]:
    """The number of each of the transport's ranks in the whole group, which errors state."""
    is_subset = isinstance(transport, SubsetTransport)
    return transport.ranks if is_subset else range(transport.world_size)


class Subgroup:
    """Some ranks of a transport, numbered from 0; a phase of a collective runs on them.

    Attributes:
        rank: this rank's number in the subgroup.
        world_size: ranks in the subgroup.
        ranks: the transport's rank of each number in the subgroup; this rank is one of them.
        sent_bytes: what this rank has sent through the subgroup.
        tag: of its messages (`Identity.tag`).
    """

    def __init__(self, transport: Transport, ranks: Sequence[int], tag: int) -> None:
        self.rank = ranks.index(transport.rank)
        self.world_size = len(ranks)
        self.sent_bytes = 0
        self._transport, self.ranks, self.tag = transport, ranks, tag

    def exchange(self, sends: PeerTensors, receives: PeerTensors, *, last: bool = False) -> Phase:
        """Runs one round of sends and receives, with peers by their numbers in the subgroup.

        `last`: this rank will post nothing more in the whole collective.
        """
        yield from self.in_rounds([(sends, receives)], last=last)

    def in_rounds(
        self,
        rounds: Sequence[Round],
        meanwhile: Callable[[int], None] | None = None,
        *,
        independent: bool = False,
        last: bool = False,
    ) -> Phase:
        """Runs rounds of sends and receives one after the other, with local work in between.

        - gloo: each round is posted when the one before has arrived. Over TCP, senders that share a
          receiver slow one another down. Small `independent` rounds are all posted at the start.
        - CUDA: all rounds are posted at the start, `independent` ones in one call: NCCL serves all
          peers of a call together, and a call costs the CPU more time than its messages.

        Args:
            rounds: one may send what an earlier one received, unless they are `independent`.
            meanwhile: called with i while round i is in flight and all rounds before it have
                arrived; at the end with the number of rounds.
            independent: no round sends or overwrites what another round receives or sends.
            last: this rank will post nothing more in the whole collective.
        """
        on_cuda = self._transport.device.type == "cuda"
        in_one_call = on_cuda and independent and len(rounds) > 1
        if in_one_call:
            yield from self._in_one(rounds, meanwhile, last=last)
            return
        # Virtual ranks on a CPU post round by round: each takes its time, as in the schemes' costs.
        over_gloo = not on_cuda and isinstance(self._transport, ProcessGroupTransport)
        sent_bytes = sum(values.nbytes for sends, _ in rounds for _, values in sends)
        is_small = independent and over_gloo and sent_bytes <= SMALL_BYTES
        posts_all = on_cuda or is_small  # in the first iteration
        last_posting = 0 if is_small else len(rounds) - 1  # on CUDA no round blocks the CPU
        posted: list[Work] = []
        for number in range(len(rounds)):
            end = len(rounds) if posts_all else number + 1
            posted += [self.post(*each) for each in rounds[len(posted) : end]]
            if last and number == last_posting:
                yield POSTED
            if meanwhile is not None:
                meanwhile(number)
            yield posted[number]
        if meanwhile is not None:
            meanwhile(len(rounds))

    def _in_one(
        self, rounds: Sequence[Round], meanwhile: Callable[[int], None] | None, *, last: bool
    ) -> Phase:
        """`in_rounds` with all rounds in one exchange, whose messages arrive together."""
        sends_by_round, receives_by_round = zip(*rounds, strict=True)
        sends, receives = [*chain(*sends_by_round)], [*chain(*receives_by_round)]
        work = self.post(sends, receives)
        if last:
            yield POSTED
        if meanwhile is None:
            yield work
            return
        meanwhile(0)  # no round has arrived yet
        yield work
        for arrived in range(1, len(rounds) + 1):  # the caller expects one call for each round
            meanwhile(arrived)

    def post(self, sends: PeerTensors, receives: PeerTensors) -> Work:
        """Posts one round, with peers by their numbers in the subgroup; does not wait for it."""
        self.sent_bytes += sum(values.nbytes for _, values in sends)
        return self._transport.exchange(
            [(self.ranks[peer], values) for peer, values in sends],
            [(self.ranks[peer], values) for peer, values in receives],
            self.tag,
        )


def whole_group(transport: Transport, tag: int) -> Subgroup:
    """The group of all ranks of a transport."""
    return Subgroup(transport, range(transport.world_size), tag)


def even_cuts(numel: int, pieces: int) -> list[int]:
    """The pieces + 1 offsets that cut `numel` elements into nearly equal pieces.

    If `pieces` divides `numel`, the pieces are the shards of a reduce-scatter.

    Example:
        >>> even_cuts(7, 3)
        [0, 2, 4, 7]
    """
    return [numel * piece // pieces for piece in range(pieces + 1)]


def aligned_cuts(numel: int, pieces: int) -> list[int]:
    """As `even_cuts`, with inner offsets that are multiples of `ALIGNMENT`.

    In short buckets they are multiples of a smaller power of two.

    Example:
        >>> aligned_cuts(10, 3), aligned_cuts(3_000_000, 2)
        ([0, 3, 6, 10], [0, 1499136, 3000000])
    """
    unit = ALIGNMENT
    while unit > 1 and unit * MIN_UNITS * pieces > numel:
        unit //= 2
    return [*(cut // unit * unit for cut in even_cuts(numel, pieces)[:-1]), numel]
