"""The operations that an engine has under way, as futures."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from megatron_sparse.cuda_ext.shared_memory import Engine
from megatron_sparse.errors import CommunicationError


@dataclass(frozen=True)
class _Posted:
    name: str
    buffers: tuple[torch.Tensor, ...]  # alive while the engine may touch them
    future: Future[None]


class UnderWay:
    """Posts to an engine, and learns in a thread of its own what has ended.

    Args:
        engine: stopped and freed by `close`.
        members: the group's rank of each place in the node.
    """

    def __init__(self, engine: Engine, members: list[int]) -> None:
        self._engine = engine
        self._members = members
        self._numbers = itertools.count()
        self._posted: dict[int, _Posted] = {}
        self._closed = False
        self._lock = threading.Lock()  # nothing may be posted to an engine that is gone
        self._thread = threading.Thread(
            target=self._main, name="megatron_sparse_shared_memory", daemon=True
        )
        self._thread.start()

    def post(
        self, name: str, post: Callable[[Engine, int], None], *buffers: torch.Tensor
    ) -> Future[None]:
        """Posts an operation; the future is done when it has ended.

        Args:
            name: of the operation, for errors.
            post: posts it to the engine, under the number that it is given.
            buffers: the tensors that it reads and writes.
        """
        future: Future[None] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(RuntimeError("the transport is closed"))
            else:
                number = next(self._numbers)
                self._posted[number] = _Posted(name, buffers, future)
                post(self._engine, number)
        return future

    def close(self) -> None:
        """Ends the engine. Does not wait for operations: what is under way fails."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._engine.stop()

    def _main(self) -> None:
        while (ended := self._engine.wait()) is not None:
            for each in ended:
                posted = self._posted.pop(each.number)
                if each.misfit is None:
                    posted.future.set_result(None)
                else:
                    posted.future.set_exception(self._error(posted.name, *each.misfit))
                del posted  # the tensors may be large
        self._engine.free()
        for posted in self._posted.values():
            posted.future.set_exception(RuntimeError("the transport was closed"))
        self._posted.clear()

    def _error(self, name: str, place: int, expected: int, got: int) -> CommunicationError:
        return CommunicationError(
            f"{name} failed: a message with rank {self._members[place]} does not fit its receive",
            expected=f"{expected} bytes",
            got=f"{got} bytes",
            remedy="run the same version of megatron_sparse with the same configuration on all "
            "ranks",
        )
