"""Cases over real processes and gloo's sockets."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from megatron_sparse.recording import StageTimer
from megatron_sparse.reduction.job import Pending
from megatron_sparse.reduction.progress import ProgressThread
from megatron_sparse.transport import ProcessGroupTransport
from tests.collectives.cases import Case, Forwarding, steps_of
from tests.ranks import run_ranks

TIMEOUT_S = 20.0
LATE_S = 0.1


class Side:
    """One rank's transport and progress thread.

    Args:
        timeout_s: of both.
        nodes: that the ranks say that they are on; None: all on this host.
    """

    def __init__(self, timeout_s: float, nodes: Sequence[int] | None = None) -> None:
        import torch.distributed as dist

        assert dist.group.WORLD is not None
        self.transport = ProcessGroupTransport(dist.group.WORLD, timeout_s, torch.device("cpu"))
        self.progress = ProgressThread(torch.device("cpu"), timeout_s)
        self._seen = Forwarding(self.transport, nodes=nodes or self.transport.nodes)

    def launch(self, case: Case):
        """Starts a collective; returns the pending job, whose result is the outcome."""
        return self.progress.submit(Pending("b", steps_of(case, self._seen), StageTimer()))

    def close(self, *, broken: bool = False) -> float:
        """Ends the thread and gives the group back; returns the time.

        Args:
            broken: the group has failed, on another rank.
        """
        start_s = time.monotonic()
        broken = broken or self.progress.broken
        self.progress.close()
        self.transport.close(broken=broken)
        return time.monotonic() - start_s


def run_over_gloo(
    cases: Sequence[Case], *, nodes: Sequence[int] | None = None, late: int | None = None
) -> list[list[torch.Tensor]]:
    """The ranks' results of each case; the rank `late` begins each a moment after the others."""
    by_rank = run_ranks(_run, cases[0].n, cases, nodes, late)
    return [list(results) for results in zip(*by_rank, strict=True)]


def _run(rank, world_size, cases, nodes, late):
    side, results = Side(TIMEOUT_S, nodes), []
    for case in cases:
        if rank == late:
            time.sleep(LATE_S)
        results.append(side.launch(case).wait()[0])
    side.close()
    return results
