"""`bench node`: the transport over shared memory beside gloo's over loopback, in the same run.

Each round runs both once, in turn first, after a barrier. Inputs are small integers whose sums are
exact, so both must give the same bits: `#wrong` counts the elements that are not what they must be,
in the result of either. A row that has any is not timed.

`algbw` is the size over the time, `busbw` what the busiest rank sends over the time, as nccl-tests
defines them: 2 (n - 1) / n of the size for an all-reduce, (n - 1) / n for its halves, the whole
size for an exchange, in which each rank sends to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.bench.collectives.report import Rows, run_anywhere, run_as_rank
from megatron_sparse.bench.collectives.sweep import Place
from megatron_sparse.bench.node.sweep import NodeSweep, check_ranks
from megatron_sparse.bench.rank_group import RankGroup
from megatron_sparse.bench.table import Columns, Progress, TableRow
from megatron_sparse.formats.message import VALUE_DTYPES
from megatron_sparse.transport import ProcessGroupTransport, Transport, Work

KINDS = 7
"""Inputs are whole numbers below it: sums of up to 36 ranks are exact in bf16."""


@dataclass(frozen=True)
class NodeRow(TableRow):
    """Medians over the rounds of the slowest rank's time; None where the row is wrong.

    Attributes:
        op: of `OPS`.
        dtype: of the elements.
        bytes: of a rank's whole gradient.
        count: its elements.
        world_size: ranks.
        sent_bytes: by a rank.
        time_us: through shared memory.
        gloo_us: through gloo.
        wrong: elements on all ranks.
    """

    COLUMNS = Columns(
        "bytes >11 size(B) | count >10 | dtype >4 type | op >14 | sent_bytes >11 sent(B) | "
        "time_us >9.0f time(us) | bytes/time_us/1000 >6.2f algbw | "
        "sent_bytes/time_us/1000 >6.2f busbw | gloo_us >9.0f gloo(us) | "
        "sent_bytes/gloo_us/1000 >6.2f busbw | gloo_us/time_us >6.2f times | wrong >6 #wrong"
    )

    op: str
    dtype: str
    bytes: int
    count: int
    world_size: int
    sent_bytes: int
    time_us: float | None
    gloo_us: float | None
    wrong: int


@dataclass(frozen=True)
class _Case:
    """An operation's input, and how it is posted and checked on one rank."""

    op: str
    values_N: torch.Tensor
    result: torch.Tensor
    expected: torch.Tensor

    def post(self, transport: Transport) -> Work:
        """Posts the operation; `result` must hold the values of an all-reduce."""
        n, rank = transport.world_size, transport.rank
        if self.op == "all_reduce":
            return transport.all_reduce_(self.result)
        if self.op == "reduce_scatter":
            return transport.reduce_scatter(self.result, self.values_N)
        if self.op == "all_gather":
            return transport.all_gather(self.result, self.values_N.chunk(n)[rank])
        sends, receives = [((rank + 1) % n, self.values_N)], [((rank - 1) % n, self.result)]
        return transport.exchange(sends, receives, 1)

    def reset(self) -> None:
        """Fills the result with what an operation begins with."""
        if self.op == "all_reduce":
            self.result.copy_(self.values_N)
        else:
            self.result.fill_(KINDS)


class NodeBench(RankGroup):
    """One rank's part of the bench; see `RankGroup`.

    Args:
        sweep: the same on every rank.
        store: where the ranks meet.
        rank: of this process.
        world_size: processes, all on this host.

    Raises:
        ConfigError: the ranks cannot share memory.
        CommunicationError: the ranks cannot reach one another.
    """

    def __init__(self, sweep: NodeSweep, store: Any, rank: int, world_size: int) -> None:
        self._sweep = sweep
        super().__init__(sweep.timeout_s, store, rank, world_size, intra_node="shared_memory")
        assert dist.group.WORLD is not None, "just made"
        self._gloo = ProcessGroupTransport(dist.group.WORLD, sweep.timeout_s, self._device)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._gloo.close(broken=kind is not None)
        super().__exit__(kind, *_)

    def rows(self, progress: Progress) -> Iterator[NodeRow]:
        """Every case, on every rank; the rows are the same on all.

        Raises:
            CommunicationError: a rank is gone or does something else.
        """
        cases = [(size, op) for size in self._sweep.sizes() for op in self._sweep.ops]
        for number, (size, op) in enumerate(cases):
            progress(number, len(cases), f"{op} of {size} bytes")
            yield self._row(size, op)

    def _row(self, size: int, op: str) -> NodeRow:
        case = self._case(size, op)
        transports = (self._transport, self._gloo)
        wrong = 0
        for transport in transports:
            case.reset()
            case.post(transport).finish()
            wrong += int((case.result != case.expected).sum())
        wrong = int(self._gather(torch.tensor([wrong])).sum())
        times = [None, None] if wrong else self._times(case, transports)
        n, numel = self.world_size, case.values_N.numel()
        whole = numel * case.values_N.element_size()
        share = {"all_reduce": 2 * (n - 1), "exchange": n}.get(op, n - 1)
        return NodeRow(
            op, self._sweep.dtype, whole, numel, n, whole // n * share, times[0], times[1], wrong
        )

    def _case(self, size: int, op: str) -> _Case:
        n, dtype = self.world_size, VALUE_DTYPES[self._sweep.dtype]
        numel = size // dtype.itemsize // n * n
        parts = [((torch.arange(numel) + rank) % KINDS).to(dtype) for rank in range(n)]
        own = slice(self.rank * (numel // n), (self.rank + 1) * (numel // n))
        find: dict[str, Callable[[], torch.Tensor]] = {
            "all_reduce": lambda: torch.stack(parts).float().sum(0),
            "reduce_scatter": lambda: torch.stack([part[own] for part in parts]).float().sum(0),
            "all_gather": lambda: torch.cat(
                [part.chunk(n)[rank] for rank, part in enumerate(parts)]
            ),
            "exchange": lambda: parts[self.rank - 1],
        }
        expected = find[op]().to(dtype)
        return _Case(op, parts[self.rank].clone(), torch.empty_like(expected), expected)

    def _times(self, case: _Case, transports: tuple[Transport, Transport]) -> list[float | None]:
        times_us: tuple[list[float], list[float]] = ([], [])
        for number in range(self._sweep.warmup + self._sweep.iters):
            for which in (0, 1) if number % 2 else (1, 0):
                case.reset()
                spent_us = self._timed(lambda which=which: case.post(transports[which]).finish())
                if number >= self._sweep.warmup:
                    times_us[which].append(spent_us)
        return [self._median_us(each) for each in times_us]


def run(sweep: NodeSweep, ranks: int | None, json_path: Path | None) -> int:
    """Measures a sweep; returns the exit code, 1 where a row is wrong. See `run_anywhere`.

    Raises:
        ConfigError: there is one rank, or the JSON file cannot be written.
    """

    def rank() -> Rows:
        return run_as_rank(
            lambda store, rank, world_size: NodeBench(sweep, store, rank, world_size),
            lambda bench, progress: bench.rows(progress),
            sweep,
            NodeRow.COLUMNS,
            json_path,
        )

    return run_anywhere(
        Place(ranks=ranks),
        None,
        json_path,
        check=check_ranks,
        virtual=lambda _: [],
        rank=rank,
        command=["bench", "node", *sweep.arguments()],
    )
