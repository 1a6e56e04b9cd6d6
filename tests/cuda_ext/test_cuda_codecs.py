"""The compiled CUDA library: no spills, few registers, wide loads; its ops, without a GPU.

tests/cuda_emulator tests the results of the ops, emulated and, if there is one, on a GPU.
"""

import re

import pytest
import torch

from megatron_sparse.cuda_ext import build, load, ops, sources
from megatron_sparse.cuda_ext.record_spec import Expected, RecordSpec
from megatron_sparse.errors import DependencyError
from tests.codec import segments_of
from tests.cuda_emulator.instructions import tool
from tests.cuda_ext import cases
from tests.programs import ended

LIMITS = {
    "PruneSource": (80, 33),  # three blocks are resident
    "GradSource": (64, 33),
    "rice_whole_kernel": (80, 25),
    "rice_once_kernel": (80, 45),
    "Lb0ELi1EEEvNS_11DecodeBatch": (80, 25),  # sums of one message in place: three blocks
    "sum_kernel": (64, 40),  # four blocks fit sm_80's 164 KiB
    "": (64, 25),  # four blocks of 256 threads, and room for an L1 cache beside their memory
}
"""Registers of a thread and KiB of shared memory, at most, by a part of a kernel's name; the first
part that it has counts."""


def can_build() -> bool:
    try:
        toolkit = build.find_cuda()
        torch_root, _ = build.find_torch()
    except DependencyError:
        return False
    return toolkit.nvcc.is_file() and (torch_root / "lib" / "libtorch_cuda.so").is_file()


needs_nvcc = pytest.mark.skipif(
    not can_build(), reason="no nvcc in CUDA_HOME, PATH or PyPI's packages, or torch without CUDA"
)


@pytest.mark.slow  # half a minute: it compiles every kernel for every architecture
@needs_nvcc
def test_registers_and_shared_memory() -> None:
    reports = build.compile_report()
    assert list(reports) == list(sources.CUDA_UNITS)
    assert reports.pop("nccl_sum") == [], "it launches the other units' kernels"
    for kernels in reports.values():
        assert {kernel.arch for kernel in kernels} == {f"sm_{arch}" for arch in sources.CUDA_ARCHS}
        for kernel in kernels:
            assert kernel.spill_bytes == 0, kernel
            registers, kib = next(most for name, most in LIMITS.items() if name in kernel.kernel)
            assert kernel.registers <= registers, kernel
            assert kernel.shared_bytes <= kib << 10, kernel


def machine_code() -> list[str]:
    """The functions of the CUDA library for sm_90; the first line of each is its name."""
    load("cuda")
    library = sources.library_path("cuda")
    command = [tool("cuobjdump"), "-sass", "-arch", "sm_90", library]
    dump = ended(command, None, check=True).stdout
    return re.split(r"Function : ", dump)[1:]


@needs_nvcc
def test_registers_stay_registers_and_sums_move_16_bytes_at_a_time() -> None:
    """Checks the machine code, which also shows spills to local memory."""
    functions = machine_code()
    compaction = [text for text in functions if "compact_kernel" in text.split("\n", 1)[0]]
    assert len(compaction) == 3 + 28
    # Sums that start from zero are written once: 16 bytes at a time or, unaligned, 4.
    sums = [text for text in functions if "10sum_kernel" in text.split("\n", 1)[0]]
    fresh = [text for text in sums if "Lb1E" in text.split("\n", 1)[0]]
    assert len(sums) == 16
    assert len(fresh) == 8
    rice = [text for text in functions if "rice_kernel" in text.split("\n", 1)[0]]
    assert len(rice) == 6
    whole = [text for text in functions if "rice_whole_kernel" in text.split("\n", 1)[0]]
    assert len(whole) == 12
    once = [text for text in functions if "rice_once_kernel" in text.split("\n", 1)[0]]
    assert len(once) == 24
    for text in (*compaction, *sums, *rice, *whole, *once):
        assert "STL" not in text
        assert "LDL" not in text
    for text in (*whole, *once):  # four neighbours of fp32 or of bf16
        assert ("LDG.E.128" if "kernelILi0E" in text.split("\n", 1)[0] else "LDG.E.64") in text
    for text in fresh:  # through generic addresses: the pointers come from a table
        assert "ST.E.128" in text


@needs_nvcc
def test_the_library_registers_all_ops_for_cuda() -> None:
    load("cuda")
    bindings = "".join(path.read_text() for path in sources.SOURCES.glob("*_cuda.cpp"))
    names = re.findall(r'm\.impl\(\s*"(\w+)"', bindings)
    assert {"encode", "prune_encode", "decode_", "sample_threshold"} < {*names}
    for name in names:
        qualified = f"megatron_sparse::{name}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CUDA"), name


@needs_nvcc
def test_the_bindings_refuse_tensors_of_the_cpu() -> None:
    load("cuda")
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        torch.ops.megatron_sparse.nccl_sparse_sum(*[torch.zeros(9)] * 11, 0, 0, False)


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [2**20 + 17, 2**26 + 4097])
def test_large_messages_on_the_device(numel: int) -> None:
    """More tiles than resident blocks, so look-back waits; an emulated device hardly shows this."""
    grad_N = cases.pruned_grad(numel, 0.01, torch.float32)
    segments = segments_of([0, numel // 3, numel])
    offsets = segments.offsets
    nnz, capacity = cases.count_nonzero(grad_N, offsets), ops.message_capacity(offsets, 0)
    out, held = torch.zeros(capacity, dtype=torch.uint8), grad_N.cuda()
    got = torch.zeros(capacity, dtype=torch.uint8, device="cuda")
    for form in (1, 2):
        spec = RecordSpec(0, 5, record_format=form)
        sizes = ops.encode(grad_N, segments, nnz, spec, out)
        for _ in range(5):
            assert ops.encode(held, segments, None, spec, got).tolist() == sizes.tolist()
            used = int(sizes.sum())
            assert torch.equal(got[:used].cpu(), out[:used])
        acc_N = torch.full((numel,), torch.nan, device="cuda")
        ops.decode_add_(acc_N, got[:used], Expected(offsets, 0, 5, rank=0), 0, fresh=True)
        torch.testing.assert_close(acc_N.cpu(), grad_N, rtol=0, atol=0, equal_nan=True)
