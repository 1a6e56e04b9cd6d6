"""Drivers: they step all pending jobs in turns, so that every rank posts in the same order.

The backend matches operations by their order, but jobs become ready in any order. One rule holds: a
job (`job`) passes its gate only when all jobs launched before it have yielded `POSTED` or
`UNORDERED`. So while one bucket is on the wire, the next one is selected and the previous one is
decoded. On CUDA the streams of `job` do the same on the device.

- `ProgressThread` is one thread for each process, which runs beside the backward pass.
- `InOrderProgress` drives each job in the thread that launches it, for GPUs with one hardware
  queue. With CUDA_DEVICE_MAX_CONNECTIONS=1 kernels start in the order in which they were launched,
  on all streams together. Megatron relies on it with tensor and context parallelism: each rank
  launches those groups' collectives and the data-parallel ones in one order. A thread would
  launch a bucket's NCCL kernels at a moment that differs between ranks. Two ranks could then each
  wait in one kernel for a peer whose own kernel is behind another one in its queue: a deadlock. So
  all device work of a bucket is launched before `submit` returns, in the middle of the backward
  pass. In capacity mode (`scheme.capacity`) `submit` does not block. Else sparse schemes
  exchange the sizes of messages, and `submit` blocks until it has them.
- `Progress` itself drives nothing: on virtual ranks the caller does, by `Pending.run_alone`.
"""

import os
import threading
import time
from collections import deque

import torch

from megatron_sparse.errors import CommunicationError, MegatronSparseError, WireFormatError
from megatron_sparse.reduction.job import BucketStreams, Pending
from megatron_sparse.transport.liveness import announce_failure

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
POLL_S = 20e-3
"""Waiting jobs are polled this often, for deadlines and for ranks that are gone: neither wakes the
thread that drives them."""
CLOSING_S = 1.0
"""When the thread is closed, jobs that are under way have so many seconds to end."""
CLOSING_SLACK_S = 4.0
"""Further seconds that `close` waits for a slow step of a job."""


class Progress:
    """Drives jobs.

    Args:
        device: on CUDA, jobs run on streams of their own, after what the launching stream had
            queued.
        timeout_s: seconds that one operation may take. The backend's own timeout comes first;
            this one is for backends that have none.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._device = device
        self._streams = BucketStreams(device) if device.type == "cuda" else None
        self._timeout_s = timeout_s
        self._broken: BaseException | None = None

    @property
    def broken(self) -> bool:
        """Whether an operation has failed; every later job is refused then."""
        return self._broken is not None

    def submit[T](self, pending: Pending[T]) -> Pending[T]:
        """Takes over a job, and returns it. Jobs are submitted in the same order on every rank."""
        return pending

    def close(self) -> None:
        """Ends all jobs; those under way end with an error."""


def progress_on(device: torch.device, timeout_s: float) -> Progress:
    """Makes a process's driver: `InOrderProgress` for a GPU with one queue, else a thread."""
    if device.type == "cuda" and os.environ.get(QUEUES) == "1":
        return InOrderProgress(device, timeout_s)
    return ProgressThread(device, timeout_s)


class ProgressThread(Progress):
    """See the module's docstring, and `Progress` for the arguments."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        super().__init__(device, timeout_s)
        self._incoming: deque[Pending] = deque()  # submitted; the thread moves them to `_running`
        self._running: list[Pending] = []  # in the order of their launch
        self._wake = threading.Condition()
        # Whether `_wake_up` was called since the thread last looked: then it does not sleep.
        self._is_awake = False
        # Set by `close`: the time at which jobs that still run end with an error.
        self._close_deadline_s: float | None = None
        self._thread = threading.Thread(target=self._main, name="megatron_sparse", daemon=True)
        self._thread.start()

    def submit[T](self, pending: Pending[T]) -> Pending[T]:
        """Queues a job behind all earlier ones and returns at once; see `Progress`.

        After a failure, or after `close`, the job ends at once with an error.
        """
        pending.launch(self._streams, self._timeout_s)
        with self._wake:
            if self._broken is not None or self._close_deadline_s is not None:
                pending.end(refused_error(pending, self._broken))
            else:
                self._incoming.append(pending)
                self._wake_up()
        return pending

    def close(self) -> None:
        """Ends the thread. Jobs that still run after `CLOSING_S` end with an error.

        Their peers may never take part, for example if an error ends this rank's step: so this does
        not wait for the timeout. The thread tells the other ranks (`announce`).
        """
        with self._wake:
            self._close_deadline_s = time.perf_counter() + CLOSING_S
            self._wake_up()
        self._thread.join(CLOSING_S + CLOSING_SLACK_S)
        if self._thread.is_alive() and self._broken is None:  # a step of a job blocks the thread
            self._broken = unfinished_error()

    @torch.no_grad()
    def _main(self) -> None:
        """Steps jobs until the thread is closed and none is left."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while True:
            with self._wake:
                # Wake-ups from here on are handled in the next turn.
                self._is_awake = False
                self._running.extend(self._incoming)
                self._incoming.clear()
                close_deadline_s = self._close_deadline_s
                if close_deadline_s is not None and not self._running:
                    return
            if self._advance_one():
                continue
            if close_deadline_s is not None and time.perf_counter() > close_deadline_s:
                oldest = self._running[0]  # without a running job this thread has returned above
                self._fail(oldest, unfinished_error())
                continue
            with self._wake:
                if not self._is_awake:
                    self._wake.wait(POLL_S if self._running else None)

    def _wake_up(self) -> None:
        """Lets the thread look for a job that can move; any thread may call it."""
        with self._wake:
            self._is_awake = True
            self._wake.notify()

    def _advance_one(self) -> bool:
        """Runs one step of the oldest job that can move; False if all of them wait.

        Jobs are in the order of their launch. The gate is open to a job if no job before it may
        still post.
        """
        gate_is_open = True
        for pending in self._running:
            try:
                can_move = pending.can_move(gate_is_open=gate_is_open)
            except BaseException as error:  # it queries the device, which may have failed
                self._fail(pending, error)
                return True
            if can_move:
                self._step(pending)
                return True
            gate_is_open = gate_is_open and not pending.may_post
        return False

    def _step(self, pending: Pending) -> None:
        """Resumes a job until its next yield."""
        try:
            if not pending.step(self._wake_up):
                self._running.remove(pending)
        except BaseException as error:  # kept: `Pending.wait` raises it in the waiting thread
            self._fail(pending, error)

    def _fail(self, failed: Pending, error: BaseException) -> None:
        """Ends every job: after a failure the group's state is unknown, and no sum can be right."""
        announce(failed, error)
        with self._wake:
            self._broken = error
            ended = [*self._running, *self._incoming]
            self._running.clear()
            self._incoming.clear()
        for pending in ended:
            pending.end(error if pending is failed else refused_error(pending, error))


