"""Builds the native libraries: one plain `.so` for the CPU, one for CUDA.

    python -m megatron_sparse.cuda_ext.build [--cuda auto|on|off] [--out DIR] [--verbose]
        [--ptxas | --sanitize]

`setup.py` runs it when the package is installed; `megatron_sparse.cuda_ext.load` runs it when a
library is missing or older than its sources. Both libraries use torch's stable ABI, hold no Python
symbols, and load in torch 2.11 and later, whichever they were built with. Kernels are free of torch
headers, so that nvcc sees none of them.

A library is rebuilt when its sources, its flags or the version of torch changed; a stamp beside it
says what it was built from. Only the standard library is needed to import this module.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_sparse.cuda_ext import ptxas
from megatron_sparse.cuda_ext.toolchain import CudaToolkit, find_cuda, find_cxx, find_torch
from megatron_sparse.errors import ConfigError, DependencyError, ExtensionError, MegatronSparseError

type CudaChoice = Literal["auto", "on", "off"]

SOURCES = Path(__file__).resolve().parent / "csrc"
LIBRARIES = Path(__file__).resolve().parent / "_lib"
LOCK = ".lock"
STRICT = "MEGATRON_SPARSE_STRICT"
CUDA_ARCHS = (80, 90, 100)

_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000ULL"  # 2.11: a byte for each part
_COMMON = ("-O3", "-std=c++17", "-DNDEBUG")
# Without contraction: a fused multiply-add would round differently on each instruction set.
_HOST = (*_COMMON, "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra")
_SANITIZE = (
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g",
    "-O1",
)  # fmt: skip
_CPU_BINDINGS = (
    "library.cpp", "isa.cpp", "prune.cpp", "threshold.cpp", "encode.cpp", "prune_encode.cpp",
    "place.cpp", "decode.cpp", "decode_records.cpp",
    "hash_partition.cpp", "hash_partition_hierarchical.cpp", "hash_bitmap.cpp", "row_sparse.cpp",
)  # fmt: skip
# Instruction sets that kernels_isa.cpp is compiled for: fp32 lanes and flags.
_ISAS: dict[str, tuple[int, tuple[str, ...]]] = {
    "portable": (4, ()),
    "avx2": (8, ("-mavx2",)),
    "avx512": (16, ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")),
}
# Sources of the CUDA library, each a .cu and its _cuda.cpp; those that compile longest come first.
CUDA_UNITS = ("prune_encode", "prune", "encode", "decode")
_SOURCE_SUFFIXES = (".h", ".cuh", ".cpp", ".cu")
_X86 = platform.machine() in ("x86_64", "AMD64")
_NVCC = (
    *_COMMON, "--fmad=false", "-Xptxas", "-v,-warn-spills",
    *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in CUDA_ARCHS),
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What became of one library.

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


def library_path(name: str, out: Path = LIBRARIES) -> Path:
    """Where the `cpu` or `cuda` library lies."""
    return out / f"megatron_sparse_{name}.so"


def is_strict() -> bool:
    """Whether a part that cannot be built is an error: MEGATRON_SPARSE_STRICT=1."""
    return os.environ.get(STRICT, "") not in ("", "0")


def is_current(name: str, out: Path = LIBRARIES) -> bool:
    """Whether the library exists and was built from the sources and flags of today.

    The version of torch does not count here: the stable ABI makes the library fit them all, and a
    wheel must load where there is no compiler.
    """
    stamp = _read_stamp(library_path(name, out))
    return stamp is not None and stamp.get("sources") == source_hash(name)


def source_hash(name: str) -> str:
    """A hash of all that decides what the library is: sources and flags."""
    digest = hashlib.sha256(repr((_TARGET, _HOST)).encode())
    digest.update(repr((_NVCC, CUDA_UNITS) if name == "cuda" else (_ISAS, _X86)).encode())
    for path in sorted(p for p in SOURCES.iterdir() if p.suffix in _SOURCE_SUFFIXES):
        only_cuda = path.suffix in (".cu", ".cuh") or path.stem.endswith("_cuda")
        # Headers may be either's.
        if path.suffix == ".h" or only_cuda == (name == "cuda"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build(
    cuda: CudaChoice = "auto",
    out: Path = LIBRARIES,
    *,
    verbose: bool = False,
    parts: Sequence[str] = ("cpu", "cuda"),
    sanitize: bool = False,
) -> list[Part]:
    """Builds what is missing or out of date, under a file lock: several ranks may call it at once.

    Args:
        cuda: `auto` leaves the CUDA library out where it cannot be built; `on` makes that an
            error; `off` leaves it out.
        out: the folder of the libraries; made if it is not there.
        verbose: print every command.
        parts: which libraries, of `cpu` and `cuda`.
        sanitize: build the CPU library under the address and undefined behaviour sanitizers, for
            `scripts/fuzz.sh`; only into another folder than the one that `load` looks into.

    Returns:
        What became of each part.

    Raises:
        DependencyError: a compiler or torch is missing, for a part that is not optional.
        ExtensionError: a compiler failed, or `out` cannot be written.
        ConfigError: `sanitize` into the folder of the libraries that are used.
    """
    if sanitize and out == LIBRARIES:
        raise ConfigError(
            "a sanitized library cannot be loaded by Python as it is",
            expected="another folder for it", got=out, remedy="name one with --out",
        )  # fmt: skip
    done: list[Part] = []
    with _locked(out):
        if "cpu" in parts:
            done.append(_build_cpu(out, verbose, _SANITIZE if sanitize else ()))
        if "cuda" in parts:
            done.append(_build_cuda(out, verbose, cuda))
    return done


def _build_cpu(out: Path, verbose: bool, extra: tuple[str, ...] = ()) -> Part:
    target = library_path("cpu", out)
    torch_root, version = find_torch()
    stamp = {"sources": source_hash("cpu"), "torch": version}
    if _read_stamp(target) == stamp:
        return Part("cpu", target, "up to date", f"torch {version}")
    cxx = find_cxx()
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        host = [*_HOST, *extra, *(["-DMS_X86"] if _X86 else [])]
        bindings = [cxx, *host, _TARGET, f"-I{SOURCES}", "-isystem", torch_root / "include"]
        jobs = [
            ([*bindings, "-c", SOURCES / source], Path(folder) / f"{source}.o")
            for source in _CPU_BINDINGS
        ]
        for isa, (width, flags) in _ISAS.items():
            if flags and not _X86:
                continue
            command = [
                cxx, *host, "-Wno-psabi", *flags, f"-DMS_ISA={isa}", f"-DMS_WIDTH={width}",
                f"-I{SOURCES}", "-c", SOURCES / "kernels_isa.cpp",
            ]  # fmt: skip
            jobs.append((command, Path(folder) / f"{isa}.o"))
        _compile_all(jobs, verbose)
        linked = Path(folder) / target.name
        _run(
            [cxx, "-shared", "-static-libgcc", *extra, *(path for _, path in jobs),
             f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-o", linked],
            verbose,
        )  # fmt: skip
        _install(linked, target, stamp)
    seconds = time.perf_counter() - start_s
    return Part("cpu", target, "built", f"{cxx}, torch {version}, {seconds:.0f} s")


def _build_cuda(out: Path, verbose: bool, choice: CudaChoice) -> Part:
    target = library_path("cuda", out)
    if choice == "off":
        return Part("cuda", target, "left out", "not asked for")
    try:
        torch_root, version = find_torch()
        stamp = {"sources": source_hash("cuda"), "torch": version}
        if _read_stamp(target) == stamp:
            return Part("cuda", target, "up to date", f"torch {version}")
        toolkit = find_cuda()
        cxx = find_cxx()
        if not (torch_root / "lib" / "libtorch_cuda.so").is_file():
            raise DependencyError(
                "this torch was built without CUDA", expected="a CUDA build of torch",
                got=f"torch {version}", remedy="install one, or build with --cuda off",
            )  # fmt: skip
    except DependencyError as error:
        if choice == "on" or is_strict():
            raise
        return Part("cuda", target, "left out", f"{error.what}: {error.remedy}")
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        kernels = _kernel_jobs(toolkit, cxx, Path(folder))
        bindings = [
            ([cxx, *_HOST, _TARGET, "-DUSE_CUDA", f"-I{SOURCES}",
              "-isystem", torch_root / "include", "-isystem", toolkit.home / "include",
              "-c", SOURCES / f"{unit}_cuda.cpp"], Path(folder) / f"{unit}_cuda.o")
            for unit in CUDA_UNITS
        ]  # fmt: skip
        reports = _compile_all([*kernels, *bindings], verbose)
        for report in reports[: len(kernels)]:
            ptxas.refuse_spills(ptxas.read_report(report))
        linked = Path(folder) / target.name
        _run(
            [cxx, "-shared", "-static-libgcc", *(path for _, path in kernels + bindings),
             f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-ltorch_cuda", f"-L{toolkit.lib}",
             "-lcudart_static", "-ldl", "-lrt", "-lpthread", "-o", linked],
            verbose,
        )  # fmt: skip
        _install(linked, target, stamp)
    archs = " ".join(f"sm_{arch}" for arch in CUDA_ARCHS)
    seconds = time.perf_counter() - start_s
    return Part("cuda", target, "built", f"{toolkit.nvcc}, {archs}, {seconds:.0f} s")


def compile_report(verbose: bool = False) -> dict[str, list[ptxas.Compiled]]:
    """Compiles all CUDA kernels, keeps nothing, and returns what ptxas says of each source's.

    Raises:
        DependencyError: nvcc or the C++ compiler is missing.
        ExtensionError: a compiler failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        jobs = _kernel_jobs(find_cuda(), find_cxx(), Path(folder))
        reports = _compile_all(jobs, verbose)
    return {
        unit: ptxas.read_report(report) for unit, report in zip(CUDA_UNITS, reports, strict=True)
    }


