"""The emulator itself: healthy kernels pass under every schedule, planted bugs are caught."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_emulator.compilation import FLAGS, HERE, compile_library, find_gxx
from tests.programs import ended

pytestmark = pytest.mark.skipif(find_gxx() is None, reason="the emulator needs g++")

SCHEDULES = [("0", "0"), ("1", "0"), *(("2", str(seed)) for seed in range(1, 7))]


def build(folder: Path, *flags: str) -> Path:
    program = folder / "emulator_faults"
    source = HERE / "emulator_faults.cpp"
    subprocess.run(["g++", *FLAGS, *flags, source, "-o", program], check=True)
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("faults"))


def outcomes(program: Path, case: str) -> list[str]:
    """The outcome of each schedule."""
    return [ended([program, case, *each], check=True).stdout.strip() for each in SCHEDULES]


@pytest.mark.parametrize(
    "case", ["reverse", "reverse_warp", "dynamic", "chain", "count", "collectives"]
)
def test_healthy_kernels_pass(program: Path, case: str) -> None:
    assert set(outcomes(program, case)) == {"ok"}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("divergent_barrier", "caught: divergent barrier"),
        ("early_exit", "caught: divergent barrier: a thread has exited"),
        ("left_out", "caught: wrong mask: it leaves out the calling lane"),
        ("divergent_collective", "caught: divergent collective"),
        ("endless_spin", "caught: deadline"),
        ("missing_barrier", "wrong"),
        ("missing_warp_barrier", "wrong"),
        ("uninitialised", "wrong"),
        ("shuffle_from_outside", "wrong"),
    ],
)
def test_planted_bugs_are_caught_by_every_schedule(program: Path, case: str, message: str) -> None:
    for outcome in outcomes(program, case):
        assert outcome.startswith(message)


def test_a_lane_missing_from_a_ballot_is_caught(program: Path) -> None:
    """Reported as a deadlock, or as a mask with a lane that has ended, whichever comes first."""
    for outcome in outcomes(program, "divergent_ballot"):
        assert outcome.startswith(("caught: deadlock", "caught: wrong mask: it names a lane"))


def test_a_race_between_blocks_is_caught_by_some_schedule(program: Path) -> None:
    """Blocks that run in order never race; in random order they do."""
    found = outcomes(program, "lost_count")
    assert found[0] == "ok"
    assert any(outcome.startswith("wrong: counted") for outcome in found)


def test_out_of_bounds_is_caught_by_address_sanitizer(tmp_path: Path) -> None:
    program = build(tmp_path, "-fsanitize=address")
    healthy = ended([program, "reverse", "2", "1"])
    assert healthy.stdout.strip() == "ok", healthy.stderr
    caught = ended([program, "out_of_bounds", "0", "0"])
    assert caught.returncode != 0
    assert "heap-buffer-overflow" in caught.stderr


@pytest.mark.slow
@pytest.mark.timeout(1500)  # minutes under ASan on a loaded machine
def test_codecs_stay_in_bounds_under_address_sanitizer(tmp_path: Path) -> None:
    """The oracle comparisons again; ASan finds reads out of bounds, which guards cannot find."""
    library = compile_library(tmp_path, ("-fsanitize=address",))
    # Preload both: an error of the CPU's ops is a C++ exception, which ASan intercepts.
    runtime = " ".join(
        ended(["g++", f"-print-file-name={name}"], check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    )
    environment = os.environ | {
        "LD_PRELOAD": runtime,
        # ASan would report leaks that torch frees at exit.
        "ASAN_OPTIONS": "detect_leaks=0:log_path=" + str(tmp_path / "report"),
        "MEGATRON_SPARSE_EMULATED_CODECS": str(library),
    }
    files = ("codec", "codec_refusals", "decode", "hash", "threshold_emulated")
    files += ("nccl_emulated",)
    tests = [str(HERE / f"test_{name}.py") for name in files]
    # Whole chunks of moves switch threads too often: ASan looks at all stacks each time.
    tests.append(f"{HERE / 'test_moves_emulated.py'}::test_bytes_are_the_oracles")
    too_long = "long_chunks or damaged_rice or every_pair or decode_sum or on_the_schedule"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        f"not ({too_long})",
        *tests,
    ]
    done = ended(command, 1400, env=environment)
    reports = [path.read_text() for path in tmp_path.glob("report*")]
    assert done.returncode == 0, done.stdout[-3000:] + "".join(reports)[:3000]
