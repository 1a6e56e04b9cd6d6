"""Recognises that a run failed because its disk is full, and raises a `StorageError` then.

The original error seldom says so: on a full disk torch and Megatron report lost workers, damaged
zip archives or JSON that ends early, and a rank may not be able to write its report (`rank_log`).
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_sparse.errors import MegatronSparseError, StorageError

PROBE_BYTES = 1 << 20
"""Written to find out whether a folder's disk takes more; a report or a tracker is smaller."""
_CODES = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def naming_full_disk(folder: Path) -> Iterator[None]:
    """Raises an untyped error of the block as a `StorageError` if a disk is full."""
    try:
        yield
    except (MegatronSparseError, SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        full = as_storage_error(error, folder)
        if full is None:
            raise
        raise full from error


def as_storage_error(error: BaseException, folder: Path) -> StorageError | None:
    """The `StorageError` to raise if `error` comes from a full disk, else None.

    Causes of the error count too, and errors of other ranks that torch has gathered in it. If it
    names no file, the disk of the run's `folder` is named.
    """
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in _CODES:
            return storage_error(cause.filename or folder, cause)
    # Megatron's writer processes pass an error on as text, without its errno: try the disk.
    return probe(folder)


def probe(folder: Path) -> StorageError | None:
    """Tries to write `PROBE_BYTES` into the folder: the `StorageError` if its disk is full."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(PROBE_BYTES))  # some file systems store zeros without space
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return storage_error(folder, error) if error.errno in _CODES else None
    return None


def storage_error(path: str | Path | int, got: object) -> StorageError:
    """The error for a file or folder on a full disk."""
    return StorageError(
        f"the disk is full: {path}",
        expected="space for the run's files; a checkpoint is the largest",
        got=got,
        remedy="free space there, or copy the run's folder to another disk and set runs_dir; "
        "then go on with resume=must, which takes the newest complete checkpoint",
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes and contexts, and the errors of ranks that torch gathered in it."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [each.__cause__, each.__context__]
        # torch.distributed.checkpoint's CheckpointException: rank to (error, its traceback).
        failures = getattr(each, "failures", None)
        if isinstance(failures, dict):
            waiting += [wrapped[0] for wrapped in failures.values()]