class InOrderProgress(Progress):
    """See the module's docstring, and `Progress` for the arguments; only for CUDA.

    One thread at a time may submit jobs and wait for them.
    """

    _closed = False
    _last: Pending | None = None  # the job submitted last

    def submit[T](self, pending: Pending[T]) -> Pending[T]:
        """Drives the job until it is queued; see `Progress`. Its errors are raised by `wait`."""
        pending.launch(self._streams, self._timeout_s)
        if self._broken is not None or self._closed:
            pending.end(refused_error(pending, self._broken))
            return pending
        self._last = pending
        pending.drive_rest = lambda: self._drive(pending, to_the_end=True)
        self._drive(pending, to_the_end=False)
        return pending

    def close(self) -> None:
        """See `Progress`. Waits at most `CLOSING_S` for work that is still on the device."""
        self._closed = True
        last = self._last  # the network stream runs jobs in order, so this one ends last
        if self._broken is not None or last is None or last.done() or last.finish_event is None:
            return
        ends_s = time.perf_counter() + CLOSING_S
        try:
            while not last.finish_event.query():
                if time.perf_counter() > ends_s:
                    raise unfinished_error()
                time.sleep(POLL_S)
        except Exception as error:  # peers that never come, or a device that has failed
            announce(last, error)
            self._broken = error

    @torch.no_grad()
    def _drive(self, pending: Pending, *, to_the_end: bool) -> None:
        """Steps a job until it is queued, or `to_the_end`; blocks while it waits for an operation.

        An error ends the job, and all later jobs are refused.
        """
        may_move = threading.Event()
        try:
            if self._broken is not None or self._closed:
                raise refused_error(pending, self._broken)
            while to_the_end or not pending.queued():
                # The gate is open: all earlier jobs were driven until they had posted everything.
                while not pending.can_move(gate_is_open=True):
                    may_move.wait(POLL_S)
                    may_move.clear()
                if not pending.step(may_move.set):
                    return
        except BaseException as error:  # kept: `Pending.wait` raises it in the waiting thread
            if self._broken is None:
                announce(pending, error)
                self._broken = error
            pending.end(error)


def announce(failed: Pending, error: BaseException) -> None:
    """Adds the bucket's name to an error, and tells the other ranks that this one has failed.

    So the other ranks fail at once, and do not wait for their timeout.
    """
    if isinstance(error, CommunicationError | WireFormatError):
        error.args = (f"bucket {failed.name}: {error}",)
    announce_failure(error)


def unfinished_error() -> CommunicationError:
    """The error of a job that has not ended within `CLOSING_S` after `close`."""
    return CommunicationError(
        "the reducer was closed while a bucket was under way",
        expected="a sum before the end of the training loop",
        got=f"an operation that has not ended {CLOSING_S:.0f} s after it",
        remedy="look for an earlier error on this rank; detach between two steps",
    )


def refused_error(pending: Pending, broken: BaseException | None) -> MegatronSparseError:
    """The error of a job after an earlier job's error (`broken`), or after `close` (None)."""
    return CommunicationError(
        f"bucket {pending.name} was not synchronised",
        expected="a working process group",
        got=f"an earlier failure: {broken}" if broken else "a closed reducer",
        remedy="restart from the last checkpoint",
    )
