"""A `Progress` that drives nothing: it keeps the job for a virtual cluster to drive."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from megatron_sparse.recording import StageTimer
from megatron_sparse.reduction.job import Job, without_gates
from megatron_sparse.reduction.pending import Pending


class HeldProgress:
    """Keeps the last job that was submitted. One for each virtual rank.

    `VirtualCluster.run(lambda transport: held[transport.rank].steps())` drives the jobs of all
    ranks; then their `Pending` have ended.
    """

    broken = False

    def submit(
        self,
        name: str,
        job: Job,
        timer: StageTimer,
        on_done: Callable[[], None] | None = None,
        after: Pending | None = None,
    ) -> Pending:
        """See `Progress`; the job runs when `steps` is driven."""
        self._job, self._pending = job, Pending(name, timer, None, on_done)
        return self._pending

    def steps(self) -> Generator[Any, None, None]:
        """The job without its gate, which is for threads."""
        yield from without_gates(self._job())
        self._pending.end(None)

    def close(self) -> None:
        """Does nothing."""
