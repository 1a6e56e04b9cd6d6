"""How ranks end with their launcher, and after an error that all of them have.

Where the launcher is killed, the kernel kills its ranks. With `training.save_signal=SIGINT` Ctrl-C
saves and ends: torch's agent hands the signal on to the ranks and waits for them. A second Ctrl-C
kills the launcher, and so the ranks.
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
"""The signals that torch's agent hands on to the ranks."""
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
"""Set where Ctrl-C has ended this process."""


@cache
def end_quickly() -> None:
    """From now on this process ends without the work of seconds that would help nobody. Idempotent.

    Python would look for cycles in all of torch and Megatron, on a loaded machine for a minute (it
    does where Triton is loaded), and after Ctrl-C the destructors of torch's groups would wait for
    operations that never end. Call it before torch is imported: what is registered first runs last.
    """
    atexit.register(_end)


def _end() -> None:
    """Keeps the interpreter's end short; after Ctrl-C ends the process at once."""
    # What is frozen is not searched for cycles. Triton must be: from 3.9 on its bindings list
    # whatever of theirs is left at the end.
    if "triton._C.libtriton" not in sys.modules:
        gc.freeze()
    if after_ctrl_c.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        end_at_once(128 + signal.SIGINT)


def end_at_once(code: int) -> NoReturn:
    """Ends this process without destructors and without writing what streams still hold.

    Ends the processes that it has started by `multiprocessing`, too: that of Megatron's checkpoints
    would wait for ever.
    """
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


@contextmanager
def saving(enabled: bool) -> Iterator[None]:
    """Handles SIGINT as the module says while torch's agent runs; does nothing if not `enabled`.

    Main thread only. The first SIGINT raises the exception on which the agent hands the signal on.
    """
    if not enabled:
        yield
        return
    from torch.distributed.elastic.multiprocessing import SignalException

    def first(number: int, frame: object) -> None:
        """Lets the agent hand SIGINT on to the ranks, which save; the next one kills."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print(
            "Ctrl-C: the ranks finish the iteration and save a checkpoint; "
            "press it again to stop at once",
            file=sys.stderr,
            flush=True,
        )
        raise SignalException("Ctrl-C", sigval=signal.SIGINT)

    with environment({_HANDLED: "SIGTERM,SIGHUP,SIGQUIT"}):
        before = signal.signal(signal.SIGINT, first)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def reported_by_first_rank() -> Iterator[None]:
    """Raises an error of the block, which every rank has, on the first rank of each node only.

    The others wait before they end with its exit code: torchrun kills all ranks after the first
    that ends.
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
    """From now on the kernel kills this process when the one that started it ends.

    Else the ranks of a launcher that was killed would go on writing into the run's folder.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None and os.getppid() != int(launcher):  # it was gone before
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def ending_where_stuck() -> Iterator[None]:
    """In the block Ctrl-C ends this process after `STUCK_S`, also inside a wait of torch's.

    Python raises KeyboardInterrupt only when the wait returns; if the other ranks have gone, it
    never does. Main thread only. Does nothing while SIGINT has another handler, as Megatron's.
    """
    signals, written = socket.socketpair()  # Python writes the number of each signal
    written.setblocking(False)
    before = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
    left = threading.Event()

    def watch() -> None:
        """Reads the signal numbers that Python's own handler writes, until the socket is closed."""
        with signals:
            while received := signals.recv(1):
                is_stuck = received[0] == signal.SIGINT and not left.wait(STUCK_S)
                if is_stuck and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    end_at_once(128 + signal.SIGINT)

    threading.Thread(target=watch, name="megatron_sparse_ctrl_c", daemon=True).start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        written.close()
