"""A communicator of NCCL's that C++ posts to, and the thread that watches it.

torch's watchdog knows nothing of it, so what that does is done here: every call has a deadline,
NCCL is asked for errors, the side channel for ranks that are gone, and when there is nothing left
to wait for the communicator is aborted. Then kernels that wait for a peer end, what they leave
behind is never used (`check`, before anybody looks at it), and every later call is refused. The
process stays.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TookTooLong
from contextlib import contextmanager
from typing import Protocol

import torch

from megatron_sparse.cuda_ext.nccl_ops import SumCall, nccl_sparse_sum
from megatron_sparse.errors import CommunicationError, ConfigError
from megatron_sparse.transport.nccl_library import SUCCESS, NcclLibrary

POLL_S = 0.05
"""How often what is under way is looked at."""


class Deadline(Protocol):
    """A call's time and its group: `operation.Operation`."""

    def is_hopeless(self) -> bool:
        """Whether there is nothing left to wait for."""
        ...

    def error(self, cause: Exception | None = None) -> CommunicationError:
        """What to raise then."""
        ...


class Done(Protocol):
    """Whether the device has got somewhere: a CUDA event."""

    def query(self) -> bool:
        """Whether it has."""
        ...


class _Call:
    """What was posted for one bucket."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self.queued: Done | None = None

    def is_done(self) -> bool:
        """Whether the stream has got past it."""
        return self.queued is not None and self.queued.query()


class NcclCommunicator:
    """One group's communicator. Making one is collective over the group.

    Args:
        library: NCCL.
        rank: of this process in the group.
        world_size: ranks of the group.
        device: the CUDA device whose streams calls are queued on.
        timeout_s: seconds that the others may take to come.
        broadcast: returns to every rank what rank 0 gave, which is at most 1000 bytes of text.
        deadline: begins a call's time and names it; raises if a rank is known to be gone.

    Attributes:
        rank: of this process in the group.
        world_size: ranks of the group.
        words: int64 on the CPU, what C++ needs to know: rank, ranks, the communicator, and the
            addresses of `nccl_library.POSTING`.

    Raises:
        CommunicationError: not all ranks came in time, or NCCL failed.
    """

    def __init__(
        self,
        library: NcclLibrary,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        broadcast: Callable[[bytes], bytes],
        deadline: Callable[[str], Deadline],
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._library = library
        self._deadline = deadline
        name = library.unique_id().hex().encode() if rank == 0 else b""
        unique_id = bytes.fromhex(broadcast(name).decode().strip())
        self._communicator = _make(library, unique_id, rank, world_size, device, timeout_s)
        self.words = torch.tensor([rank, world_size, self._communicator, *library.addresses])
        self._under_way: deque[_Call] = deque()
        self._error: CommunicationError | None = None
        self._change = threading.Condition()
        self._closing = False
        self._watcher = threading.Thread(target=self._watch, name="megatron_sparse_nccl")
        self._watcher.daemon = True
        self._watcher.start()

    @contextmanager
    def call(self, name: str) -> Iterator[Callable[[int], None]]:
        """Around what posts; its time begins here and ends when the current stream gets there.

        Args:
            name: of what is posted, for errors.

        Returns:
            What is to be called with NCCL's result; it raises unless that is ncclSuccess.

        Raises:
            CommunicationError: NCCL failed, now or before, or a rank is gone: its name is in it
                where it is known. Nothing works any more then.
        """
        started = _Call(self._deadline(name))
        with self._change:
            self.check()
            self._under_way.append(started)
            self._change.notify()
        try:
            yield lambda result: self._require(started, result)
        except BaseException:
            with self._change:
                self._under_way.remove(started)
            raise
        started.queued = self._record()

    def sparse_sum(self, name: str, summed: SumCall) -> torch.Tensor:
        """Queues the sum of a bucket's messages; see `nccl_ops.nccl_sparse_sum`.

        Args:
            name: of what is posted, for errors.
            summed: what, and where. Mutated.

        Returns:
            The report, for `SumCall.check`, before which `check` must be called.

        Raises:
            CommunicationError: as of `call`.
        """
        with self.call(name) as require:
            report, result = self._post(self.words, summed)
            require(result)
        return report

    _post = staticmethod(nccl_sparse_sum)

    def _record(self) -> Done:
        event = torch.cuda.Event()
        event.record()
        return event

    def check(self) -> None:
        """Refuses whatever came from a communicator that has failed. Waits for nothing.

        Raises:
            CommunicationError: it has.
        """
        if self._error is not None:
            raise self._error

    def close(self, *, broken: bool = False) -> None:
        """Ends the watch and the communicator.

        Args:
            broken: an operation of the group has failed: nothing is waited for.
        """
        with self._change:
            if self._closing:
                return
            self._closing = True
            self._change.notify()
        self._watcher.join()
        if self._error is not None:
            return
        if broken:
            self._library.abort(self._communicator)
        else:
            self._library.destroy(self._communicator)

    def _require(self, started: _Call, result: int) -> None:
        if result != SUCCESS:
            self._fail(started, self._library.words(result))
            self.check()

    def _watch(self) -> None:
        while True:
            with self._change:
                if not self._under_way and not self._closing:
                    self._change.wait()
                if self._closing:
                    return
            if self._look():
                return
            with self._change:
                self._change.wait_for(lambda: self._closing, POLL_S)

    def _look(self) -> bool:
        """Whether the communicator has failed; takes out what has been done."""
        with self._change:
            if self._error is not None or not self._under_way:
                return self._error is not None
            oldest = self._under_way[0]
            try:
                while oldest.is_done():
                    self._under_way.popleft()
                    if not self._under_way:
                        return False
                    oldest = self._under_way[0]
                trouble = self._library.trouble(self._communicator)
            except (RuntimeError, CommunicationError) as error:  # CUDA, or NCCL, cannot even say
                trouble = str(error)
        if trouble is not None or oldest.deadline.is_hopeless():
            self._fail(oldest, trouble)
        return self._error is not None

    def _fail(self, failed: _Call, trouble: str | None) -> None:
        """Aborts, once. The error is there before anything that aborting lets go on."""
        found = failed.deadline.error(None if trouble is None else RuntimeError(trouble))
        with self._change:  # in which nobody else asks NCCL about a communicator that ends
            if self._error is None:
                self._error = found
                self._library.abort(self._communicator)


def refusal(got: str) -> ConfigError:
    """The error for a group that cannot have one."""
    return ConfigError(
        "scheme.nccl_engine=true without NCCL",
        expected="gradients on CUDA devices",
        got=got,
        remedy="leave scheme.nccl_engine out",
    )


def _make(
    library: NcclLibrary,
    unique_id: bytes,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout_s: float,
) -> int:
    """Waits for the others in a thread, because NCCL itself would do so without end."""
    made: Future[int] = Future()

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            made.set_result(library.make(unique_id, rank, world_size))
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="megatron_sparse_nccl_init", daemon=True).start()
    try:
        return made.result(timeout_s)
    except TookTooLong:
        raise CommunicationError(
            "NCCL's communicator was not made",
            expected=f"all {world_size} ranks within scheme.timeout_s ({timeout_s:g} s)",
            got="none",
            remedy="look at the other ranks' logs; set NCCL_DEBUG=INFO to see whom NCCL waits for",
        ) from None
