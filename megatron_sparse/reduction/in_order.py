"""Drives each bucket's job in the thread that launches it, for GPUs with one hardware queue.

With CUDA_DEVICE_MAX_CONNECTIONS=1 kernels start in the order in which they were launched, on all
streams together. Megatron relies on it with tensor and context parallelism: each rank launches that
group's collectives and the data-parallel ones in one order. A thread of ours would launch a
bucket's NCCL kernels at a moment that differs between ranks. Two ranks could then each wait in one
kernel for a peer whose own kernel is behind another one in its queue: a deadlock. So here a
bucket's device work is launched where the backward pass launches the bucket, before `submit`
returns.

In capacity mode the host waits for nothing on the way. Where sizes are exchanged it waits for them,
in the middle of the backward pass.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch

from megatron_sparse.recording import StageTimer
from megatron_sparse.reduction.job import (
    POLL_S,
    Gate,
    Job,
    Progress,
    RunningJob,
    announce,
    launched,
    refusal,
)
from megatron_sparse.reduction.pending import Pending
from megatron_sparse.reduction.progress import ProgressThread
from megatron_sparse.reduction.streams import BucketStreams

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def progress_on(device: torch.device, timeout_s: float) -> Progress:
    """The driver of a process's jobs: a thread, or on CUDA with one hardware queue none.

    Args:
        device: of the gradients.
        timeout_s: seconds that one operation may take.
    """
    if device.type == "cuda" and os.environ.get(QUEUES) == "1":
        return InOrderProgress(device, timeout_s)
    return ProgressThread(device, timeout_s)


class InOrderProgress:
    """See the module's docstring. One thread at a time may submit jobs and wait for them.

    Args:
        device: CUDA.
        timeout_s: see `ProgressThread`.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._device = device
        self._streams = BucketStreams(device)
        self._timeout_s = timeout_s
        self._broken: BaseException | None = None
        self._closed = False

    @property
    def broken(self) -> bool:
        """See `Progress`."""
        return self._broken is not None

    def submit(
        self,
        name: str,
        job: Job,
        timer: StageTimer,
        on_done: Callable[[], None] | None = None,
        after: Pending | None = None,
    ) -> Pending:
        """Launches all of the job's device work; see `Progress`. Errors are raised by the waits."""
        pending = launched(name, timer, on_done, self._device)
        if self._broken is not None or self._closed:
            pending.end(refusal(name, self._broken))
            return pending
        running = RunningJob(pending, job, self._streams, self._timeout_s, after)
        pending.drive_rest = lambda: self._drive(running, to_the_end=True)
        self._drive(running, to_the_end=False)
        return pending

    def close(self) -> None:
        """See `Progress`. Every job has been driven to where it waits for its reports alone."""
        self._closed = True

    @torch.no_grad()
    def _drive(self, running: RunningJob, *, to_the_end: bool) -> None:
        """Steps a job until it is queued, or has ended."""
        moved = threading.Event()
        try:
            self._refuse_after_failure(running)
            while to_the_end or not running.queued:
                while not running.can_move(Gate.END):
                    moved.wait(POLL_S)
                    moved.clear()
                if not running.step(moved.set):
                    return
        except BaseException as error:  # handed to the thread that waits
            if self._broken is None:
                announce(running, error)
                self._broken = error
            running.pending.end(error)

    def _refuse_after_failure(self, running: RunningJob) -> None:
        if self._broken is not None or self._closed:
            raise refusal(running.pending.name, self._broken)
