"""The kinds of `Work` that the transports return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

import torch.distributed as dist

from megatron_sparse.transport.operation import Operation

POLL_S = 0.01
"""How often `finish` looks whether waiting has become pointless."""


class WaitedWork:
    """Works that a thread waits for, as one `Work`: gloo's.

    Args:
        operation: their name and deadline.
        waiting: done when they have finished or failed.
        check: checks the received bytes; called when they have finished.
    """

    def __init__(
        self,
        operation: Operation,
        waiting: Future[None],
        check: Callable[[], None] | None = None,
    ) -> None:
        self._operation = operation
        self._waiting = waiting
        self._check = check

    def ready(self) -> bool:
        """See `Work`; also true when waiting has become pointless."""
        return self._waiting.done() or self._operation.is_hopeless()

    def when_ready(self, wake: Callable[[], None]) -> None:
        """See `Work`."""
        self._waiting.add_done_callback(lambda _: wake())

    def finish(self) -> None:
        """See `Work`."""
        while not self.ready():
            with suppress(TimeoutError):
                self._waiting.exception(POLL_S)
        if not self._waiting.done():
            raise self._operation.error()
        try:
            self._waiting.result()
        except RuntimeError as error:
            raise self._operation.error(error) from error
        if self._check is not None:
            self._check()


class StreamWork:
    """Works of NCCL as one `Work`; `finish` lets the current stream wait for all of them."""

    def __init__(self, operation: Operation, works: Sequence[dist.Work]) -> None:
        self._operation = operation
        self._works = works

    def ready(self) -> bool:
        """See `Work`. Always true: `finish` only lets the stream wait."""
        return True

    def when_ready(self, wake: Callable[[], None]) -> None:
        """See `Work`."""
        wake()

    def finish(self) -> None:
        """See `Work`."""
        try:
            wait_all(self._works)
        except RuntimeError as error:
            raise self._operation.error(error) from error


class NoWork:
    """The `Work` of an exchange in which nothing is sent or received."""

    def ready(self) -> bool:
        """See `Work`."""
        return True

    def when_ready(self, wake: Callable[[], None]) -> None:
        """See `Work`."""
        wake()

    def finish(self) -> None:
        """See `Work`."""


def wait_all(works: Sequence[dist.Work | None]) -> None:
    """Waits for all works of c10d."""
    for work in works:
        assert work is not None, "only members of the group take part"
        work.wait()
