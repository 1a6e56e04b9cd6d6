"""Waiting for something to become true: on a quiet machine for moments, else for minutes."""

import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 300.0
"""The limit of a wait whose length is not what a test is about."""


def until[T](
    condition: Callable[[], T], within_s: float = DEADLINE_S, seen: Callable[[], object] = str
) -> T:
    """The condition's value when it holds.

    Raises:
        AssertionError: it does not within the limit; with what is `seen` then.
    """
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"it has not come in {within_s:.0f} s: {seen()}"
        time.sleep(0.02)
    return found


def is_gone(process: int) -> bool:
    """Whether a process has ended; one that nobody has waited for has, too."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