def _kernel_jobs(toolkit: CudaToolkit, cxx: str, folder: Path) -> list[tuple[list[object], Path]]:
    """The command and the object file of each .cu."""
    host_flags = "-fPIC,-fvisibility=hidden,-ffp-contract=off"
    return [
        ([toolkit.nvcc, "-ccbin", cxx, *_NVCC, "-Xcompiler", host_flags, f"-I{SOURCES}",
          "-c", SOURCES / f"{unit}.cu"], folder / f"{unit}.o")
        for unit in CUDA_UNITS
    ]  # fmt: skip


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Holds the folder's lock; the lock is the process's, and ends with it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / LOCK, "w")  # noqa: SIM115 - closed below, after the lock is released
    except OSError as error:
        raise ExtensionError(
            "the folder of the native libraries cannot be written", expected="a writable folder",
            got=error,
            remedy="run python -m megatron_sparse.cuda_ext.build once as the folder's owner",
        ) from error  # fmt: skip
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile_all(jobs: Sequence[tuple[list[object], Path]], verbose: bool) -> list[str]:
    """Runs the compilers, two at a time: more would not fit the memory of small machines."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        running = [pool.submit(_run, [*words, "-o", path], verbose) for words, path in jobs]
        try:
            return [future.result() for future in running]
        except ExtensionError:
            pool.shutdown(cancel_futures=True)
            raise


def _run(command: Sequence[object], verbose: bool) -> str:
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


def _install(linked: Path, target: Path, stamp: dict[str, str]) -> None:
    """Puts library and stamp in place, each in one step: other processes may be loading them."""
    for suffix, write in (
        ("", lambda path: shutil.copy(linked, path)),
        (".stamp", lambda path: path.write_text(json.dumps(stamp))),
    ):
        fresh = target.with_name(f".{target.name}{suffix}.new")
        write(fresh)
        os.replace(fresh, target.with_name(target.name + suffix))


def _read_stamp(library: Path) -> dict[str, str] | None:
    stamp = library.with_name(library.name + ".stamp")
    if not library.is_file() or not stamp.is_file():
        return None
    return json.loads(stamp.read_text())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_sparse.cuda_ext.build",
        description="Builds the native libraries of megatron_sparse.",
    )
    parser.add_argument("--cuda", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--out", type=Path, default=LIBRARIES, metavar="DIR")
    parser.add_argument("--verbose", action="store_true", help="print every command")
    parser.add_argument(
        "--ptxas", action="store_true",
        help="only compile the CUDA kernels, and print their registers, shared memory and spills",
    )  # fmt: skip
    parser.add_argument(
        "--sanitize", action="store_true", help="the CPU library for scripts/fuzz.sh; needs --out"
    )
    chosen = parser.parse_args(arguments)
    try:
        if chosen.ptxas:
            for unit, kernels in compile_report(chosen.verbose).items():
                print(*ptxas.table(unit, kernels), sep="\n", flush=True)
            return 0
        for part in build(
            chosen.cuda, chosen.out.resolve(), verbose=chosen.verbose, sanitize=chosen.sanitize
        ):
            print(part, flush=True)
    except MegatronSparseError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def build_for_install(out: Path) -> list[Part]:
    """What `setup.py` calls: leaves out what cannot be built, unless strict.

    The package is usable all the same, for the first use builds what is missing.

    Raises:
        ConfigError: MEGATRON_SPARSE_CUDA is none of auto, on, off.
        MegatronSparseError: a part cannot be built and MEGATRON_SPARSE_STRICT is set.
    """
    cuda = os.environ.get("MEGATRON_SPARSE_CUDA", "auto")
    if cuda not in ("auto", "on", "off"):
        raise ConfigError("MEGATRON_SPARSE_CUDA is unknown", expected="auto | on | off", got=cuda)
    done = []
    for name in ("cpu", "cuda"):
        try:
            done += build(cuda, out, parts=(name,))
        except (DependencyError, ExtensionError) as error:
            if is_strict() or (name == "cuda" and cuda == "on"):
                raise
            reason = f"{error.what}; the first use builds it"
            done.append(Part(name, library_path(name, out), "left out", reason))
    return done


if __name__ == "__main__":
    sys.exit(main())
