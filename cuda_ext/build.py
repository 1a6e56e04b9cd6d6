"""Builds the native libraries: one plain `.so` for the CPU, one for CUDA.

    python -m megatron_sparse.cuda_ext.build [--cuda auto|on|off] [--out DIR] [--verbose]
        [--sanitize]

`setup.py` runs it when the package is installed; `megatron_sparse.cuda_ext.load` runs it when a
library is missing or older than its sources. Both libraries use torch's stable ABI and hold no
Python symbols. They load in torch 2.11 and later, whatever version built them. Kernels include no
torch headers, which nvcc thus need not compile; other sources bind the kernels to torch.

A library is rebuilt when its sources or its flags changed; its stamp, a file beside it, records
their hash. In strict mode (MEGATRON_SPARSE_STRICT) a library that cannot be built, and a CUDA
kernel that spills registers to memory, are errors. Importing this needs the standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_sparse.cuda_ext import ptxas, sources
from megatron_sparse.cuda_ext.toolchain import CudaToolkit, find_cuda, find_cxx, find_torch
from megatron_sparse.errors import ConfigError, DependencyError, ExtensionError, MegatronSparseError

type CudaChoice = Literal["auto", "on", "off"]

STRICT = "MEGATRON_SPARSE_STRICT"
INCLUDE = f"-I{sources.SOURCES}"
LINK = ("-shared", "-Wl,--exclude-libs,ALL")
"""Of a library. If a compiler puts libstdc++ into it, this copy must not mix with torch's: numbers
in error texts were lost, or crashed."""

LOCK = ".lock"
BYTES_OF_A_COMPILER = 2 * 2**30
"""The most memory that one compiler takes, about."""


@dataclass(frozen=True)
class Part:
    """The outcome of building one library.

    Attributes:
        name: `cpu` or `cuda`.
        path: where it is, or would be.
        state: `built`, `up to date` or `left out`.
        reason: why it was left out, or how it was built.
    """

    name: str
    path: Path
    state: Literal["built", "up to date", "left out"]
    reason: str

    def __str__(self) -> str:
        return f"megatron_sparse {self.name} library: {self.state} ({self.reason})"


def is_strict() -> bool:
    """Whether a part that cannot be built, or spills, is an error: MEGATRON_SPARSE_STRICT=1."""
    return os.environ.get(STRICT, "") not in ("", "0")


def build(
    cuda: CudaChoice = "auto",
    out: Path = sources.LIBRARIES,
    *,
    verbose: bool = False,
    parts: Sequence[str] = ("cpu", "cuda"),
    sanitize: bool = False,
) -> list[Part]:
    """Builds missing and outdated libraries, under a file lock: several ranks may call it at once.

    Args:
        cuda: `auto` leaves the CUDA library out where it cannot be built; `on` makes that an
            error; `off` leaves it out.
        out: the folder of the libraries; made if it is not there.
        verbose: print every command.
        parts: which libraries, of `cpu` and `cuda`.
        sanitize: build the CPU library under the address and undefined behaviour sanitizers, for
            `scripts/fuzz.sh`; not into the folder from which `load` loads.

    Returns:
        The outcome for each part.

    Raises:
        DependencyError: a compiler or torch is missing, for a part that is not optional.
        ExtensionError: a compiler failed, or `out` cannot be written.
        ConfigError: `sanitize` into the folder of the libraries that are used.
    """
    if sanitize and out == sources.LIBRARIES:
        raise ConfigError(
            "a sanitized library cannot be loaded by Python as it is",
            expected="another folder for it",
            got=out,
            remedy="name one with --out",
        )
    outcomes: list[Part] = []
    with locked(out):
        if "cpu" in parts:
            outcomes.append(_build_cpu(out, verbose, sources.SANITIZE if sanitize else ()))
        if "cuda" in parts:
            outcomes.append(_build_cuda(out, verbose, cuda))
    return outcomes


def _build_cpu(out: Path, verbose: bool, extra: tuple[str, ...] = ()) -> Part:
    """Compiles and links the CPU library unless it is current; `extra` flags go to every command.

    `CPU_KERNELS` is compiled once for each instruction set; the other sources, which bind the
    kernels to torch, are compiled once.
    """
    target = sources.library_path("cpu", out)
    if sources.is_current("cpu", out):
        return Part("cpu", target, "up to date", "the same sources and flags")
    torch_root, version = find_torch()
    cxx = find_cxx()
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        compiler = [cxx, *sources.CXX_FLAGS, *extra]
        if sources.IS_X86:
            compiler.append("-DMS_X86")
        torch_include = ["-isystem", torch_root / "include"]  # for the bindings only
        binding_command = [*compiler, sources.TORCH_TARGET, INCLUDE, *torch_include]
        # A job: a command, and the object file that it makes.
        jobs = [
            ([*binding_command, "-c", source], Path(folder) / f"{source.name}.o")
            for source in sources.CPU_BINDINGS
        ]
        kernel_source = [INCLUDE, "-c", sources.CPU_KERNELS]
        for isa, (lanes, flags) in sources.ISAS.items():
            if flags and not sources.IS_X86:
                continue  # instruction sets with flags of their own exist on x86 only
            command = [*compiler, "-Wno-psabi", *flags, f"-DMS_ISA={isa}", f"-DMS_WIDTH={lanes}"]
            jobs.append(([*command, *kernel_source], Path(folder) / f"{isa}.o"))
        compile_all(jobs, verbose)
        linked = Path(folder) / target.name
        objects = [path for _, path in jobs]
        libraries = [f"-L{torch_root / 'lib'}", "-ltorch_cpu"]
        run([cxx, *LINK, *extra, *objects, *libraries, "-o", linked], verbose)
        install(linked, target, {"sources": sources.source_hash("cpu"), "torch": version})
    seconds = time.perf_counter() - start_s
    return Part("cpu", target, "built", f"{cxx}, torch {version}, {seconds:.0f} s")


def _build_cuda(out: Path, verbose: bool, choice: CudaChoice) -> Part:
    """Compiles and links the CUDA library unless it is current or left out; see `build`.

    nvcc compiles the kernels, the C++ compiler the code that binds them to torch.
    """
    target = sources.library_path("cuda", out)
    if choice == "off":
        return Part("cuda", target, "left out", "not asked for")
    if sources.is_current("cuda", out):
        return Part("cuda", target, "up to date", "the same sources and flags")
    try:
        torch_root, version = find_torch()
        toolkit = find_cuda()
        cxx = find_cxx()
        if not (torch_root / "lib" / "libtorch_cuda.so").is_file():
            raise DependencyError(
                "this torch was built without CUDA",
                expected="a CUDA build of torch",
                got=f"torch {version}",
                remedy="install one, or build with --cuda off",
            )
    except DependencyError as error:
        if choice == "on" or is_strict():
            raise
        return Part("cuda", target, "left out", f"{error.what}: {error.remedy}")
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        kernels = _kernel_jobs(toolkit, cxx, Path(folder))
        compiler = [cxx, *sources.CXX_FLAGS, sources.TORCH_TARGET, "-DUSE_CUDA", INCLUDE]
        includes = ["-isystem", torch_root / "include", "-isystem", toolkit.home / "include"]
        bindings = []
        for unit in sources.CUDA_BINDINGS:
            source = sources.SOURCES / f"{unit}_cuda.cpp"
            bindings.append(([*compiler, *includes, "-c", source], Path(folder) / f"{unit}_cuda.o"))
        reports = compile_all([*kernels, *bindings], verbose)
        if is_strict():  # else a spill, which makes a kernel slower but not wrong, is accepted
            for report in reports[: len(kernels)]:  # those of nvcc; the C++ compiler reports none
                ptxas.refuse_spills(ptxas.read_report(report))
        linked = Path(folder) / target.name
        objects = [path for _, path in kernels + bindings]
        libraries = [f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-ltorch_cuda", f"-L{toolkit.lib}"]
        libraries += ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        run([cxx, *LINK, *objects, *libraries, "-o", linked], verbose)
        install(linked, target, {"sources": sources.source_hash("cuda"), "torch": version})
    archs = " ".join(f"sm_{arch}" for arch in sources.CUDA_ARCHS)
    seconds = time.perf_counter() - start_s
    return Part("cuda", target, "built", f"{toolkit.nvcc}, {archs}, {seconds:.0f} s")


def compile_report() -> dict[str, list[ptxas.Compiled]]:
    """Compiles the CUDA kernels, and keeps only ptxas's report on the kernels of each `.cu` file.

    Raises:
        DependencyError: nvcc or the C++ compiler is missing.
        ExtensionError: a compiler failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        jobs = _kernel_jobs(find_cuda(), find_cxx(), Path(folder))
        reports = compile_all(jobs, verbose=False)
    return {
        unit: ptxas.read_report(report)
        for unit, report in zip(sources.CUDA_UNITS, reports, strict=True)
    }


