"""Checks the environment and reports what is missing, with remedies.

`megatron-sparse doctor` prints one line for each part. `fail` means that training cannot run;
`warn` means that it runs slower, with fewer features or with surprises. The checks start no
training and change nothing; they import torch and Megatron, and ask the compilers for their
versions.

Each check is a generator of `Check`s, the report's lines; `_PART_CHECKS` at the end lists them.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_sparse.cuda_ext import toolchain
from megatron_sparse.errors import DependencyError, ExtensionError, first_line
from megatron_sparse.extras import installed_version
from megatron_sparse.run.provenance import output
from megatron_sparse.run.rows import write_rows

type Status = Literal["ok", "warn", "fail"]

TRAIN_EXTRA = "pip install 'megatron-sparse[train]'"
CUDA_EXTRA = "pip install 'megatron-sparse[cuda]', then megatron-sparse build"
VERSION_S = 20
"""Seconds that a compiler may take to print its version."""
_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def console() -> Console:
    """A console on standard output.

    Without a terminal, lines are as long as their texts: a pipe or a file has no width, and rich
    would assume 80 columns. COLUMNS in the environment sets another width.
    """
    stdout = Console()
    if stdout.is_terminal or "COLUMNS" in os.environ:
        return stdout
    return Console(width=10_000)  # wider than any line, so that rich wraps none


def table(title: str, *headers: str) -> Table:
    """An empty table with these column headers; a cell that is too wide wraps, and is never cut.

    Example:
        >>> [column.overflow for column in table("found", "part", "remedy").columns]
        ['fold', 'fold']
    """
    made = Table(title=title)
    for header in headers:
        made.add_column(header, overflow="fold")
    return made


@dataclass(frozen=True)
class Check:
    """One line of the report: a part, what was found, and what to do about it (empty: nothing)."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def collect() -> list[Check]:
    """Runs every check. Never raises: an exception in a check becomes a failed check."""
    checks: list[Check] = []
    for part_check in _PART_CHECKS:
        # The part's name if the function raises: `collective backends` for `_collective_backends`.
        name = part_check.__name__.strip("_").replace("_", " ")
        try:
            with warnings.catch_warnings():
                # The checks report in words what the packages warn about at import.
                warnings.simplefilter("ignore")
                for check in part_check():
                    checks.append(check)
        except (Exception, SystemExit) as error:  # a half-installed package may raise anything
            detail = f"{type(error).__name__}: {first_line(error)}"
            remedy = "reinstall this part; if it works all the same, report this line"
            checks.append(Check(name, "fail", detail, remedy))
    return checks


def run(json: Path | None = None) -> int:
    """Prints the report as a table and, if asked, as JSON lines.

    `json` gets one JSON object a line, with the fields of `Check`; None writes none.

    Returns:
        The exit code: 0 when nothing failed, 1 otherwise.

    Raises:
        ConfigError: `json` cannot be written.
    """
    checks = collect()
    shown = table("megatron_sparse doctor", "part", "", "found", "what to do")
    for check in checks:
        style = _STYLE[check.status]
        # escape: square brackets in a text, as in an extra's name, are not markup.
        shown.add_row(
            check.name, f"[{style}]{check.status}[/]", escape(check.detail), escape(check.remedy)
        )
    console().print(shown)
    counts = {status: sum(c.status == status for c in checks) for status in _STYLE}
    console().print(", ".join(f"{count} {status}" for status, count in counts.items()))
    write_rows(json, [asdict(check) for check in checks])
    return 1 if counts["fail"] else 0


def _judged(name: str, fits: object, detail: str, remedy: str, otherwise: Status = "fail") -> Check:
    """An `ok` line if `fits` is true, else a line with the status `otherwise` and the remedy."""
    return Check(name, "ok", detail) if fits else Check(name, otherwise, detail, remedy)


