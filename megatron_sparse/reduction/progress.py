"""One thread for each process runs the pipelines of all pending buckets in turns.

A bucket's pipeline is a job (`job`). All ranks must post operations in the same order, because the
backend matches them by order, but jobs become ready in any order. One rule ensures this: a job
passes its gate only when all jobs launched before it have yielded `POSTED` or `UNORDERED`, or a
later gate (`job.Gate`). So while one bucket is on the wire, the next one is selected and the
previous one is decoded. On CUDA the two streams of `streams` carry this over to the device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from megatron_sparse.errors import CommunicationError
from megatron_sparse.recording import StageTimer
from megatron_sparse.reduction.job import (
    POLL_S,
    Gate,
    Job,
    RunningJob,
    announce,
    end_all,
    launched,
    refusal,
)
from megatron_sparse.reduction.pending import Pending
from megatron_sparse.reduction.streams import BucketStreams

CLOSING_S = 1.0
"""When the thread is closed, jobs that are under way have so many seconds to end."""
CLOSING_SLACK_S = 4.0
"""Further seconds that `close` waits for a slow step of a job."""


class ProgressThread:
    """See the module's docstring.

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
        self._incoming: deque[RunningJob] = deque()
        self._running: list[RunningJob] = []
        self._wake = threading.Condition()
        self._is_awake = False
        self._closes_s: float | None = None
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="megatron_sparse", daemon=True)
        self._thread.start()

    def submit(
        self,
        name: str,
        job: Job,
        timer: StageTimer,
        on_done: Callable[[], None] | None = None,
        after: Pending | None = None,
    ) -> Pending:
        """Queues a job behind all those submitted before; see `Progress`. Returns at once."""
        pending = launched(name, timer, on_done, self._device)
        with self._wake:
            if self._broken is not None or self._closes_s is not None:
                pending.end(refusal(name, self._broken))
                return pending
            self._incoming.append(RunningJob(pending, job, self._streams, self._timeout_s, after))
            self._wake_up()
        return pending

    @property
    def broken(self) -> bool:
        """Whether an operation has failed; every later job is refused then."""
        return self._broken is not None

    def close(self) -> None:
        """Ends the thread. Jobs that are still under way get `CLOSING_S`, then end with an error.

        No caller waits for them any more, and their peers may never take part: for example if this
        rank leaves a step because of an error. The other ranks are notified.
        """
        with self._wake:
            self._closes_s = time.perf_counter() + CLOSING_S
            self._wake_up()
        self._thread.join(CLOSING_S + CLOSING_SLACK_S)
        if self._thread.is_alive() and self._broken is None:
            self._broken = self._unfinished()

    def _unfinished(self) -> CommunicationError:
        return CommunicationError(
            "the reducer was closed while a bucket was under way",
            expected="a sum before the end of the training loop",
            got=f"an operation that has not ended {CLOSING_S:.0f} s after it",
            remedy="look for an earlier error on this rank; detach between two steps",
        )

    def _main(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        with torch.no_grad():
            self._loop()

    def _loop(self) -> None:
        while True:
            with self._wake:
                # Wake-ups from here on are handled in the next turn.
                self._is_awake = False
                self._running.extend(self._incoming)
                self._incoming.clear()
                closes_s = self._closes_s
                if closes_s is not None and not self._running:
                    return
            if self._advance_one():
                continue
            if closes_s is not None and time.perf_counter() > closes_s:
                self._fail(self._running[0], self._unfinished())
                continue
            with self._wake:
                if not self._is_awake:
                    self._wake.wait(POLL_S if self._running else None)

    def _wake_up(self) -> None:
        """Called by any thread when a job may have become able to move."""
        with self._wake:
            self._is_awake = True
            self._wake.notify()

    def _advance_one(self) -> bool:
        """Runs one step of the oldest job that can move; False if all of them wait.

        Jobs are in the order of their launch. A job may pass a gate if all before it are past it.
        """
        reached = Gate.END
        for running in self._running:
            if running.can_move(reached):
                self._step(running)
                return True
            reached = min(reached, running.reached)
        return False

    def _step(self, running: RunningJob) -> None:
        """Resumes a job until its next yield."""
        try:
            if not running.step(self._wake_up):
                self._running.remove(running)
        except BaseException as error:  # handed to the thread that waits
            self._fail(running, error)

    def _fail(self, failed: RunningJob, error: BaseException) -> None:
        """Ends every job; see `end_all`."""
        announce(failed, error)
        with self._wake:
            self._broken = error
            others = [*self._running, *self._incoming]
            self._running.clear()
            self._incoming.clear()
        end_all(others, failed, error)