def _kernel_jobs(toolkit: CudaToolkit, cxx: str, folder: Path) -> list[tuple[list[object], Path]]:
    """Jobs for `compile_all`: of each .cu file nvcc's command and the object file to make."""
    nvcc = [toolkit.nvcc, "-ccbin", cxx, *sources.NVCC_FLAGS]
    nvcc += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-ffp-contract=off", INCLUDE]
    return [
        ([*nvcc, "-c", sources.SOURCES / f"{unit}.cu"], folder / f"{unit}.o")
        for unit in sources.CUDA_UNITS
    ]


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Lets one process at a time build in `out`, by a file lock that ends with the process."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / LOCK, "w")  # noqa: SIM115 - closed below, after the lock is released
    except OSError as error:
        raise ExtensionError(
            "the folder of the native libraries cannot be written",
            expected="a writable folder",
            got=error,
            remedy="run python -m megatron_sparse.cuda_ext.build once as the folder's owner",
        ) from error
    with lock:
        # Without file locks several processes build at once, which renames in `install` make safe.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_all(jobs: Sequence[tuple[list[object], Path]], verbose: bool) -> list[str]:
    """Runs the compilers, as many at a time as there are cores and memory for.

    A job is the compiler's command, without `-o`, and the object file to make. Returns what each
    compiler printed, in the order of the jobs.

    Raises:
        ExtensionError: a compiler failed; jobs that have not begun are cancelled.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    workers = max(min(len(os.sched_getaffinity(0)), memory_bytes // BYTES_OF_A_COMPILER), 1)
    with ThreadPoolExecutor(max_workers=workers) as pool:
        running = [pool.submit(run, [*command, "-o", path], verbose) for command, path in jobs]
        try:
            return [future.result() for future in running]
        except ExtensionError:
            pool.shutdown(cancel_futures=True)
            raise


def run(command: Sequence[object], verbose: bool) -> str:
    """Runs one command and returns what it printed.

    Raises:
        ExtensionError: it failed.
    """
    words = [str(word) for word in command]
    if verbose:
        print(shlex.join(words), flush=True)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if verbose and output.strip():
        print(output.rstrip(), flush=True)
    if done.returncode:
        raise ExtensionError(
            f"{Path(words[0]).name} failed with exit code {done.returncode}",
            expected=shlex.join(words),
            got="\n".join(output.strip().splitlines()[:20]),
            remedy="see the first error above; --verbose prints every command",
        )
    return output


def install(linked: Path, target: Path, stamp: dict[str, str]) -> None:
    """Installs the linked library as `target` and its stamp beside it, each by an atomic rename.

    Other processes, which may be loading the library, thus never see half a file.

    Raises:
        ExtensionError: the files cannot be written, for example for lack of room.
    """
    # Written to the target's folder first, under names that no other process uses.
    suffix = f"{socket.gethostname()}.{os.getpid()}.new"
    new_library = target.with_name(f".{target.name}.{suffix}")
    new_stamp = target.with_name(f".{target.name}.stamp.{suffix}")
    try:
        shutil.copy(linked, new_library)
        new_stamp.write_text(json.dumps(stamp))
        os.replace(new_library, target)  # first: until its own stamp follows, it counts as outdated
        os.replace(new_stamp, target.with_name(f"{target.name}.stamp"))
    except OSError as error:
        new_library.unlink(missing_ok=True)
        new_stamp.unlink(missing_ok=True)
        raise ExtensionError(
            "the native library cannot be put in place",
            expected=f"room in {target.parent}",
            got=error,
        ) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_sparse.cuda_ext.build",
        description="Builds the native libraries of megatron_sparse.",
    )
    parser.add_argument("--cuda", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--out", type=Path, default=sources.LIBRARIES, metavar="DIR")
    parser.add_argument("--verbose", action="store_true", help="print every command")
    parser.add_argument(
        "--sanitize", action="store_true", help="the CPU library for scripts/fuzz.sh; needs --out"
    )
    chosen = parser.parse_args(arguments)
    try:
        for part in build(
            chosen.cuda, chosen.out.resolve(), verbose=chosen.verbose, sanitize=chosen.sanitize
        ):
            print(part, flush=True)
    except MegatronSparseError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def build_for_install(out: Path) -> list[Part]:
    """Builds the libraries for `setup.py`; leaves out one that cannot be built.

    The package is usable all the same, because a missing library is built on first use.

    Raises:
        ConfigError: MEGATRON_SPARSE_CUDA is none of auto, on, off.
        MegatronSparseError: a library cannot be built in strict mode, or CUDA's with `on`.
    """
    cuda = os.environ.get("MEGATRON_SPARSE_CUDA", "auto")
    if cuda not in ("auto", "on", "off"):
        raise ConfigError("MEGATRON_SPARSE_CUDA is unknown", expected="auto | on | off", got=cuda)
    outcomes = []
    for name in ("cpu", "cuda"):
        try:
            outcomes += build(cuda, out, parts=(name,))
        except (DependencyError, ExtensionError) as error:
            if is_strict() or (name == "cuda" and cuda == "on"):
                raise
            reason = f"{error.what}; the first use builds it"
            outcomes.append(Part(name, sources.library_path(name, out), "left out", reason))
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
