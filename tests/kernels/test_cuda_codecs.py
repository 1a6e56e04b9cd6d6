"""The CUDA codecs as nvcc sees them: no spills, few registers, wide loads, bindings that load.

What they compute is tested on the CPU, in tests/cuda_emulator, and where there is a GPU below.
`pytest -rP tests/kernels/test_cuda_codecs.py` prints the compile report of docs/gpu-results.md.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megatron_sparse import cuda_ext
from megatron_sparse.cuda_ext import build
from megatron_sparse.errors import DependencyError
from megatron_sparse.reference import prune as prune_oracle
from tests.cuda_emulator.codec_cases import EPOCH, capacity_of, gradient, record
from tests.cuda_emulator.emulated import BLOCKS, COO, DENSE, DTYPE_CODES, PICI, PICI_PAPER

UNITS = ("encode", "prune_encode", "decode")
MAX_REGISTERS = 64  # so that 4 blocks of 256 threads are resident: 65536 / 1024
MAX_SHARED_BYTES = 24 << 10  # 4 of them leave room on sm_80's 164 KiB and an L1 cache beside


def has_nvcc() -> bool:
    try:
        build.find_cuda()
    except DependencyError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(
    not has_nvcc(), reason="nvcc is nowhere: not in CUDA_HOME, PATH or PyPI's"
)


@dataclass(frozen=True)
class Compiled:
    """What ptxas says of one kernel."""

    kernel: str
    arch: str
    registers: int
    shared_bytes: int
    spill_bytes: int


def compile_unit(unit: str, archs: tuple[int, ...], target: Path) -> list[Compiled]:
    """Compiles one .cu and reads the report of `ptxas -v`."""
    toolkit = build.find_cuda()
    command = [
        toolkit.nvcc, "-ccbin", build.find_cxx(), "-O3", "-std=c++17", "-DNDEBUG", "--fmad=false",
        "-Xptxas", "-v", "-Xcompiler", "-fPIC",
        *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs),
        f"-I{build.SOURCES}", "-c", build.SOURCES / f"{unit}.cu", "-o", target,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = done.stdout + done.stderr
    found = re.findall(
        r"Compiling entry function '(\w+)' for '(sm_\d+)'.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers(.*?)\n",
        report,
        re.DOTALL,
    )
    return [
        Compiled(
            kernel, arch, int(registers),
            int((re.search(r"(\d+) bytes smem", rest) or [0, 0])[1]), int(stores) + int(loads),
        )
        for kernel, arch, stores, loads, registers, rest in found
    ]  # fmt: skip


def family(kernel: str) -> str:
    """The kernel's function and, of compaction, its source, out of a mangled name."""
    name = re.search(r"\d+([a-z_]+_kernel)", kernel)
    source = re.search(r"\d+([A-Z][a-zA-Z]+Source)", kernel)
    assert name is not None, kernel
    return name[1] + (f"<{source[1]}>" if source else "")


def check_report(unit: str, kernels: list[Compiled], archs: tuple[int, ...]) -> None:
    assert {k.arch for k in kernels} == {f"sm_{arch}" for arch in archs}
    for name in sorted({family(k.kernel) for k in kernels}):
        for arch in archs:
            group = [k for k in kernels if family(k.kernel) == name and k.arch == f"sm_{arch}"]
            registers = sorted({k.registers for k in group})
            print(
                f"{unit:13} {name:34} sm_{arch:<4} instances {len(group):3}  registers "
                f"{registers[0]}-{registers[-1]}  shared {max(k.shared_bytes for k in group)} B  "
                f"spills {sum(k.spill_bytes for k in group)} B"
            )
    for kernel in kernels:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.registers <= MAX_REGISTERS, kernel
        assert kernel.shared_bytes <= MAX_SHARED_BYTES, kernel


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Compiled]]]:
    """Every unit for sm_90: the object files' folder and the reports."""
    folder = tmp_path_factory.mktemp("cuda")
    return folder, {unit: compile_unit(unit, (90,), folder / f"{unit}.o") for unit in UNITS}


@needs_nvcc
@pytest.mark.parametrize("unit", UNITS)
def test_no_spills_on_hopper(objects: tuple[Path, dict[str, list[Compiled]]], unit: str) -> None:
    check_report(unit, objects[1][unit], (90,))


@needs_nvcc
@pytest.mark.slow  # a minute for prune_encode alone
@pytest.mark.parametrize("unit", UNITS)
def test_no_spills_anywhere(unit: str, tmp_path: Path) -> None:
    check_report(unit, compile_unit(unit, build.CUDA_ARCHS, tmp_path / "unit.o"), build.CUDA_ARCHS)


