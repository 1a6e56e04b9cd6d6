"""An NCCL communicator for calls from C++, and the thread that monitors it.

A call is one C++ function that queues NCCL operations and kernels on the current stream (posting),
for one bucket. torch's watchdog does not know this communicator, so the monitor does its work:
every call has a deadline; the monitor asks NCCL for errors and the side channel (`liveness`) for
ranks that are gone. If the oldest call cannot end any more, it aborts the communicator. Kernels
that wait for a peer then end, with undefined results: call `check` before you read results. Every
later call raises. The process stays alive.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as TookTooLong
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_sparse.cuda_ext.nccl_ops import SumCall, nccl_sparse_sum
from megatron_sparse.errors import CommunicationError, ConfigError
from megatron_sparse.transport.nccl_library import SUCCESS, NcclLibrary
from megatron_sparse.transport.operation import Operation, Waiters

POLL_S = 0.05
"""Time between two checks of pending calls."""
POSTING_S = 1.0
"""How long an abort waits for a thread that posts. Posting takes a fraction of a millisecond."""


class _Call:
    """A call that is being posted or has been, and has not ended yet."""

    def __init__(self, deadline: Operation) -> None:
        self.deadline = deadline
        self.queued: torch.cuda.Event | None = None  # recorded behind the call; None before

    def is_done(self) -> bool:
        return self.queued is not None and self.queued.query()


class NcclCommunicator:
    """One group's communicator. Making one is collective over the group.

    Args:
        library: NCCL.
        rank: of this process in the group.
        world_size: ranks of the group.
        device: the CUDA device whose streams calls are queued on.
        timeout_s: seconds to wait until all ranks make the communicator.
        broadcast: returns rank 0's argument, at most 1000 bytes of text, on every rank.
        deadline: name of a call -> its deadline, which starts now; raises if a rank is gone.

    Attributes:
        rank: of this process in the group.
        world_size: ranks of the group.
        words: int64 on the CPU, for C++: rank, ranks, the communicator, and the addresses of
            `nccl_library.POSTING`.

    Raises:
        CommunicationError: a rank did not take part in time, or NCCL failed.
    """

    def __init__(
        self,
        library: NcclLibrary,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        broadcast: Callable[[bytes], bytes],
        deadline: Callable[[str], Operation],
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._library = library
        self._device = device
        self._deadline = deadline
        # In hexadecimal digits: `broadcast` pads with spaces, which bytes could end in, too.
        own_digits = library.unique_id().hex().encode() if rank == 0 else b""
        unique_id = bytes.fromhex(broadcast(own_digits).decode().strip())
        self._communicator = self._make(unique_id, timeout_s)
        self.words = torch.tensor([rank, world_size, self._communicator, *library.addresses])
        self._pending: deque[_Call] = deque()
        self._error: CommunicationError | None = None
        self._change = threading.Condition()  # guards the two above and `_closing`
        # Held while a call is posted: an abort waits for it. Reentrant, because a thread whose own
        # posting fails aborts while it holds the lock.
        self._posting = threading.RLock()
        self._closing = False
        self._monitor = threading.Thread(target=self._run_monitor, name="megatron_sparse_nccl")
        self._monitor.daemon = True
        self._monitor.start()

    def _make(self, unique_id: bytes, timeout_s: float) -> int:
        """Makes the communicator in a thread: NCCL waits for other ranks without a time limit."""

        def make() -> int:
            torch.cuda.set_device(self._device)  # a new thread's current device is device 0
            return self._library.make(unique_id, self.rank, self.world_size)

        waiters = Waiters()
        try:
            return waiters.submit(make).result(timeout_s)
        except TookTooLong:
            raise CommunicationError(
                "NCCL's communicator was not made",
                expected=f"all {self.world_size} ranks within scheme.timeout_s ({timeout_s:g} s)",
                got="none",
                remedy="look at the other ranks' logs; NCCL_DEBUG=INFO shows which rank NCCL waits "
                "for",
            ) from None
        finally:
            waiters.close()

    @contextmanager
    def call(self, name: str) -> Iterator[Callable[[int], None]]:
        """A context to post a call in. The monitor checks its deadline until the device is done.

        Args:
            name: of the call, for errors.

        Returns:
            For the `with`: a function that takes NCCL's result code, and raises if it is an error.

        Raises:
            CommunicationError: NCCL failed, now or before, or a rank is gone; the error names that
                rank if it is known. The communicator cannot be used any more.
        """
        started = _Call(self._deadline(name))
        with self._change:
            self.check()
            self._pending.append(started)
            self._change.notify()
        try:
            with self._posting:
                self.check()  # the monitor may have aborted in the meantime
                yield lambda result: self._require(started, result)
        except BaseException:
            with self._change:
                self._pending.remove(started)
            raise
        event = torch.cuda.Event()
        event.record()
        # Set after `record`: an event that is not recorded yet counts as passed in `query`.
        started.queued = event

    def sparse_sum(self, name: str, summed: SumCall) -> torch.Tensor:
        """Queues exchange and sum of a bucket's messages (`nccl_sparse_sum`); raises as `call`.

        Args:
            name: of the call, for errors.
            summed: the messages and the buffers of the sum. Mutated.

        Returns:
            The kernels' report, on the device. Before `SumCall.check` reads it, call `check`.
        """
        with self.call(name) as require:
            report, result = self._post(self.words, summed)
            require(result)
        return report

    _post = staticmethod(nccl_sparse_sum)

    def check(self) -> None:
        """Raises CommunicationError if the communicator has failed. Does not wait."""
        if self._error is not None:
            raise self._error

    def close(self, *, broken: bool = False) -> None:
        """Ends the monitor and the communicator.

        Args:
            broken: an operation of the group has failed: do not wait for pending calls.
        """
        with self._change:
            if self._closing:
                return
            self._closing = True
            self._change.notify()
        self._monitor.join()
        if self._error is not None:  # `_fail` has aborted the communicator
            return
        if broken:
            self._library.abort(self._communicator)
        else:
            self._library.destroy(self._communicator)

    def _require(self, started: _Call, result: int) -> None:
        """Fails the communicator, and raises, unless NCCL's result code is ncclSuccess."""
        if result != SUCCESS:
            self._fail(started, self._library.words(result))
            self.check()

    def _run_monitor(self) -> None:
        """The thread: checks pending calls every `POLL_S`, until `close` or a failure."""
        torch.cuda.set_device(self._device)  # a new thread's current device is device 0
        while True:
            with self._change:
                self._change.wait_for(lambda: self._pending or self._closing)
                if self._closing:
                    return
            if self._check_pending():
                return
            with self._change:
                self._change.wait_for(lambda: self._closing, POLL_S)

    def _check_pending(self) -> bool:
        """Drops finished calls, and fails the communicator if the oldest call cannot end any more.

        Returns whether the communicator has failed.
        """
        with self._change:
            try:
                while self._pending and self._pending[0].is_done():
                    self._pending.popleft()
                if self._error is not None:
                    return True
                if not self._pending:
                    return False
                trouble = self._library.trouble(self._communicator)
            except (RuntimeError, CommunicationError) as error:  # CUDA's or NCCL's own query failed
                trouble = str(error)
            oldest = self._pending[0]
        if trouble is not None or oldest.deadline.is_hopeless():
            self._fail(oldest, trouble)
        return self._error is not None

    def _fail(self, failed: _Call, trouble: str | None) -> None:
        """Sets the error and aborts the communicator, only once.

        The error comes first: after the abort waiting streams go on, with undefined results. The
        abort frees the communicator, so first this waits until no thread posts a call; with the
        error set, none begins. But if NCCL blocks a posting thread longer than `POSTING_S`, that
        thread waits for a peer, and only the abort ends its wait. `trouble` is the text of NCCL's
        or CUDA's error; None if a rank is gone or the deadline of `failed` has passed.
        """
        found = failed.deadline.error(None if trouble is None else RuntimeError(trouble))
        with self._change:
            if self._error is not None:
                return
            self._error = found
        has_lock = self._posting.acquire(timeout=POSTING_S)
        try:
            with self._change:  # no other thread may query a communicator while it is aborted
                self._library.abort(self._communicator)
        finally:
            if has_lock:
                self._posting.release()


