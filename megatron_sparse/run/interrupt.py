"""How ranks end: with their launcher, after Ctrl-C, and after an error that occurs on all of them.

The launcher is the process of `megatron-sparse train`. In it, torch's elastic agent starts the
ranks of this machine. If the launcher is killed, the kernel kills its ranks. With
`training.save_signal=SIGINT`, the agent passes the first Ctrl-C on to the ranks, which save a
checkpoint and end. A second Ctrl-C kills the launcher, and with it the ranks.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NoReturn

from megatron_sparse.errors import MegatronSparseError
from megatron_sparse.run.launchers import environment

SIGINT = "SIGINT"
"""The value of `training.save_signal` that stands for Ctrl-C."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals that torch's agent passes on to the ranks."""
SAVE_S = 600
"""Seconds that ranks may take, after Ctrl-C, for the current iteration and a checkpoint."""
STUCK_S = 4.0
"""Seconds after Ctrl-C at which a rank ends that is still waiting for others."""
FIRST_S = 20
"""Seconds that the first rank of a node gets to report an error that all ranks have."""
LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID")
"""The variables in which torchrun and srun say which of its node's ranks a process is."""
_PR_SET_PDEATHSIG = 1
LAUNCHER = "MEGATRON_SPARSE_LAUNCHER"
"""In the environment of ranks: the process number of the launcher that started them."""
_HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""The signals for which torch's agent installs its own handler."""


after_ctrl_c = threading.Event()
"""Set if Ctrl-C is the reason why this process ends."""


@cache
def end_quickly() -> None:
    """Registers an exit handler that shortens this process's end. Idempotent.

    Without it, Python's exit searches all objects of torch and Megatron for cycles, on a loaded
    machine for a minute (it still does if Triton is loaded), and after Ctrl-C the destructors of
    torch's groups wait for operations that never end. Call it before torch is imported: the handler
    that is registered first runs last.
    """
    atexit.register(_end)


def _end() -> None:
    """The exit handler: spares Python's search for cycles; after Ctrl-C ends the process."""
    # Frozen objects are not searched for cycles. With Triton the search is needed: from Triton 3.9
    # on, its bindings print a list of their objects that are left at the end.
    if "triton._C.libtriton" not in sys.modules:
        gc.freeze()
    if after_ctrl_c.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        end_at_once(128 + signal.SIGINT)


def end_at_once(code: int) -> NoReturn:
    """Ends this process without destructors and without flushing its streams.

    Kills its `multiprocessing` children first: Megatron's checkpoint writer would wait for ever.
    """
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


@contextmanager
def saving(enabled: bool) -> Iterator[None]:
    """While torch's agent runs in the block, the first Ctrl-C saves and the second one kills.

    Main thread only. Does nothing if not `enabled`.
    """
    if not enabled:
        yield
        return
    from torch.distributed.elastic.multiprocessing import SignalException

    def first(number: int, frame: object) -> None:
        """Raises the exception on which the agent passes SIGINT on to the ranks."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C kills
        print(
            "Ctrl-C: the ranks finish the iteration and save a checkpoint; "
            "press it again to stop at once",
            file=sys.stderr,
            flush=True,
        )
        raise SignalException("Ctrl-C", sigval=signal.SIGINT)

    # The agent replaces the handlers of the signals in `_HANDLED`: SIGINT must not be one of them.
    with environment({_HANDLED: "SIGTERM,SIGHUP,SIGQUIT"}):
        before = signal.signal(signal.SIGINT, first)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def reported_by_first_rank() -> Iterator[None]:
    """Lets only the first rank of each node raise an error that the block raises on every rank.

    The other ranks exit `FIRST_S` later with the error's code: when a rank ends, torchrun kills all
    others, and the first rank must have printed the error before.
    """
    try:
        yield
    except MegatronSparseError as error:
        local_ranks = [os.environ[name] for name in LOCAL_RANKS if name in os.environ]
        if not local_ranks or local_ranks[0] == "0":
            raise
        time.sleep(FIRST_S)
        sys.exit(error.exit_code)


def end_with_parent() -> None:
    """Asks the kernel to kill this process when its parent process ends.

    Otherwise the ranks of a killed launcher would go on writing into the run's folder.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None and os.getppid() != int(launcher):  # it ended before `prctl`
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def ending_where_stuck() -> Iterator[None]:
    """Ends this process `STUCK_S` after Ctrl-C if it is then still in the block.

    Python raises KeyboardInterrupt only when a wait of torch's returns, and the wait never returns
    if the other ranks have ended. So a thread watches for SIGINT. It does nothing while SIGINT has
    another handler, such as Megatron's. Main thread only.
    """
    signals, wakeup = socket.socketpair()  # Python writes the number of each signal to `wakeup`
    wakeup.setblocking(False)
    before = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    block_left = threading.Event()

    def watch() -> None:
        """Reads the signal numbers until `wakeup` is closed."""
        with signals:
            while received := signals.recv(1):
                is_stuck = received[0] == signal.SIGINT and not block_left.wait(STUCK_S)
                if is_stuck and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    end_at_once(128 + signal.SIGINT)

    threading.Thread(target=watch, name="megatron_sparse_ctrl_c", daemon=True).start()
    try:
        yield
    finally:
        block_left.set()
        signal.set_wakeup_fd(before)
        wakeup.close()
