"""The order of the tests: what takes long comes first, so that no process is left with it alone."""

from __future__ import annotations

from pathlib import Path

import pytest

LONG = ("megatron", "integration", "cuda_emulator", "run", "bench", "reduction")
"""Folders whose files take minutes: they start ranks, Megatron, Slurm or the emulator."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts by folder; `scripts/test.sh` hands out files in this order."""
    tests = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(tests).parts[0]
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=place)
