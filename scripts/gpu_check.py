"""Checks and measures on a machine with one GPU, in stages; called by gpu_check.sh.

    bash scripts/gpu_check.sh                 every stage
    bash scripts/gpu_check.sh --call 1        correctness and speed of the main path
    bash scripts/gpu_check.sh --call 2        NCCL, capacity mode, hashing, moves
    bash scripts/gpu_check.sh --call 3        compute-sanitizer, the rest
    bash scripts/gpu_check.sh --rehearse      every stage without a GPU: see below
    bash scripts/gpu_check.sh --list          the stages, their limits and commands

A call takes at most ten minutes and builds what it needs, for this device's architecture only, so
each may run on a fresh machine. The tests need torch, Triton, numpy and pytest; the benches need no
more. A stage that fails or runs out of time is ended with all that it started, and the next one
runs. A failed test is printed when it fails, tables at the end. Logs and JSON lines lie in
runs/gpu-check; after every stage they are packed into DIR/gpu-call-CALL.tar.gz (DIR: --out, else
runs). `gpu_results.py ARCHIVE...` puts the numbers into docs/results/gpu.md.

A rehearsal starts all stages where there is no GPU, with every package hidden that the machine
may lack: tests are collected and skip for want of a device, benches measure something tiny on the
CPU. A stage that needs a missing module, or collects no test, fails.

Exit code: 0 all is well, 1 a stage failed, 2 an argument or Python is wrong, 3 there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "runs" / "gpu-check"
HIDE_PACKAGES = ROOT / "tests" / "bare_machine"
SANITIZER = os.environ.get("COMPUTE_SANITIZER", "compute-sanitizer")
TESTS = "tests/cuda_emulator/test_"
NO_DEVICE = "no CUDA device"
"""Why a test may skip in a rehearsal."""
FAILURE = "! "
"""Begins the lines that `tests/print_failures.py` writes."""
MOST_SHOWN = 2000
"""Characters of a failed stage's log that are printed; the archive has all."""


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: of the stage and its log.
        call: the calls that run it.
        limit_s: seconds after which it is ended: about twice what it took beside an H200, with 16
            cores.
        tests: files whose tests marked gpu it runs.
        bench: the bench that it runs, by its name in `BENCHES`.
        tool: of compute-sanitizer, under which the tests run.
        queues: CUDA_DEVICE_MAX_CONNECTIONS; None leaves CUDA's default, 8.
    """

    name: str
    call: tuple[int, ...]
    limit_s: int
    tests: tuple[str, ...] = ()
    bench: str = ""
    tool: str = ""
    queues: int | None = None

    def command(self, rehearse: bool) -> list[str]:
        """The command line."""
        if self.tests:
            found = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
            found += ["-p", "tests.print_failures"]
            tool = [] if rehearse or not self.tool else sanitizer(self.tool)
            return [*tool, *found, *self.tests]
        if self.bench:
            flags = ["--rehearse"] if rehearse else []
            return [sys.executable, "scripts/gpu_check.py", "--bench", self.bench, *flags]
        # A rehearsal builds the CPU's library, which its tiny benches need.
        return [
            sys.executable,
            "-m",
            "megatron_sparse.cuda_ext.build",
            "--cuda",
            "off" if rehearse else "on",
        ]


def sanitizer(tool: str) -> list[str]:
    """compute-sanitizer, which exits with 9 where it finds something."""
    # torch asks CUDA for things that may fail, which is no error of ours.
    return [SANITIZER, "--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]


CODEC_TESTS = tuple(
    f"{TESTS}{name}.py" for name in ("codec", "codec_refusals", "decode", "checksum")
)
MOVES_TESTS = (f"{TESTS}moves_emulated.py",)
STAGES = (
    # 170 processor seconds for one architecture.
    Stage("build", (1, 2, 3), 90),
    # The questions that decide: the CPU's bits, and the share of a copy's speed.
    Stage("speed", (1,), 100, bench="speed"),
    Stage(
        "codec-tests",
        (1,),
        60,
        tests=(
            "tests/cuda_ext/test_cuda_codecs.py",
            *CODEC_TESTS,
            f"{TESTS}threshold_emulated.py",
        ),
    ),
    Stage("bucket", (1,), 90, bench="bucket"),
    Stage("bucket-engine", (1,), 70, bench="bucket-engine"),
    Stage("bucket-1-queue", (1,), 70, bench="bucket", queues=1),
    Stage("nccl", (2,), 60, tests=("tests/transport/test_nccl_on_gpu.py",)),
    Stage("capacity", (2,), 30, tests=(f"{TESTS}no_waiting.py",)),
    Stage("streams", (2,), 70, tests=("tests/reduction/test_streams_on_gpu.py",)),
    Stage(
        "moves",
        (2,),
        30,
        tests=(
            *MOVES_TESTS,
            f"{TESTS}parameter_gather.py",
            "tests/cuda_ext/test_moves_on_gpu.py",
        ),
    ),
    Stage("hash-tests", (2,), 30, tests=(f"{TESTS}hash.py", f"{TESTS}zen.py")),
    Stage("hashing", (2,), 25, bench="hashing"),
    # With megatron-core, hydra-core and omegaconf only.
    Stage("training", (2,), 150, tests=("tests/run/test_training_on_gpu.py",)),
    # Triton compiles 72 variants of one kernel, one after the other.
    Stage("triton", (2,), 80, tests=("tests/cuda_ext/test_gpu.py", "tests/cuda_ext/test_prune.py")),
    Stage("memcheck-codecs", (3,), 60, tests=CODEC_TESTS, tool="memcheck"),
    Stage("memcheck-moves", (3,), 30, tests=MOVES_TESTS, tool="memcheck"),
    Stage("racecheck-codecs", (3,), 200, tests=CODEC_TESTS, tool="racecheck"),
    Stage("racecheck-moves", (3,), 60, tests=MOVES_TESTS, tool="racecheck"),
    Stage("synccheck-codecs", (3,), 60, tests=CODEC_TESTS, tool="synccheck"),
    Stage("synccheck-moves", (3,), 30, tests=MOVES_TESTS, tool="synccheck"),
)


def main() -> int:
    """Runs what the arguments ask for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", allow_abbrev=False)
    parser.add_argument("--call", type=int, choices=(1, 2, 3), help="only these stages")
    parser.add_argument("--rehearse", action="store_true", help="start all stages without a GPU")
    parser.add_argument("--list", action="store_true", help="print the stages and end")
    parser.add_argument("--out", type=Path, default=ROOT / "runs", help="folder of the archive")
    parser.add_argument("--bench", choices=BENCHES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bench:
        return 1 if any(BENCHES[given.bench](given.rehearse)) else 0
    stages = [stage for stage in STAGES if given.call is None or given.call in stage.call]
    if given.list:
        for stage in stages:
            print(f"{stage.name:<15} {stage.limit_s:>4} s  {' '.join(stage.command(False))}")
        return 0
    if not given.rehearse:
        refuse_without_gpu()
        if shutil.which(SANITIZER) is None:
            print(f"{SANITIZER} is not there: its stages are left out", flush=True)
            stages = [stage for stage in stages if not stage.tool]
    return run_stages(stages, given)


def refuse_without_gpu() -> None:
    """Exits without torch (2) or GPU (3); else prints versions, sets the build's architecture."""
    try:
        import torch
    except ImportError:
        print(f"error: {sys.executable} has no torch\n  remedy:   set PYTHON", file=sys.stderr)
        sys.exit(2)
    if not torch.cuda.is_available():
        print(
            "error: there is no GPU\n  expected: one CUDA device\n"
            "  got:      none that torch sees\n"
            "  remedy:   run it where there is one, or give --rehearse",
            file=sys.stderr,
        )
        sys.exit(3)
    print(
        f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}  {torch.cuda.get_device_name()}, torch "
        f"{torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}",
        flush=True,
    )
    major, minor = torch.cuda.get_device_capability()
    os.environ.setdefault("MEGATRON_SPARSE_CUDA_ARCHS", f"{major}{minor}")


