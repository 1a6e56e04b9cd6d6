"""The order of the tests: what takes long comes first, so that no process is left with it alone.

Hypothesis sets no time limit: an example of a test takes long where the machine is busy. It may be
missing where `scripts/gpu_check.sh` runs.
"""

from contextlib import suppress
from pathlib import Path

import pytest
import torch

with suppress(ModuleNotFoundError):
    from hypothesis import settings

    settings.register_profile("suite", deadline=None)
    settings.load_profile("suite")

LONG = ("megatron", "integration", "cuda_emulator", "run", "bench", "reduction")
"""Folders whose files take minutes: they start ranks, Megatron, Slurm or the emulator."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts by folder; `scripts/test.sh` hands out files in this order."""
    tests = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(tests).parts[0]
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=place)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
