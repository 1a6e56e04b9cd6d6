"""Runs the compilers, and installs their output.

Only the standard library is needed to import this module.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from megatron_sparse.errors import ExtensionError

LOCK = ".lock"
BYTES_OF_A_COMPILER = 2 * 2**30
"""The most memory that one compiler takes, about."""


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Holds the folder's lock; the lock belongs to the process, and ends with it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / LOCK, "w")  # noqa: SIM115 - closed below, after the lock is released
    except OSError as error:
        raise ExtensionError(
            "the folder of the native libraries cannot be written",
            expected="a writable folder",
            got=error,
            remedy="run python -m megatron_sparse.cuda_ext.build once as the folder's owner",
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_all(jobs: Sequence[tuple[list[object], Path]], verbose: bool) -> list[str]:
    """Runs the compilers, as many at a time as there are cores and memory for."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    workers = max(min(len(os.sched_getaffinity(0)), memory_bytes // BYTES_OF_A_COMPILER), 1)
    with ThreadPoolExecutor(max_workers=workers) as pool:
        running = [pool.submit(run, [*words, "-o", path], verbose) for words, path in jobs]
        try:
            return [future.result() for future in running]
        except ExtensionError:
            pool.shutdown(cancel_futures=True)
            raise


def run(command: Sequence[object], verbose: bool) -> str:
    """Runs one command and returns what it printed.

    Raises:
        ExtensionError: it failed.
    """
    words = [str(word) for word in command]
    if verbose:
        print(shlex.join(words), flush=True)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if verbose and output.strip():
        print(output.rstrip(), flush=True)
    if done.returncode:
        raise ExtensionError(
            f"{Path(words[0]).name} failed with exit code {done.returncode}",
            expected=shlex.join(words),
            got="\n".join(output.strip().splitlines()[:20]),
            remedy="see the first error above; --verbose prints every command",
        )
    return output


def install(linked: Path, target: Path, stamp: dict[str, str]) -> None:
    """Puts library and stamp in place, each in one step: other processes may be loading them."""
    for suffix, write in (
        ("", lambda path: shutil.copy(linked, path)),
        (".stamp", lambda path: path.write_text(json.dumps(stamp))),
    ):
        fresh = target.with_name(f".{target.name}{suffix}.new")
        write(fresh)
        os.replace(fresh, target.with_name(target.name + suffix))