def refusal(got: str) -> ConfigError:
    """The error of `scheme.nccl_engine` for gradients on another device (`got`) than CUDA."""
    return ConfigError(
        "scheme.nccl_engine=true without NCCL",
        expected="gradients on CUDA devices",
        got=got,
        remedy="leave scheme.nccl_engine out",
    )


def require_supported(group: dist.ProcessGroup) -> None:
    """Raises ConfigError if a group's backend for CUDA is not torch's `ProcessGroupNCCL`.

    torch 2.14 adds the backends `nccl2` and `nccl-lazy`; `TORCH_DIST_USE_NCCL2=1` makes `nccl` one
    of them. They end the process as soon as they find an error.
    """
    backend = group._get_backend(torch.device("cuda"))
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch checks each operation in a wrapper.
    backend = getattr(backend, "wrapped_pg", backend)
    if not isinstance(backend, getattr(dist, "ProcessGroupNCCL", ())):  # torch for CPUs lacks it
        raise ConfigError(
            f"scheme.nccl_engine=true with the group {group.group_desc}",
            expected="the backend nccl, as torch's ProcessGroupNCCL",
            got=f"{dist.get_backend(group)} ({type(backend).__name__})",
            remedy="initialise torch.distributed with the backend nccl and without "
            "TORCH_DIST_USE_NCCL2, or leave scheme.nccl_engine out",
        )
