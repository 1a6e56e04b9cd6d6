"""Named ranges around the stages, for torch.profiler and Nsight Systems.

`torch.profiler.record_function` takes several microseconds even when no profiler runs, and every
bucket has half a dozen stages. So a range is opened only while a profiler is on: ours
(`tracking.profile_iters`), Megatron's or the user's. The check takes 0.05 microseconds.

For Nsight Systems torch turns ranges into NVTX ranges (`emit_nvtx`, which `megatron.profile=true`
opens), but only on the thread that has the profiler on. This module opens them on other threads.

Ranges are named `megatron_sparse/<stage>`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.autograd.profiler as torch_profiler

PREFIX = "megatron_sparse/"

_NOTHING = nullcontext()


def profiler_is_on() -> bool:
    """Whether any profiler of torch runs in this process."""
    # Every profiler of torch sets this flag when it starts and stops, for all threads. The public
    # check covers the calling thread only, and buckets have a thread of their own.
    return torch_profiler._is_profiler_enabled


def marked(name: str) -> AbstractContextManager[object]:
    """A range around the `with` body, on one thread, if a profiler is on; else it does nothing."""
    return _range(PREFIX + name) if profiler_is_on() else _NOTHING


@contextmanager
def _range(name: str) -> Iterator[None]:
    """Opens a range of torch's profiler; adds an NVTX range if this thread's profiler is off."""
    is_on_here = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    needs_nvtx = torch.cuda.is_available() and not is_on_here
    with (
        torch.cuda.nvtx.range(name) if needs_nvtx else _NOTHING,
        torch_profiler.record_function(name),
    ):
        yield
