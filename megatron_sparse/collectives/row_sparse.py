"""Row-sparse all-reduce: sums gradients of which each rank has only some rows, as of an embedding.

"Sparse All-Reduce in PyTorch" (MacLeod) gathers the row indices of all ranks on rank 0, broadcasts
their union, and reduces a buffer of the union's rows densely: every rank sends 2 (n - 1) / n U
rows, however few it has itself. Here rows travel as records (`formats/row_record.py`), and no rank
needs to know the union beforehand. There are two ways. From the counts of rows the group predicts
which one sends fewer bytes, and takes it:

Agreement: one all-gather of the collective's identity and of every rank's number of rows in each of
n parts, 8 (2 + n) bytes a rank. Part i holds the rows with index modulo n = i.

`gather`, n - 1 rounds: every rank sends its record to every other, and each adds them all up.
`direct`, n - 1 rounds: rank r sends part i of its rows to rank i, one peer at a time, and rank i
adds the n records; an all-gather of the sums' rows, as before; n - 1 rounds: each rank sends its
sum to every other.

With B(k) the bytes of a record of k rows, K(r, i) the rows of rank r in part i and U(i) those of
the sum's part i, rank r sends (n - 1) B(sum_i K(r, i)), or sum_{i != r} B(K(r, i)) + (n - 1) B(U(r)).
`direct` needs overlap between ranks, and three ranks, to be the cheaper one.

Rows are added in rank order, in fp32, and rounded once; an average is rounded after the division.
So both ways give the same bits, on every rank.
"""  # noqa: E501 - the cost's formula is a line

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, Reduction
from megatron_sparse.collectives.base import Identity, Yielded, exchange_sizes, whole_group
from megatron_sparse.collectives.gather import pairwise_all_gather, pairwise_all_to_all
from megatron_sparse.formats.message import MessageBuffers, wire_dtype_of
from megatron_sparse.formats.rounding import round_into
from megatron_sparse.formats.row_record import RowPart
from megatron_sparse.formats.row_sparse import RowSparse, coalesce
from megatron_sparse.transport import Transport
from megatron_sparse.wire import wrong_field

NAME = "row_sparse"


class RowSparseWay(StrEnum):
    """How the rows travel: `GATHER`, `DIRECT`, or `AUTO`: the one with fewer bytes predicted."""

    AUTO = "auto"
    GATHER = "gather"
    DIRECT = "direct"


@dataclass(frozen=True)
class Reduced:
    """The result of an all-reduce of rows.

    Attributes:
        gradient: the sum or the average.
        way: how the rows travelled: `gather` or `direct`.
        sent_bytes: what this rank sent in pairwise messages; the agreement is not in it.
    """

    gradient: RowSparse
    way: RowSparseWay
    sent_bytes: int


def stand_in(name: str, shape: Sequence[int], dtype: torch.dtype, world_size: int) -> Bucket:
    """A bucket of a gradient's whole size, without memory, for agreements and records."""
    whole_N = torch.empty(math.prod(shape), dtype=dtype, device="meta")
    return Bucket(name, whole_N, (), CollectiveOp.ALL_REDUCE, world_size)