def _python() -> Iterator[Check]:
    """Says which Python this is; one that is too old cannot read this module."""
    yield Check("Python", "ok", f"{platform.python_version()} ({sys.executable})")


def _torch() -> Iterator[Check]:
    """Checks that torch is new enough."""
    import torch

    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    wanted = ".".join(map(str, toolchain.MIN_TORCH))
    detail = f"{torch.__version__}, CUDA {torch.version.cuda}"
    yield _judged("torch", version >= toolchain.MIN_TORCH, detail, f"pip install 'torch>={wanted}'")


def _megatron() -> Iterator[Check]:
    """Checks Megatron's version, and the functions that the plugin's two entry points hook."""
    version = installed_version("megatron-core")
    if version is None:
        yield Check("megatron-core", "fail", "not installed", TRAIN_EXTRA)
        return
    from megatron_sparse.megatron import host_symbols

    try:
        untested_note = host_symbols.untested_megatron()
    except ImportError as error:
        yield Check("megatron-core", "fail", first_line(error), TRAIN_EXTRA)
        return
    remedy = f"pip install megatron-core=={host_symbols.NEWEST_TESTED}, if something fails"
    is_tested = untested_note is None
    yield _judged("megatron-core", is_tested, untested_note or version, remedy, "warn")
    symbols = host_symbols.find_host_symbols()
    for entry_point in ("attach", "install"):
        needed = [symbol for symbol in symbols if symbol.needed_by == entry_point]
        unusable = [symbol for symbol in needed if symbol.problem]
        problems = "; ".join(f"{symbol.name}: {symbol.problem}" for symbol in unusable)
        detail = problems or ", ".join(symbol.name.rpartition(".")[2] for symbol in needed)
        name = f"Megatron functions for {entry_point}"
        yield _judged(name, not unusable, detail, host_symbols.UPGRADE)


def _packages() -> Iterator[Check]:
    """Checks Hydra and tokenizers, and Triton, whose kernels only dense steps on GPUs need."""
    triton = "pip install triton (torch brings it on Linux): dense steps on GPUs need it"
    # Name in the report, name on PyPI, remedy and status if the package is missing.
    packages: tuple[tuple[str, str, str, Status], ...] = (
        ("Hydra", "hydra-core", "pip install hydra-core", "fail"),
        ("tokenizers", "tokenizers", TRAIN_EXTRA, "fail"),
        ("Triton", "triton", triton, "warn"),
    )
    for name, distribution, remedy, missing_status in packages:
        version = installed_version(distribution)
        yield _judged(name, version, version or "not installed", remedy, missing_status)


def _wandb() -> Iterator[Check]:
    """Checks that W&B is installed, and says in which mode a run would be tracked."""
    version = installed_version("wandb")
    if version is None:
        yield Check("W&B", "warn", "not installed: runs are not tracked there", TRAIN_EXTRA)
        return
    from megatron_sparse.config.tracking import TrackingConfig
    from megatron_sparse.telemetry.sinks import wandb_mode

    mode = wandb_mode(TrackingConfig())  # with the default, `auto`: by environment and key
    remedy = "" if mode == "online" else "to upload runs: wandb login, and unset WANDB_MODE"
    yield Check("W&B", "ok", f"{version}, {mode}", remedy)


def _compiler() -> Iterator[Check]:
    """Checks that a C++ compiler is found."""
    try:
        path = toolchain.find_cxx()
    except DependencyError as error:
        detail = f"{error.got}: the extension cannot be built"
        yield Check("C++ compiler", "warn", detail, error.remedy or "")
    else:
        printed = output([path, "--version"], VERSION_S).splitlines()
        yield Check("C++ compiler", "ok", f"{printed[0]} ({path})")


