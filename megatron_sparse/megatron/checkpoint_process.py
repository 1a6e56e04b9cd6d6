"""The process that Megatron's checkpoints start ends with its rank, also where that is killed.

Writers of a checkpoint hand their results on through a queue that a manager of `multiprocessing`
keeps. The manager's process would wait for a killed rank for ever. This module imports nothing
heavy, because that process imports it.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
import time
from contextlib import suppress
from multiprocessing.managers import SyncManager
from typing import Any

_MARK = "_megatron_sparse_watches"


def end_with_rank() -> None:
    """Lets the manager of Megatron's next checkpoint end with this process. Idempotent.

    Imports megatron. Does nothing where Megatron makes its queue in another way, as before
    megatron-core 0.19.
    """
    host: Any = None
    with suppress(ImportError):
        from megatron.core.dist_checkpointing.strategies import filesystem_async as host
    original = getattr(host, "get_write_results_queue", None)
    if original is None or not hasattr(host, "_results_queue") or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def watched(mp_mode: str = "spawn") -> Any:
        if host._results_queue is None:
            manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
            manager.start(initializer=end_soon_after_parent)
            host._results_queue = manager.Queue()
        return original(mp_mode)

    setattr(watched, _MARK, True)
    host.get_write_results_queue = watched


def end_soon_after_parent() -> None:
    """From now on this process ends within a second after the one that started it.

    By looking: the kernel's signal would come when the thread ends that started this process.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="megatron_sparse_parent", daemon=True).start()