def row_sparse(
    name: str,
    gradient: RowSparse,
    reduction: Reduction,
    transport: Transport,
    buffers: MessageBuffers,
    *,
    step: int,
    way: RowSparseWay = RowSparseWay.AUTO,
    checksum: bool = False,
) -> Generator[Yielded, None, Reduced]:
    """All-reduces row-sparse gradients: the exact sum or average, with the same bits on every rank.

    Args:
        name: of the parameter, the same on every rank.
        gradient: this rank's rows [K, D]; only read. With one rank it is the result itself.
        reduction: sum or average, the same on every rank.
        transport: the group, of the gradient's device.
        buffers: memory for messages, reused in the next step.
        step: the optimizer step, the same on every rank.
        way: how the rows travel, the same on every rank.
        checksum: records carry a checksum; the same on every rank.

    Raises:
        CommunicationError: ranks disagree about name, shape, dtype, reduction, way or step.
        WireFormatError: a peer's records are not what was announced.
    """
    n = transport.world_size
    if n == 1:
        return Reduced(gradient, RowSparseWay.GATHER, 0)
    value_dtype = wire_dtype_of(gradient.rows_KD.dtype, None)
    columns = gradient.rows_KD.shape[1]
    # Part i of n has the rows with index modulo n = i; `whole` is part 0 of 1.
    whole = RowPart(gradient.num_rows, columns, value_dtype, 0, 1, step, checksum)
    parts = [replace(whole, part=part, parts=n) for part in range(n)]
    bucket = stand_in(name, (gradient.num_rows, columns), gradient.rows_KD.dtype, n)
    scheme = f"{NAME} ({way}) {reduction} of rows {[gradient.num_rows, columns]}"
    identity = Identity(scheme, bucket, value_dtype, step)
    run = _Run(gradient, reduction, transport, buffers, parts, identity)
    # For each part, the positions of its rows in `gradient.rows_KD`.
    positions = [part.positions(gradient) for part in parts]
    # counts[rank][part]: how many rows the rank has in the part.
    counts = yield from run.agree([each.numel() for each in positions], parts)
    if way is RowSparseWay.AUTO:
        way = cheapest_way(counts, parts)
    if way is RowSparseWay.GATHER:
        reduced = yield from run.gather([sum(row) for row in counts])
    else:
        reduced = yield from run.direct(positions, counts)
    return Reduced(reduced, way, run.group.sent_bytes)


def cheapest_way(counts: Sequence[Sequence[int]], parts: Sequence[RowPart]) -> RowSparseWay:
    """Chooses `GATHER` or `DIRECT`, by the predicted bytes that the busiest rank sends.

    The rows of the sum are predicted as if each rank had drawn its rows at random. Rows of real
    batches overlap more, so `direct` costs less than predicted. `counts`: for each rank its number
    of rows in each part.
    """
    n = len(parts)
    gather = (n - 1) * max(parts[0].record_bytes(sum(row)) for row in counts)
    direct = 0
    for rank, row in enumerate(counts):
        by_part = [part.record_bytes(count) for part, count in zip(parts, row, strict=True)]
        first_bytes = sum(by_part) - by_part[rank]  # a rank sends itself nothing
        absent = 1.0  # the probability that no rank has a given row of this rank's part
        for other in counts:
            absent *= 1 - other[rank] / max(parts[rank].rows, 1)
        expected_rows = round(parts[rank].rows * (1 - absent))
        sum_bytes = (n - 1) * parts[rank].record_bytes(expected_rows)
        direct = max(direct, first_bytes + sum_bytes)
    return RowSparseWay.DIRECT if direct < gather else RowSparseWay.GATHER


