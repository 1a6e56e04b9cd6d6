"""Makes the processes that Megatron starts for checkpoints end with their rank, even a killed one.

Writer processes return their results through a queue, which lives in a manager process of
`multiprocessing`. If the rank is killed, the manager would wait for it for ever, and the writer of
an asynchronous checkpoint would go on writing into the folder of the next run. This module imports
nothing heavy, because these processes import it.
"""

import functools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.managers import SyncManager
from typing import Any

_MARK = "_megatron_sparse_watches"  # attribute of the functions of Megatron that are wrapped
_is_watching = False  # whether this process, a writer, ends with its rank


def end_with_rank() -> None:
    """Wraps Megatron's functions that start writers and the manager: they end with this process.

    Idempotent. Imports megatron. Does not reach the manager of megatron-core before 0.19, which
    makes its queue in another way, nor writers of nvidia-resiliency-ext.
    """
    host: Any = None  # Megatron's module with the queue
    with suppress(ImportError):
        from megatron.core.dist_checkpointing.strategies import async_utils
        from megatron.core.dist_checkpointing.strategies import filesystem_async as host

        for name in ("TemporalAsyncCaller", "PersistentAsyncCaller"):
            if hasattr(async_utils, name):
                _let_writers_end(getattr(async_utils, name))
    original = getattr(host, "get_write_results_queue", None)
    if original is None or not hasattr(host, "_results_queue"):  # another version of Megatron
        return
    if hasattr(original, _MARK):  # it is wrapped already
        return

    @functools.wraps(original)
    def watched(mp_mode: str = "spawn") -> Any:
        # Makes Megatron's queue first, with a manager that ends with this process.
        if host._results_queue is None:
            manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
            manager.start(initializer=_begin_manager)
            host._results_queue = manager.Queue()
        return original(mp_mode)

    setattr(watched, _MARK, True)
    host.get_write_results_queue = watched


def _let_writers_end(caller: Any) -> None:
    """Wraps the method of class `caller` that starts a writer, so that it ends with its rank."""
    original = caller.schedule_async_call
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def schedule_async_call(self: Any, async_req: Any) -> None:
        if async_req.async_fn is not None:
            in_writer = functools.partial(_run_in_writer, async_req.async_fn)
            async_req = async_req._replace(async_fn=in_writer)
        original(self, async_req)

    setattr(schedule_async_call, _MARK, True)
    caller.schedule_async_call = schedule_async_call


def _run_in_writer(write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs in the writer process: makes it end with its rank, then calls `write`."""
    global _is_watching
    if not _is_watching:  # once, although one process may write several checkpoints
        _is_watching = True
        # The writer forks a process for each file, which must end with the writer.
        os.register_at_fork(after_in_child=end_soon_after_parent)
        end_soon_after_parent()
    return write(*args, **kwargs)


def _begin_manager() -> None:
    """Runs in the manager process: makes it end with its rank, and closes the rank's output.

    An open copy of the rank's stdout or stderr would keep readers of the rank's log waiting.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):  # stdout and stderr
        os.dup2(nowhere, number)
    end_soon_after_parent()


def end_soon_after_parent() -> None:
    """Makes this process end within a second after its parent.

    A thread polls, because Linux's signal for this (PR_SET_PDEATHSIG) comes already when the
    parent's thread that started this process ends.
    """
    parent = os.getppid()  # another process adopts this one when the parent ends

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)  # `sys.exit` would end only this thread

    threading.Thread(target=watch, name="megatron_sparse_parent", daemon=True).start()
