"""Named ranges around the stages, for torch.profiler and Nsight Systems.

`torch.profiler.record_function` takes several microseconds even when no profiler runs, and every
bucket has half a dozen stages. So a range is opened only while a profiler is on: ours
(`tracking.profile_iters`), Megatron's or the user's. The check takes 0.05 microseconds. NVTX offers
no such check, and torch's own NVTX ranges cover one thread only, so `tracking.nvtx` is a switch.

Ranges are named `megatron_sparse/<stage>`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.autograd.profiler as torch_profiler

from megatron_sparse.errors import ConfigError

PREFIX = "megatron_sparse/"

_nvtx = False
_NOTHING = nullcontext()


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


def profiler_is_on() -> bool:
    """Whether any profiler of torch runs in this process."""
    # Every profiler of torch sets this flag when it starts and stops, for all threads. The public
    # check covers the calling thread only, and buckets have a thread of their own.
    return torch_profiler._is_profiler_enabled


def marked(name: str) -> AbstractContextManager[object]:
    """A range around the `with` body, on one thread, if a profiler is on; else it does nothing."""
    recorded = profiler_is_on()
    return _range(PREFIX + name, recorded) if recorded or _nvtx else _NOTHING


@contextmanager
def _range(name: str, recorded: bool) -> Iterator[None]:
    with (
        torch.cuda.nvtx.range(name) if _nvtx else _NOTHING,
        torch_profiler.record_function(name) if recorded else _NOTHING,
    ):
        yield
