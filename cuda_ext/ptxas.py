"""ptxas's report on each CUDA kernel: registers, shared memory, spills.

    python -m megatron_sparse.cuda_ext.build --ptxas

The report is a hint at a kernel's speed that needs no GPU: a kernel that spills registers to memory
is slow, and the registers of a thread decide how many threads are resident.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

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

    @property
    def family(self) -> str:
        """The function's name and, for compaction, its source's; no other template argument.

        A mangled name has the length before each name, which the patterns skip.
        """
        name = re.search(r"\d+([a-z_]+_kernel)", self.kernel)
        source = re.search(r"\d+([A-Z][a-zA-Z]+Source)", self.kernel)
        assert name is not None, f"a kernel's name ends in _kernel: {self.kernel}"
        return name[1] + (f"<{source[1]}>" if source else "")


def read_report(report: str) -> list[Compiled]:
    """The kernels in the output of `nvcc -Xptxas -v`."""
    kernels = []
    for kernel, arch, stores, loads, registers, rest in _KERNEL.findall(report):
        shared = re.search(r"(\d+) bytes smem", rest)  # not there for a kernel without any
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


def table(unit: str, kernels: Iterable[Compiled]) -> list[str]:
    """A line for each family of kernels of one source and each architecture."""

    def key(kernel: Compiled) -> tuple[str, int]:
        """The family and the number of the architecture, by which lines are grouped and ordered."""
        return kernel.family, int(kernel.arch[3:])

    lines = []
    for (family, arch), members in groupby(sorted(kernels, key=key), key):
        group = list(members)
        registers = sorted({kernel.registers for kernel in group})
        lines.append(
            f"{unit:13} {family:28} sm_{arch:<4} instances {len(group):3}  registers "
            f"{registers[0]}-{registers[-1]}  shared {max(k.shared_bytes for k in group)} B  "
            f"spills {sum(k.spill_bytes for k in group)} B"
        )
    return lines
