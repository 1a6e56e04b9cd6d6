"""One run at a time in a folder: the lock that the process which writes a run's folder holds.

The launcher of `megatron-sparse train` holds it, or rank 0 of ranks that torchrun or srun
started; with `install`, the rank that writes the folder (`RunTelemetry`). It is the kernel's
lock of the file `lock` (flock), which ends with its process, however that ends. Some network file
systems keep such locks on one host only. So the file also names its holder, who touches it every
`BEAT_S`: where another host's holder touched it less than `STALE_S` ago, the folder is taken. After
a host was lost, its folder is free after that time; a job that Slurm has requeued need not wait.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_sparse.errors import ConfigError

LOCK_FILE = "lock"
BEAT_S, STALE_S = 15.0, 90.0


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Holds the lock of a folder, which exists.

    Raises:
        ConfigError: another process holds it; names it.
        OSError: the lock cannot be written.
    """
    path = run_dir / LOCK_FILE
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        holder = _read(file)  # who holds the folder, or was killed while it did
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Read again: the holder may have come in between.
            raise _taken(run_dir, _read(file)) from None
        if not _is_there(file, path):
            raise _taken(run_dir, {})
        silent_s = time.time() - os.fstat(file).st_mtime
        if _holds_elsewhere(holder, silent_s):
            raise _taken(run_dir, holder)
        _write(file, _own())
        ended = threading.Event()
        beat = threading.Thread(target=_beat, args=(path, ended), daemon=True)
        beat.start()
        try:
            yield
        finally:
            ended.set()
            beat.join()
            with suppress(OSError):  # a full disk
                _write(file, {})
            # Closing alone would leave it to forked children, such as a loader's workers.
            fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)


def _is_there(file: int, path: Path) -> bool:
    """Whether an open file still has this name, and was not moved with its folder meanwhile."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _own() -> dict[str, Any]:
    """This process as a holder: what the file says of it."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _holds_elsewhere(holder: Mapping[str, Any], silent_s: float) -> bool:
    """Whether a holder on another host is alive, although this host's kernel gave the lock.

    `silent_s`: seconds since the holder touched the file.
    """
    is_here = holder.get("host") == socket.gethostname()
    if not holder or is_here or silent_s > STALE_S:
        return False
    job = os.environ.get("SLURM_JOB_ID")
    was_requeued = job is not None and holder.get("slurm_job") == job
    return not was_requeued


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with suppress(OSError):  # the folder was moved or removed
            os.utime(path)


def _read(file: int) -> dict[str, Any]:
    """The holder that the file names; empty if it names none."""
    try:
        holder = json.loads(os.pread(file, 4096, 0))  # more than `_write` ever writes
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _write(file: int, holder: Mapping[str, Any]) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(holder).encode(), 0)


def _taken(run_dir: Path, holder: Mapping[str, Any]) -> ConfigError:
    """The error of a folder that another process holds; names the holder unless it is empty."""
    who = "another process"
    if holder:
        who = f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"
    return ConfigError(
        f"{run_dir} belongs to a run that is still going on",
        expected="a run that has ended, or a name of its own",
        got=who,
        remedy="choose another name, or end that run first",
    )
