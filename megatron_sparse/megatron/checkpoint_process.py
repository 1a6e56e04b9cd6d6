"""The processes that Megatron's checkpoints start end with their rank, also where that is killed.

Writers of a checkpoint hand their results on through a queue that a manager of `multiprocessing`
keeps. The manager's process would wait for a killed rank for ever, and one that writes an
asynchronous checkpoint would go on writing into the folder of the next run. This module imports
nothing heavy, because these processes import it.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.managers import SyncManager
from typing import Any

_MARK = "_megatron_sparse_watches"
_is_watching = False


def end_with_rank() -> None:
    """Lets the processes of Megatron's next checkpoints end with this process. Idempotent.

    Imports megatron. Leaves the manager out where Megatron makes its queue in another way, as
    before megatron-core 0.19, and writers of nvidia-resiliency-ext.
    """
    host: Any = None
    with suppress(ImportError):
        from megatron.core.dist_checkpointing.strategies import async_utils
        from megatron.core.dist_checkpointing.strategies import filesystem_async as host

        for name in ("TemporalAsyncCaller", "PersistentAsyncCaller"):
            if hasattr(async_utils, name):
                _let_writers_end(getattr(async_utils, name))
    original = getattr(host, "get_write_results_queue", None)
    if original is None or not hasattr(host, "_results_queue"):  # not as in known releases
        return
    if hasattr(original, _MARK):  # it is wrapped already
        return

    @functools.wraps(original)
    def watched(mp_mode: str = "spawn") -> Any:
        # Makes the queue before Megatron would, with a manager that ends with this process.
        if host._results_queue is None:
            manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
            manager.start(initializer=_begin_manager)
            host._results_queue = manager.Queue()
        return original(mp_mode)

    setattr(watched, _MARK, True)
    host.get_write_results_queue = watched


def _let_writers_end(caller: Any) -> None:
    """Wraps the method of `caller` that starts a writer, so that the writer ends with its rank."""
    original = caller.schedule_async_call
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def schedule_async_call(self: Any, async_req: Any) -> None:
        if async_req.async_fn is not None:
            ending = functools.partial(_run_in_writer, async_req.async_fn)
            async_req = async_req._replace(async_fn=ending)
        original(self, async_req)

    setattr(schedule_async_call, _MARK, True)
    caller.schedule_async_call = schedule_async_call


def _run_in_writer(write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `write`, in the process that writes, which from now on ends with its rank."""
    global _is_watching
    if not _is_watching:  # one process may write several checkpoints
        _is_watching = True
        # A writer starts a process of its own for each file.
        os.register_at_fork(after_in_child=end_soon_after_parent)
        end_soon_after_parent()
    return write(*args, **kwargs)


def _begin_manager() -> None:
    """Prepares the manager's process: it ends soon after its rank, and lets go of the rank's log.

    While it held the log's pipe open, readers of the log would wait for it.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):  # stdout and stderr
        os.dup2(nowhere, number)
    end_soon_after_parent()


def end_soon_after_parent() -> None:
    """From now on this process ends within a second after the one that started it.

    It polls, because the kernel's own signal already comes when the starting thread ends.
    """
    parent = os.getppid()  # changes when the parent has ended

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="megatron_sparse_parent", daemon=True).start()
