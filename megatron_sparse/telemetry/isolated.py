"""Keeps failures of what only shows a run out of the training loop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """A dashboard, or the console's view."""

    def close(self) -> None:
        """Releases what it holds."""


class Isolated[Shown: Closable]:
    """A dashboard or a view whose first exception is logged and turns it off.

    A full disk or a lost network must not end a run of days.

    Args:
        shown: the dashboard or view.
        name: of it, for the log.
    """

    def __init__(self, shown: Shown, name: str) -> None:
        self.shown = shown
        self._name = name
        self._works = True

    def do(self, act: Callable[[Shown], None]) -> None:
        """Calls `act` with it; does nothing once it has failed."""
        if self._works:
            self._try(act)

    def close(self) -> None:
        """Closes it, even after a failure: it may hold files, threads and the terminal."""
        self._try(lambda shown: shown.close())

    def _try(self, act: Callable[[Shown], None]) -> None:
        try:
            act(self.shown)
        except Exception as error:
            if self._works:
                logger.error(
                    "%s failed and is off for the rest of the run: %s: %s",
                    self._name,
                    type(error).__name__,
                    error,
                )
            self._works = False