def run_stages(stages: list[Stage], given: argparse.Namespace) -> int:
    """Runs the stages one after the other; returns the exit code."""
    folder = LOGS / (f"call-{given.call}" if given.call else "all")
    folder.mkdir(parents=True, exist_ok=True)
    given.out.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    begin_s = time.monotonic()
    for stage in stages:
        print(f"[{time.monotonic() - begin_s:4.0f} s] {stage.name}", flush=True)
        log = folder / f"{stage.name}.log"
        problem = run_stage(stage, log, folder, given.rehearse)
        print(f"         {last_line(log)}", flush=True)
        if problem:
            failed.append(stage.name)
            # Failures of tests have been printed already.
            end = "" if stage.tests else log.read_text(errors="replace")[-MOST_SHOWN:]
            print(f"{end}\n{stage.name} FAILED: {problem}", flush=True)
        with tarfile.open(given.out / f"gpu-{folder.name}.tar.gz", "w:gz") as archive:
            archive.add(folder, folder.name)
    for stage in stages:
        if stage.bench and stage.name not in failed and not given.rehearse:
            print(f"\n{stage.name}\n{(folder / f'{stage.name}.log').read_text()}")
    seconds = time.monotonic() - begin_s
    verdict = f"failed: {', '.join(failed)}" if failed else "no failure"
    print(f"{len(stages)} stages in {seconds:.0f} s, {verdict}")
    return 1 if failed else 0


