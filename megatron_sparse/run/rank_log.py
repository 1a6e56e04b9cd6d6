"""The files of a rank: its log, RUN/logs/rankR.log, and its report, which says why it failed.

File descriptors are redirected into the log, not Python's streams, so that the log also has what
C++ libraries print before a crash. Torch's elastic agent passes the report to the launcher.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_sparse.config.redaction import redact_text
from megatron_sparse.errors import MegatronSparseError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable with the file from which torch's agent reads why a rank failed."""
_TYPED = "megatron_sparse"

TEE_S = 10
"""Seconds that `tee` may take to write the rest."""


def log_path(run_dir: Path, rank: int) -> Path:
    """The log of a rank of the run in that folder."""
    return run_dir / "logs" / f"rank{rank}.log"


@contextmanager
def rank_log(run_dir: Path, rank: int, world_size: int) -> Iterator[None]:
    """In the block, appends this process's stdout and stderr to the rank's log.

    The last rank, on which Megatron prints, also prints them to stdout. Both streams are restored
    afterwards. An untyped error leaves its traceback in the log. `run_dir` must exist.
    """
    path = log_path(run_dir, rank)
    path.parent.mkdir(exist_ok=True)
    if rank < world_size - 1:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        with _redirected(log):
            yield
    else:
        # In another session, so that signals to the job do not end tee: without tee, writing the
        # next line would kill the rank.
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
                # A child process of the rank still has the pipe open, so tee reads on.
                tee.terminate()


@contextmanager
def _redirected(target: int) -> Iterator[None]:
    """Redirects descriptors 1 and 2 to the open descriptor `target`, which it closes."""
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
        traceback.print_exc()  # into the log; callers print the exceptions above themselves
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in before.items():
            os.dup2(copy, number)
            os.close(copy)


def write_report(message: str, *, typed: bool) -> None:
    """Writes the error file of torch's agent, in the agent's format, complete or not at all.

    Prints the message instead if there is no agent, or if the file cannot be written. Secrets in
    it are hidden. `typed`: whether it is the message of a `MegatronSparseError`.
    """
    message = redact_text(message)
    path = os.environ.get(ERROR_FILE)
    if path is None:
        print(f"error: {message}", file=sys.stderr)
        return
    callstack = redact_text(traceback.format_exc())
    info = {"timestamp": str(int(time.time())), "py_callstack": callstack}
    report = {"message": {"message": message, "extraInfo": info}, _TYPED: typed}
    part = Path(f"{path}.part")
    try:
        part.write_text(json.dumps(report), "utf-8")
        os.replace(part, path)  # at once: the agent raises on an incomplete file
    except OSError as error:
        part.unlink(missing_ok=True)
        print(f"error: {message}\n(no report: {error})", file=sys.stderr)


def read_report(report: Mapping[str, Any]) -> tuple[str, bool] | None:
    """The arguments (message, typed) of `write_report`; None if the agent wrote the report.

    The agent writes a report if a rank ended without one.
    """
    return (report["message"]["message"], report[_TYPED]) if _TYPED in report else None
