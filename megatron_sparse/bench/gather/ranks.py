"""`bench gather` between real ranks: checked bit for bit, and timed in turn with the raw gather."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_sparse.bench.gather.case import (
    GatherCase,
    GatherRow,
    Outcome,
    RankGather,
    States,
    cases_of,
    measured,
    row_of,
)
from megatron_sparse.bench.gather.sweep import GatherSweep
from megatron_sparse.bench.rank_group import RankGroup
from megatron_sparse.bench.table import Progress


class GatherBench(RankGroup):
    """One rank's part of the bench; see `RankGroup`.

    Args:
        sweep: the same on every rank.
        store: where the ranks meet.
        rank: of this process.
        world_size: processes.

    Raises:
        CommunicationError: the ranks cannot reach one another.
    """

    def __init__(self, sweep: GatherSweep, store: Any, rank: int, world_size: int) -> None:
        self._sweep = sweep
        super().__init__(sweep.timeout_s, store, rank, world_size)

    def rows(self, progress: Progress) -> Iterator[GatherRow]:
        """Every case, on every rank; the rows are the same on all.

        Raises:
            CommunicationError: a rank is gone or does something else.
        """
        cases = cases_of(self._sweep, self._transport.nodes)
        for number, case in enumerate(cases):
            progress(number, len(cases), case.title)
            yield self._row(case)

    def _row(self, case: GatherCase) -> GatherRow:
        sweep, n = self._sweep, self.world_size
        states = States(sweep, case.rate, n)
        own = RankGather(case, states, self._transport, self._progress)
        raw_N = torch.empty_like(own.values_N)
        own_M = own.values_N.view(n, -1)[self.rank]
        own.gather.start(0).wait()
        wrong, rounds = 0, []
        for number in range(1, 1 + sweep.warmup + sweep.iters):
            own.move(number)
            times: dict[str, float] = {}

            def exact(times: dict[str, float] = times, step: int = number) -> None:
                times["exact"] = self._timed(lambda: own.gather.start(step).wait())

            def raw(times: dict[str, float] = times) -> None:
                times["raw"] = self._timed(
                    lambda: self._transport.all_gather(raw_N, own_M).finish()
                )

            for action in (raw, exact) if number % 2 else (exact, raw):
                action()
            wrong += states.wrong(own.values_N, number)
            rounds.append((times["exact"], times["raw"], *measured(own.sink.record)))
        counted = torch.tensor(rounds[sweep.warmup :], dtype=torch.float64)
        return row_of(
            sweep,
            case,
            self._transport.nodes,
            self._gather(counted[:, 2:].median(0).values),
            Outcome(
                transport=self.backend,
                modelled=False,
                time_us=self._median_us(counted[:, 0].tolist()),
                raw_us=self._median_us(counted[:, 1].tolist()),
                wrong=int(self._gather(torch.tensor([wrong], dtype=torch.float64)).sum()),
            ),
        )