class _Run:
    """One rank's all-reduce: the arguments of `row_sparse`, the gradient's n parts, identity."""

    def __init__(
        self,
        gradient: RowSparse,
        reduction: Reduction,
        transport: Transport,
        buffers: MessageBuffers,
        parts: list[RowPart],
        identity: Identity,
    ) -> None:
        self._gradient, self._reduction, self._parts = gradient, reduction, parts
        self._transport, self._buffers, self._identity = transport, buffers, identity
        self.group = whole_group(transport, identity.tag)

    def agree(
        self, own_counts: list[int], parts: Sequence[RowPart]
    ) -> Generator[Yielded, None, list[list[int]]]:
        """The agreement: all-gathers how many rows each rank's coming records have.

        `own_counts[i]` rows lie in `parts[i]`. Returns the counts of each rank, by rank. Raises
        WireFormatError if a count is larger than the part.
        """
        table = yield from exchange_sizes(own_counts, self._identity, self._transport)
        for rank, row in enumerate(table):
            for part, count in zip(parts, row, strict=True):
                if not 0 <= count <= part.rows:
                    raise wrong_field(rank, "announced rows", f"0 to {part.rows}", count)
        return table

    def gather(self, counts: list[int]) -> Generator[Yielded, None, RowSparse]:
        """Sends this rank's rows to every other rank; returns the sum or average of all.

        `counts`: the number of rows of each rank.
        """
        whole = replace(self._parts[0], parts=1)  # part 0 of 1
        contributions = yield from self._all_gather(
            self._gradient, [whole] * self.group.world_size, counts
        )
        return self._reduce(contributions)

    def direct(
        self, positions: list[torch.Tensor], counts: list[list[int]]
    ) -> Generator[Yielded, None, RowSparse]:
        """Rank i adds up all rows of part i and sends the sum to all; returns the whole sum.

        `positions`: for each part, the positions of its rows in this rank's gradient. `counts`: for
        each rank its number of rows in each part.
        """
        rank = self.group.rank
        sent = self._cut("sent", [p.record_bytes(counts[rank][p.part]) for p in self._parts])
        for part, positions_K, record in zip(self._parts, positions, sent, strict=True):
            part.encode(self._gradient, positions_K, record)
        mine = self._parts[rank]  # the part that this rank adds up
        received = self._cut("received", [mine.record_bytes(row[rank]) for row in counts])
        received[rank] = sent[rank]
        yield from pairwise_all_to_all(sent, received, self.group, last=False)
        total = self._reduce([mine.decode(record, r) for r, record in enumerate(received)])

        # Each rank announces the rows of its own sum. `agree` checks every count against part 0,
        # the largest; the record's decoder checks each against its own part.
        sum_counts = yield from self.agree([total.indices_K.numel()], self._parts[:1])
        sums = yield from self._all_gather(total, self._parts, [row[0] for row in sum_counts])
        return self._added(sums)  # no two parts have a row in common: this only sorts the rows

    def _all_gather(
        self, own: RowSparse, parts: Sequence[RowPart], counts: Sequence[int]
    ) -> Generator[Yielded, None, list[RowSparse]]:
        """All-gathers rows: this rank's are `own`, rank r's are `counts[r]` rows of `parts[r]`.

        Returns the rows of each rank, by rank.
        """
        rank = self.group.rank
        sizes = [part.record_bytes(count) for part, count in zip(parts, counts, strict=True)]
        buffer = self._take("gathered", sum(sizes))
        sent, room = buffer[: sizes[rank]], buffer[sizes[rank] :]
        parts[rank].encode(own, torch.arange(counts[rank], device=sent.device), sent)
        gathered: dict[int, RowSparse] = {}

        def arrived(sender: int, record: torch.Tensor) -> None:
            gathered[sender] = parts[sender].decode(record, sender)

        yield from pairwise_all_gather(sent, room, sizes, self.group, arrived)
        return [gathered[sender] for sender in range(len(sizes))]

    def _reduce(self, contributions: list[RowSparse]) -> RowSparse:
        """The sum or the average of all ranks' rows, added in rank order, in new memory."""
        if self._reduction is Reduction.SUM:
            return self._added(contributions)
        # Not rounded yet: the division comes first.
        total = self._added(contributions, torch.float32)
        average = total.rows_KD / self.group.world_size
        rounded = torch.empty_like(average, dtype=self._gradient.rows_KD.dtype)
        return RowSparse(total.indices_K, round_into(rounded, average), total.num_rows)

    def _added(self, pairs: list[RowSparse], dtype: torch.dtype | None = None) -> RowSparse:
        """Adds rows in their order, in `dtype` if given; the result's rows ascend."""
        indices = torch.cat([each.indices_K for each in pairs])
        rows = torch.cat([each.rows_KD for each in pairs])
        return coalesce(indices, rows.to(dtype or rows.dtype), self._gradient.num_rows)

    def _cut(self, purpose: str, sizes: list[int]) -> list[torch.Tensor]:
        return list(self._take(purpose, sum(sizes)).split(sizes))

    def _take(self, purpose: str, nbytes: int) -> torch.Tensor:
        return self._buffers.take(
            f"{purpose}:{self._identity.bucket.name}", nbytes, self._transport.device
        )
