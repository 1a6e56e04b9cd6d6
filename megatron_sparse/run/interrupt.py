"""Ctrl-C in the launcher with `training.save_signal=SIGINT`: once to save and end, twice to stop.

torch's agent hands a signal on to the ranks and waits for them, but a second one leaves them
behind. Here the second one kills them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SIGINT = "SIGINT"
"""The value of `training.save_signal` that stands for Ctrl-C."""
SAVE_S = 600
"""Seconds that ranks may take, after Ctrl-C, for the current iteration and a checkpoint."""
_HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""The signals for which torch's agent installs its own handler."""


@contextmanager
def saving(enabled: bool) -> Iterator[None]:
    """Handles SIGINT as above while torch's agent runs; does nothing if not `enabled`.

    Main thread only. The first SIGINT raises the exception on which the agent hands the signal on.
    """
    if not enabled:
        yield
        return
    from torch.distributed.elastic.multiprocessing import SignalException

    def second(number: int, frame: object) -> None:
        print("stopping at once, without a checkpoint", file=sys.stderr, flush=True)
        for process in children(os.getpid()):
            with suppress(ProcessLookupError):
                # The agent gives each rank a process group of its own.
                os.killpg(process, signal.SIGKILL)

    def first(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, second)
        print(
            "Ctrl-C: the ranks finish the iteration and save a checkpoint; "
            "press it again to stop at once",
            file=sys.stderr,
            flush=True,
        )
        raise SignalException("Ctrl-C", sigval=signal.SIGINT)

    handled = os.environ.get(_HANDLED)
    os.environ[_HANDLED] = "SIGTERM,SIGHUP,SIGQUIT"
    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if handled is None:
            del os.environ[_HANDLED]
        else:
            os.environ[_HANDLED] = handled


def children(parent: int) -> list[int]:
    """The process groups that direct children of `parent` lead. Reads /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, ValueError, IndexError):
            # PID (NAME) STATE PPID PGRP ...; the name may contain anything.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            process, group = int(entry.name), int(fields[2])
            if int(fields[1]) == parent and process == group:
                found.append(process)
    return sorted(found)
