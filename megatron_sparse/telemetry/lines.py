"""Writes a run's files so that they survive a kill: JSON lines, and files replaced atomically."""

import json
import logging
import math
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_sparse.errors import ConfigError

logger = logging.getLogger(__name__)


def parse(line: bytes) -> dict[str, Any] | None:
    """Returns the object of one line; None if it is cut off, no JSON, or without `iteration`."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and isinstance(value.get("iteration"), int) else None


def read_lines(path: Path, damaged: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON lines file in order; skips damaged lines with a warning.

    Args:
        path: the file.
        damaged: receives the numbers of damaged lines, from 1.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            value = parse(line)
            if value is None:
                logger.warning("%s: line %d is damaged and left out", path.name, number)
                if damaged is not None:
                    damaged.append(number)
            else:
                yield value


def other_version(path: Path, error: Exception) -> ConfigError:
    """Makes the error of a file whose lines have other fields than this version's."""
    return ConfigError(
        f"{path} was not written by this version of megatron_sparse",
        expected="lines as docs/reading-the-breakdown.md describes them",
        got=f"{type(error).__name__}: {error}",
        remedy="use the version that trained, or train into another folder",
    )


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically: a kill leaves the old content or the new, never a part.

    Raises:
        OSError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class JsonLines:
    """A JSON lines file whose lines carry an ascending `iteration`.

    Lines stay in memory until `flush`, so that an iteration costs no system call.

    Args:
        path: the file. Call `repair` first: it creates the file.
        optional: `repair` does not create the file; the first flush with lines does.
    """

    def __init__(self, path: Path, *, optional: bool = False) -> None:
        self._path = path
        self._optional = optional
        self._pending: list[str] = []

    def append(self, line: str) -> None:
        """Keeps `line`, a JSON object without a line break, for the next flush."""
        self._pending.append(line)

    def flush(self) -> None:
        """Appends the pending lines to the file.

        Raises:
            OSError: the file cannot be written; the pending lines are dropped.
        """
        pending, self._pending = self._pending, []
        if pending:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n".join(pending) + "\n")

    def repair(self) -> None:
        """Creates the file if it is missing, unless optional; drops a damaged end with a warning.

        Raises:
            OSError: the file cannot be written.
        """
        if not self._optional:
            self._path.open("a").close()
        self.cut(math.inf)

    def cut(self, iteration: float) -> None:
        """Drops all lines from `iteration` on (infinity: none), and a damaged end with a warning.

        Reads from the end: the cost grows with the dropped lines, not with the file.

        Raises:
            OSError: the file cannot be changed.
        """
        self.flush()
        if (self._optional and not self._path.exists()) or not self._path.stat().st_size:
            return  # mmap refuses an empty file
        with self._path.open("r+b") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                size = len(content)
                keep = size  # bytes to keep
                while keep:
                    # The line before `keep`; its own line break is the byte at keep - 1.
                    start = content.rfind(b"\n", 0, keep - 1) + 1
                    line = parse(content[start:keep])
                    if line is None:
                        logger.warning("%s: dropped a damaged line at its end", self._path.name)
                    elif line["iteration"] < iteration:
                        break
                    keep = start
            if keep < size:
                file.truncate(keep)
