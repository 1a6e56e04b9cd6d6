"""The load that other programs put on the machine, and the machine's free memory."""

from __future__ import annotations

import time
from types import ModuleType

from megatron_sparse.extras import require

MOST_FOREIGN_LOAD = 0.1
"""Share of the machine; if other programs use more, a measurement is marked as noisy."""


class HostLoad:
    """Counts processor time from its construction on.

    Leaves out the kernel's work on interrupts: the ranks' network traffic causes it, but no
    process's account includes it.

    Raises:
        DependencyError: psutil is not installed.
    """

    def __init__(self) -> None:
        self._psutil = _psutil()
        self._begin = self._now()

    def _now(self) -> tuple[float, float, float]:
        machine, own = self._psutil.cpu_times(), self._psutil.Process().cpu_times()
        worked = machine.user + machine.nice + machine.system + getattr(machine, "steal", 0.0)
        cores = self._psutil.cpu_count() or 1
        spent = own.user + own.system + own.children_user + own.children_system
        return time.monotonic() * cores, worked, spent

    def spent(self) -> tuple[float, float, float]:
        """Core-seconds since the construction: available, used, and used by this process.

        Children count once they have ended and the process has waited for them.
        """
        there_were, worked, own = (
            now - then for now, then in zip(self._now(), self._begin, strict=True)
        )
        return there_were, worked, own


def foreign_share(there_were_s: float, worked_s: float, own_s: float) -> float:
    """The share of the machine, 0 to 1, that other programs used."""
    return min(max(worked_s - own_s, 0.0) / there_were_s, 1.0)


def free_memory_bytes() -> int:
    """Memory that is available without swapping.

    Raises:
        DependencyError: psutil is not installed.
    """
    return int(_psutil().virtual_memory().available)


def _psutil() -> ModuleType:
    require("psutil", "sees the machine's load and memory", "train")
    import psutil

    return psutil
