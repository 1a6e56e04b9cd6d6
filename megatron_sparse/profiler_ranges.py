"""Named ranges around the stages, for whoever profiles: torch.profiler and Nsight Systems.

`torch.profiler.record_function` takes several microseconds even when no profiler runs, and every
bucket has half a dozen stages. So a range is opened only while a profiler is on, ours
(`tracking.profile_iters`), Megatron's or the user's; asking costs a twentieth of a microsecond.
NVTX has no such question to ask, and torch's own NVTX ranges are those of one thread: ours are a
switch, `tracking.nvtx`.

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
    """Opens NVTX ranges too from now on, or no more; for the whole process.

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
        """Closes it."""
        if self._recorded is not None:
            self._recorded.__exit__(None, None, None)
        if self._nvtx:
            torch.cuda.nvtx.range_pop()


def profiler_is_on() -> bool:
    """Whether a profiler of torch runs in this process, whoever started it."""
    # Set by every profiler of torch when it starts and stops, for all threads; torch's public
    # question answers for the asking thread alone, and buckets have a thread of their own.
    return torch_profiler._is_profiler_enabled


def open_range(name: str) -> Range | None:
    """Opens a range if somebody looks, else returns None. The caller ends it."""
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
