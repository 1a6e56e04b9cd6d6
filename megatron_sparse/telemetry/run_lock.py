"""Locks a run's folder, so that only one run at a time writes it.

The *holder* of the lock is the launcher of `megatron-sparse train`, or rank 0 of ranks that
torchrun or srun started; with `install`, the rank that writes the folder (`RunTelemetry`). The lock
is the kernel's (flock), of the file `lock`: it ends with the holder's process. On some network file
systems other machines (hosts) do not see such a lock. So the file also names the holder, which
updates the file's time every `BEAT_S`. If a holder on another host did so less than `STALE_S` ago,
the folder is taken. If that host was lost, the folder is free after that time; a job that Slurm has
requeued need not wait.
"""

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
    """Locks an existing folder for the time of the `with` body.

    Raises:
        ConfigError: another process has locked it; names the process.
        OSError: the lock cannot be written.
    """
    path = run_dir / LOCK_FILE
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # The file names the present holder or a killed one: others remove their name when they end.
        holder = _read(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Read again: the holder may have taken the lock after the first reading.
            raise _taken_error(run_dir, _read(file)) from None
        if not _is_same_file(file, path):  # another process has moved the folder
            raise _taken_error(run_dir, {})
        silent_s = time.time() - os.fstat(file).st_mtime
        if _holds_elsewhere(holder, silent_s):
            raise _taken_error(run_dir, holder)
        _write(file, _this_process())
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
            # Closing does not unlock while forked children, such as a loader's workers, live.
            fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)


def _is_same_file(file: int, path: Path) -> bool:
    """Whether `path` still names this open file, which another process could have moved."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _this_process() -> dict[str, Any]:
    """Returns how the file names this process as the holder."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _holds_elsewhere(holder: Mapping[str, Any], silent_s: float) -> bool:
    """Whether the holder is on another host, where this host's kernel does not see it, and alive.

    `silent_s`: seconds since the holder updated the file's time.
    """
    is_here = holder.get("host") == socket.gethostname()
    if not holder or is_here or silent_s > STALE_S:
        return False
    job = os.environ.get("SLURM_JOB_ID")
    was_requeued = job is not None and holder.get("slurm_job") == job  # this job, earlier
    return not was_requeued


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with suppress(OSError):  # the folder was moved or removed
            os.utime(path)


def _read(file: int) -> dict[str, Any]:
    """Returns the holder that the file names; empty if it names none."""
    try:
        holder = json.loads(os.pread(file, 4096, 0))  # more than `_write` ever writes
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _write(file: int, holder: Mapping[str, Any]) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(holder).encode(), 0)


def _taken_error(run_dir: Path, holder: Mapping[str, Any]) -> ConfigError:
    """Makes the error for a folder that another process has locked; an empty holder is unknown."""
    who = "another process"
    if holder:
        who = f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"
    return ConfigError(
        f"{run_dir} belongs to a run that is still going on",
        expected="a run that has ended, or a name of its own",
        got=who,
        remedy="choose another name, or end that run first",
    )
