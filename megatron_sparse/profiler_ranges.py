"""Named ranges around the stages, for torch.profiler and Nsight Systems.

`torch.profiler.record_function` takes several microseconds even when no profiler runs, and every
bucket has half a dozen stages. So a range is opened only while a profiler is on: ours
(`tracking.profile_iters`), Megatron's or the user's. The check takes 0.05 microseconds. NVTX offers
no such check, and torch's own NVTX ranges cover one thread only, so `tracking.nvtx` is a switch.

Ranges are named `megatron_sparse/<stage>`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.profiler as torch_profiler

from megatron_sparse.errors import ConfigError

PREFIX = "megatron_sparse/"

_nvtx = False


def mark_nvtx(wanted: bool) -> None:
    """Switches NVTX ranges on or off, for the whole process.

    Raises:
        ConfigError: this PyTorch has no NVTX.
    """
    global _nvtx
    if wanted and not torch.cuda.is_available():
        raise ConfigError(
            "tracking.nvtx=true without a GPU",
            expected="a CUDA device, whose ranges Nsight Systems records",
            got="none",
            remedy="set tracking.nvtx=false; tracking.profile_iters works on a CPU",
        )
    _nvtx = wanted


class Range:
    """An open range of the current thread; `end` closes it, on the same thread."""

    __slots__ = ("_nvtx", "_recorded")

    def __init__(self, name: str, recorded: bool, nvtx: bool) -> None:
        self._recorded: Any = torch_profiler.record_function(PREFIX + name) if recorded else None
        self._nvtx = nvtx
        if nvtx:
            torch.cuda.nvtx.range_push(PREFIX + name)
        if self._recorded is not None:
            self._recorded.__enter__()

    def end(self) -> None:
        """Closes the range."""
        if self._recorded is not None:
            self._recorded.__exit__(None, None, None)
        if self._nvtx:
            torch.cuda.nvtx.range_pop()


def profiler_is_on() -> bool:
    """Whether any profiler of torch runs in this process."""
    # Every profiler of torch sets this flag when it starts and stops, for all threads. The public
    # check covers the calling thread only, and buckets have a thread of their own.
    return torch_profiler._is_profiler_enabled


def open_range(name: str) -> Range | None:
    """Opens a range if a profiler is on, else returns None. The caller ends it."""
    recorded = profiler_is_on()
    return Range(name, recorded, _nvtx) if recorded or _nvtx else None


@contextmanager
def marked(name: str) -> Iterator[None]:
    """`open_range` around the `with` body."""
    opened = open_range(name)
    try:
        yield
    finally:
        if opened is not None:
            opened.end()
