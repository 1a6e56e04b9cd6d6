"""One log for each rank: what it prints goes to RUN/logs/rankR.log.

The redirection is below Python, on the file descriptors, so that the log has the last words of C++
libraries after a crash.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_sparse.errors import MegatronSparseError

TEE_S = 10
"""Seconds that `tee` may take to write the rest."""


def log_path(run_dir: Path, rank: int) -> Path:
    """The log of a rank of the run in that folder."""
    return run_dir / "logs" / f"rank{rank}.log"


@contextmanager
def rank_log(run_dir: Path, rank: int, world_size: int) -> Iterator[None]:
    """Sends this process's stdout and stderr to the rank's log, and appends to it.

    The last rank, on which Megatron prints, also keeps its stdout; if that is a terminal, it has no
    log, so that progress bars work. Afterwards both streams are restored. An untyped error leaves
    its traceback in the log.

    Args:
        run_dir: the run's folder, which exists.
        rank: of this process.
        world_size: ranks.
    """
    path = log_path(run_dir, rank)
    path.parent.mkdir(exist_ok=True)
    if rank < world_size - 1:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        with _redirected(log):
            yield
    elif sys.stdout.isatty():
        yield
    else:
        # In a session of its own: a signal to the job's processes would end tee, and the rank's
        # next line would then kill the rank.
        tee = subprocess.Popen(
            ["tee", "-a", str(path)], stdin=subprocess.PIPE, start_new_session=True
        )
        assert tee.stdin is not None
        try:
            with _redirected(os.dup(tee.stdin.fileno())):
                yield
        finally:
            tee.stdin.close()
            try:
                tee.wait(TEE_S)
            except subprocess.TimeoutExpired:
                # A process that the rank left behind holds the pipe open.
                tee.terminate()


@contextmanager
def _redirected(target: int) -> Iterator[None]:
    """Redirects descriptors 1 and 2 to an open file descriptor, and closes that one."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = {number: os.dup(number) for number in (1, 2)}
    for number in before:
        os.dup2(target, number)
    os.close(target)
    try:
        yield
    except (MegatronSparseError, SystemExit, KeyboardInterrupt):
        raise
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, kept in before.items():
            os.dup2(kept, number)
            os.close(kept)
