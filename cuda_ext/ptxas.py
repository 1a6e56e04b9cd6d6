"""ptxas's report on each CUDA kernel: registers, shared memory, spills.

The report is a hint at a kernel's speed that needs no GPU: a kernel that spills registers to memory
is slow, and the registers of a thread decide how many threads are resident.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_sparse.errors import ExtensionError

_KERNEL = re.compile(
    r"Compiling entry function '(\w+)' for '(sm_\d+)'.*?"
    r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers(.*?)\n",
    re.DOTALL,
)


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture; `kernel` is its mangled name."""

    kernel: str
    arch: str
    registers: int
    shared_bytes: int
    spill_bytes: int


def read_report(report: str) -> list[Compiled]:
    """Parses the output of `nvcc -Xptxas -v`: one `Compiled` for each kernel and architecture."""
    kernels = []
    for kernel, arch, stores, loads, registers, rest in _KERNEL.findall(report):
        shared = re.search(r"(\d+) bytes smem", rest)  # left out where it is 0
        shared_bytes = int(shared[1]) if shared else 0
        spill_bytes = int(stores) + int(loads)
        kernels.append(Compiled(kernel, arch, int(registers), shared_bytes, spill_bytes))
    return kernels


def refuse_spills(kernels: Iterable[Compiled]) -> None:
    """Makes a spill an error.

    Raises:
        ExtensionError: a kernel spills registers; names the first.
    """
    for kernel in kernels:
        if kernel.spill_bytes:
            raise ExtensionError(
                "a CUDA kernel spills registers",
                expected="0 bytes of spills",
                got=f"{kernel.spill_bytes} bytes in {kernel.kernel} for {kernel.arch}",
                remedy="lower the resident blocks in the kernel's __launch_bounds__",
            )