def run_stage(stage: Stage, log: Path, folder: Path, rehearse: bool) -> str:
    """Runs one stage with its output in `log`; returns what is wrong, or nothing."""
    environment = os.environ | {"GPU_CHECK_JSON": str(folder / f"{stage.name}.jsonl")}
    environment["MEGATRON_SPARSE_STRICT"] = "1"
    environment.pop("PYTEST_ADDOPTS", None)  # a stage is judged by pytest's last line
    if stage.queues is not None:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = str(stage.queues)
    if stage.tool == "memcheck":
        # Else torch hands out parts of large allocations, and memcheck sees no end of a tensor.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if rehearse:
        # In front of the checkout, which holds the package.
        environment["PYTHONPATH"] = os.pathsep.join([str(HIDE_PACKAGES), str(ROOT)])
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    else:
        environment["PYTHONPATH"] = str(ROOT)
    limit_s = None if rehearse else stage.limit_s
    code = run_within(stage.command(rehearse), environment, log, limit_s)
    if code is None:
        return f"not done after {limit_s} s"
    if code:
        return f"exit code {code}"
    return skips_for_want_of_a_module(log) if rehearse and stage.tests else ""


def run_within(
    command: list[str], environment: dict[str, str], log: Path, limit_s: float | None
) -> int | None:
    """Runs a command with its output in `log`; prints the failures of tests as they come.

    Returns:
        Its exit code; None if it ran out of time. It is ended then with all that it started, which
        would hold the GPU.
    """
    limited = [] if limit_s is None else ["timeout", "--signal=KILL", str(limit_s)]
    begin_s = time.monotonic()
    with (
        log.open("w") as file,
        subprocess.Popen(
            [*limited, *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as running,
    ):
        assert running.stdout is not None
        for line in running.stdout:
            file.write(line)
            file.flush()
            if line.startswith(FAILURE):
                print(line, end="", flush=True)
    is_late = limit_s is not None and time.monotonic() - begin_s >= limit_s
    return None if is_late else running.returncode


def skips_for_want_of_a_module(log: Path) -> str:
    """What is wrong with a rehearsal of tests, or nothing: all must skip for want of a device."""
    if not re.match(r"\d+ skipped", last_line(log)) or "passed" in last_line(log):
        return "not every test was collected and skipped"
    skips = [line for line in log.read_text().splitlines() if line.startswith("SKIPPED")]
    other = [line for line in skips if NO_DEVICE not in line]
    return f"a test skips for another reason: {other[0]}" if other else ""


def last_line(log: Path) -> str:
    """What a stage said last."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def json_path(part: int | None = None) -> Path:
    """Where a bench writes its JSON lines, or those of one of its tables."""
    path = Path(os.environ["GPU_CHECK_JSON"])
    return path if part is None else path.with_suffix(f".{part}.jsonl")


def bench_speed(rehearse: bool) -> list[int]:
    """Compares the presets' paths with the CPU's bits and a copy's speed; returns each `wrong`."""
    from megatron_sparse.bench.codec import codecs, parameters
    from megatron_sparse.bench.codec.options import CodecSweep, ParameterSweep

    tiny = {"min_bytes": 2**16, "max_bytes": 2**16, "iters": 1, "warmup": 0, "device": "cpu"}
    whole = {"min_bytes": 2**26, "max_bytes": 2**30, "iters": 10, "device": "cuda"}
    shared = {"peers": False, **(tiny if rehearse else whole)}
    both = {"ops": ("prune_encode", "decode_add", "decode_sum"), **shared}
    wrong = []
    for part, sweep in enumerate(
        (
            CodecSweep(forms=("coo",), densities=(0.01,), **both),
            CodecSweep(forms=("rice_q4", "dense_q4"), densities=(0.22,), **both),
            # As full as the sum of eight selections of 22 %.
            CodecSweep(forms=("rice_q8",), densities=(0.86,), ops=("place",), **shared),
        )
    ):
        wrong += [row.wrong for row in codecs.run(sweep, json_path(part))]
    moves = {"rates": (1e-4,), "device": shared["device"]}
    # The three sweeps above have written the parts 0 to 2.
    for part, size in enumerate((2**16,) if rehearse else (2**26, 2**28, 2**30), start=3):
        sweep = ParameterSweep(elements=size // 2, iters=1 if rehearse else 5, **moves)
        wrong += [row.wrong for row in parameters.run(sweep, json_path(part))]
    return wrong


def bench_hashing(rehearse: bool) -> list[int]:
    """Measures ZEN's formats and row-sparse records; returns each row's `wrong`."""
    from megatron_sparse.bench.codec.codecs import run
    from megatron_sparse.bench.codec.options import CodecSweep

    tiny = {"min_bytes": 2**16, "max_bytes": 2**16, "iters": 1, "warmup": 0, "device": "cpu"}
    whole = {"min_bytes": 2**26, "max_bytes": 2**26, "iters": 5, "device": "cuda"}
    forms = ("hash_bitmap", "pairs", "row_sparse")
    sweep = CodecSweep(densities=(0.01,), forms=forms, **(tiny if rehearse else whole))
    return [row.wrong for row in run(sweep, json_path())]


def bench_bucket(rehearse: bool, nccl_engine: bool = False) -> list[int]:
    """Measures a bucket from gradient to sum: floor, host time, waits; returns each `wrong`."""
    from megatron_sparse.bench.exchange.bucket import run
    from megatron_sparse.bench.exchange.options import BucketSweep

    tiny = BucketSweep(min_bytes=2**16, max_bytes=2**16, iters=1, warmup=0)
    sweep = tiny if rehearse else BucketSweep(nccl_engine=nccl_engine)
    return [row.wrong for row in run(sweep, json_path())]


def bench_engine(rehearse: bool) -> list[int]:
    """The same through the C++ NCCL engine, which a CPU lacks."""
    return bench_bucket(rehearse, nccl_engine=True)


BENCHES: dict[str, Callable[[bool], list[int]]] = {
    "speed": bench_speed,
    "hashing": bench_hashing,
    "bucket": bench_bucket,
    "bucket-engine": bench_engine,
}

if __name__ == "__main__":
    sys.exit(main())
