"""`bench row-sparse`: row-sparse all-reduce against torch's sparse all_reduce and the dense one.

Every rank touches `rows` rows of an embedding, drawn with Zipf's frequencies as tokens are; the
gradient holds small integers. Times are medians over rounds of the slowest rank, from a sparse COO
gradient to the reduced one. The bytes of the two rivals are computed, not measured: torch gathers
padded indices (8 bytes) and rows of all ranks everywhere, and the dense all-reduce is counted as a
ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from megatron_sparse.bench.exchange.frame import Bench, Turn
from megatron_sparse.bench.exchange.frame import run as run_bench
from megatron_sparse.bench.exchange.options import RowSparseSweep
from megatron_sparse.bucket import Reduction
from megatron_sparse.collectives.row_sparse import RowSparseWay
from megatron_sparse.recording import NullSink
from megatron_sparse.reduction.row_sparse import RowSparseReducer
from megatron_sparse.run.rows import CellRow, cell, optional

Version = Callable[[torch.Tensor], tuple[torch.Tensor, int]]
"""Reduces a sparse gradient; returns the sum and the bytes that this rank sent."""


@dataclass(kw_only=True)
class RowSparseRow(CellRow):
    """One version."""

    version: str = cell("`row_sparse` in one of its ways, or a rival of torch", "<20")
    world_size: int = cell("ranks", ">5 ranks")
    numel: int = cell("elements of the embedding", ">11")
    rows: int = cell("tokens of each rank's batch", ">7")
    time_us: float | None = optional(
        "median of the slowest rank; null where wrong", ">10.0f time(us)"
    )
    wire_bytes: int = cell("sent by the busiest rank", ">12 wire(B)")
    wrong: int = cell("elements, on all ranks, that differ from the dense sum", ">6 #wrong")


def zipf_gradient(sweep: RowSparseSweep, seed: int) -> torch.Tensor:
    """An uncoalesced gradient of small integers; row i is drawn with a probability like 1 / i."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1 / torch.arange(1, sweep.num_rows + 1, dtype=torch.float64)
    drawn = torch.multinomial(weights, sweep.rows, replacement=True, generator=generator)
    values = torch.randint(-4, 5, (sweep.rows, sweep.width), generator=generator).float()
    shape = (sweep.num_rows, sweep.width)
    return torch.sparse_coo_tensor(drawn[None], values, shape, check_invariants=False)


def torch_sparse(gradient: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`dist.all_reduce` of a sparse tensor, which gloo alone has."""
    total = gradient.coalesce()
    most = torch.tensor([total._nnz()])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    row_bytes = 8 + total.shape[1] * total.element_size()
    dist.all_reduce(total)
    return total.coalesce(), (dist.get_world_size() - 1) * int(most) * row_bytes


def torch_dense(gradient: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`dist.all_reduce` of the dense gradient."""
    total = gradient.to_dense()
    dist.all_reduce(total)
    n = dist.get_world_size()
    return total, round(2 * (n - 1) / n * total.nbytes)


class RowSparseBench(Bench[RowSparseSweep]):
    """See the module's docstring."""

    def rows(self) -> Iterator[CellRow]:
        """See `Bench`."""
        sweep = self._cases
        gradient = zipf_gradient(sweep, self.rank)
        versions = {f"row_sparse {way}": self._ours(way) for way in RowSparseWay}
        versions |= {"torch sparse": torch_sparse, "torch dense": torch_dense}
        expected, _ = torch_dense(gradient)
        found = []
        for name, version in versions.items():
            total, sent = version(gradient)
            wrong = self._count(int((total.to_dense() != expected).sum()))
            wire_bytes = int(self._gather(torch.tensor([sent])).max())
            row = RowSparseRow(
                version=name,
                world_size=self.world_size,
                numel=expected.numel(),
                rows=sweep.rows,
                wire_bytes=wire_bytes,
                wrong=wrong,
            )
            found.append((row, self._turn(version, gradient)))
        right = [(row, turn) for row, turn in found if not row.wrong]
        turns = [turn for _, turn in right]
        figures, _ = self._in_turn(turns, sweep.warmup, sweep.iters)
        for (row, _), times_nR1 in zip(right, figures, strict=True):
            row.time_us = median(times_nR1.amax(0).flatten().tolist())
        yield from (row for row, _ in found)

    def _ours(self, way: RowSparseWay) -> Version:
        reducer = RowSparseReducer(self._transport, NullSink(), self._progress, way)

        def reduce(gradient: torch.Tensor) -> tuple[torch.Tensor, int]:
            pending = reducer.start("embedding", gradient, Reduction.SUM, step=0)
            return pending.wait(), pending.record.wire_bytes

        return reduce

    def _turn(self, version: Version, gradient: torch.Tensor) -> Turn:
        return lambda _: [self._timed(lambda: version(gradient))]


run = partial(run_bench, RowSparseBench)