def _extension() -> Iterator[Check]:
    """Checks the two compiled libraries, for the CPU and for CUDA; a GPU requires CUDA's."""
    import torch

    cuda_ext = import_module("megatron_sparse.cuda_ext")
    for part, found in cuda_ext.status().items():
        name = f"extension, {part}"
        if found["loaded"]:
            yield Check(name, "ok", f"loaded from {found['path']}")
        elif part == "cuda" and not torch.cuda.is_available():
            state = "built" if found["built"] else "not built"
            yield Check(name, "ok", f"{state}; this machine has no GPU to run it on")
        else:
            # A sentence about what the first use compiles; empty if no compiler is found.
            compiles = "" if found["built"] else cuda_ext.compiles_first(part)
            cannot_run = ": the plugin cannot run on this GPU" if part == "cuda" else ""
            consequence = f"; {compiles}" if compiles else cannot_run
            status: Status = "warn" if compiles or part == "cpu" else "fail"
            yield Check(name, status, f"{found['reason']}{consequence}", "megatron-sparse build")


def _nvcc() -> Iterator[Check]:
    """Checks that nvcc, CUDA's compiler, is found; without a GPU it is not needed."""
    import torch

    try:
        path = str(toolchain.find_cuda().nvcc)
    except DependencyError:
        wanted = torch.cuda.is_available()
        detail = "not found" + ("" if wanted else "; not needed without a GPU")
        yield Check("nvcc", "warn" if wanted else "ok", detail, CUDA_EXTRA)
    else:
        printed = output([path, "--version"], VERSION_S).splitlines()
        yield Check("nvcc", "ok", f"{printed[-1]} ({path})")


def _gpus() -> Iterator[Check]:
    """Lists the GPUs that torch sees; warns if it sees none although nvidia-smi is installed."""
    import torch

    from megatron_sparse.cuda_ext.gpu import check_architecture

    if not torch.cuda.is_available():
        has_driver = shutil.which("nvidia-smi") is not None
        end = " though nvidia-smi is installed" if has_driver else ": gloo on CPU"
        remedy = "compare the driver with the CUDA version of torch above"
        yield _judged("GPUs", not has_driver, f"torch sees none{end}", remedy, "warn")
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        detail = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}"
        try:
            check_architecture(torch.device("cuda", index))
        except ExtensionError as error:
            yield Check(f"GPU {index}", "fail", f"{detail}: {error.what}", error.remedy or "")
        else:
            yield Check(f"GPU {index}", "ok", detail)


def _collective_backends() -> Iterator[Check]:
    """Checks that torch has gloo and, if there is a GPU, NCCL."""
    import torch
    import torch.distributed as dist

    gloo = dist.is_gloo_available()
    detail = "available" if gloo else "not in this torch"
    yield _judged("gloo", gloo, detail, "pip install torch: its own builds have gloo")
    if dist.is_nccl_available():
        from torch.cuda import nccl

        yield Check("NCCL", "ok", ".".join(map(str, nccl.version())))
    else:
        wanted = torch.cuda.is_available()
        detail = "not in this torch" + ("" if wanted else "; not needed without a GPU")
        yield _judged("NCCL", not wanted, detail, "install a CUDA build of torch")


def _network() -> Iterator[Check]:
    """Checks which network interface gloo would use."""
    variable = "GLOO_SOCKET_IFNAME"
    chosen = os.environ.get(variable)
    existing = [interface for _, interface in socket.if_nameindex()]
    if chosen is not None:
        absent = ", ".join(name for name in chosen.split(",") if name not in existing)
        detail = f"{chosen}: there is no interface {absent}" if absent else chosen
        remedy = f"set {variable} to one of {', '.join(existing)}, or unset it"
        yield _judged(variable, not absent, detail, remedy)
        return
    detail = f"unset: gloo takes the interface to which {socket.gethostname()} resolves"
    remedy = f"for several machines, export {variable}: the interface that connects them"
    yield Check(variable, "ok", detail, remedy)


_PART_CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    _python,
    _torch,
    _megatron,
    _packages,
    _wandb,
    _compiler,
    _extension,
    _nvcc,
    _gpus,
    _collective_backends,
    _network,
)