@needs_nvcc
def test_compaction_moves_16_bytes_at_a_time(
    objects: tuple[Path, dict[str, list[Compiled]]],
) -> None:
    """Seen in the machine code, which also shows spills to local memory."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    tool = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for unit in ("encode", "prune_encode"):
        dump = subprocess.run(
            [tool, "-sass", objects[0] / f"{unit}.o"], capture_output=True, text=True, check=True
        ).stdout
        functions = re.split(r"Function : ", dump)[1:]
        compaction = [text for text in functions if "compact_kernel" in text.split("\n", 1)[0]]
        assert compaction
        for text in compaction:
            assert "LDG.E.128" in text
            # The gradient goes on to shared memory; a residual is written back.
            assert ("STG.E.128" in text) == (unit == "prune_encode")
            assert "STL" not in text
            assert "LDL" not in text


@needs_nvcc
def test_bindings_load_and_register(
    objects: tuple[Path, dict[str, list[Compiled]]], tmp_path: Path
) -> None:
    """In a process of its own, which would otherwise keep the ops."""
    torch_root, _ = build.find_torch()
    if not (torch_root / "lib" / "libtorch_cuda.so").is_file():
        pytest.skip("this torch was built without CUDA")
    toolkit = build.find_cuda()
    bindings = []
    for unit in UNITS:
        bindings.append(tmp_path / f"{unit}_cuda.o")
        command = [
            build.find_cxx(), "-O1", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall",
            "-Wextra", "-Werror", "-DTORCH_TARGET_VERSION=0x020b000000000000ULL", "-DUSE_CUDA",
            f"-I{build.SOURCES}", "-isystem", torch_root / "include", "-isystem",
            toolkit.home / "include", "-c", build.SOURCES / f"{unit}_cuda.cpp", "-o", bindings[-1],
        ]  # fmt: skip
        subprocess.run(command, check=True)
    library = tmp_path / "codecs_cuda.so"
    link = [
        build.find_cxx(), "-shared", *bindings, *(objects[0] / f"{unit}.o" for unit in UNITS),
        f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-ltorch_cuda", f"-L{toolkit.lib}",
        "-lcudart_static", "-ldl", "-lrt", "-lpthread", "-o", library,
    ]  # fmt: skip
    subprocess.run(link, check=True)
    program = f"""
import torch
torch.ops.load_library({str(library)!r})
for name in ("encode_records", "prune_encode_records", "decode_add_"):
    print(torch._C._dispatch_has_kernel_for_dispatch_key("megatron_sparse::" + name, "CUDA"))
for name in ("encode_records", "prune_encode_records"):
    print(len(getattr(torch.ops.megatron_sparse, name).default._schema.returns))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True", "True", "3", "3"], done.stderr


# ---- on a GPU ----

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
SEGMENTS = [0, 0, 1, 4097, 400_000, 400_007, 1_000_003]
KINDS = [COO, PICI, PICI_PAPER, PICI, BLOCKS, COO]


def on_gpu(*values: object, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="cuda")


def split(out: torch.Tensor, sizes: torch.Tensor) -> list[bytes]:
    data = bytes(out.cpu().numpy().tobytes())
    ends = sizes.cumsum(0).tolist()
    return [data[a:b] for a, b in pairwise([0, *ends])]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("density", [0.001, 0.05, 1.0])
@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
def test_encode_and_decode_on_the_device(dtype: torch.dtype, density: float) -> None:
    cuda_ext.load("cuda")
    values_N = gradient(SEGMENTS[-1], density, dtype)
    offsets = on_gpu(*SEGMENTS, dtype=torch.int64)
    out = torch.zeros(capacity_of(SEGMENTS, dtype), dtype=torch.uint8, device="cuda")
    sizes, nnz, status = torch.ops.megatron_sparse.encode_records(
        values_N.cuda(), offsets, on_gpu(*KINDS, dtype=torch.uint8), DTYPE_CODES[dtype], EPOCH, 64,
        out,
    )  # fmt: skip
    assert status.tolist() == [0, 0, 0, 0]
    assert nnz.tolist() == [int((values_N[a:b] != 0).sum()) for a, b in pairwise(SEGMENTS)]
    wanted = [
        record(values_N[a:b], kind, dtype, a, 64)
        for (a, b), kind in zip(pairwise(SEGMENTS), KINDS, strict=True)
    ]
    assert split(out, sizes.cpu()) == wanted
    acc = torch.ones(SEGMENTS[-1], device="cuda")
    message = out[: int(sizes.sum())]
    status = torch.ops.megatron_sparse.decode_add_(
        acc, message, offsets, DTYPE_CODES[dtype], EPOCH, 0
    )
    assert status.tolist() == [0, 0, 0, 0]
    torch.testing.assert_close(acc.cpu(), 1 + values_N.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prune_encode_on_the_device(residual_dtype: torch.dtype, shift: int) -> None:
    cuda_ext.load("cuda")
    grad_N = gradient(SEGMENTS[-1], 1.0, torch.float32)
    residual_N = torch.randn(len(grad_N), generator=torch.Generator().manual_seed(1))
    residual_N = residual_N.to(residual_dtype)
    ranges, thresholds = [0, 300_001, SEGMENTS[-1]], [1.5, 2.5]
    pruned_N, rest_N, _ = prune_oracle.prune(
        grad_N, residual_N, torch.tensor(ranges), torch.tensor(thresholds), 0.9, 1, 5
    )
    held = torch.zeros(len(grad_N) + shift, device="cuda")[shift:].copy_(grad_N)
    rest = torch.zeros(len(grad_N) + shift, dtype=residual_dtype, device="cuda")[shift:]
    rest.copy_(residual_N)
    out = torch.zeros(capacity_of(SEGMENTS, torch.bfloat16), dtype=torch.uint8, device="cuda")
    kinds = [DENSE, *KINDS[1:]]
    sizes, _, status = torch.ops.megatron_sparse.prune_encode_records(
        held, rest, on_gpu(*ranges, dtype=torch.int64), on_gpu(*thresholds, dtype=torch.float32),
        0.9, 5, on_gpu(*SEGMENTS, dtype=torch.int64), on_gpu(*kinds, dtype=torch.uint8), 1, EPOCH,
        64, out,
    )  # fmt: skip
    assert status.tolist() == [0, 0, 0, 0]
    wanted = [
        record(pruned_N[a:b], kind, torch.bfloat16, a, 64)
        for (a, b), kind in zip(pairwise(SEGMENTS), kinds, strict=True)
    ]
    assert split(out, sizes.cpu()) == wanted
    assert torch.equal(rest.cpu().view(torch.uint8), rest_N.view(torch.uint8))
