"""`scripts/gpu_check.sh` without a GPU: its stages, its refusals, and a rehearsal."""

import json
import os
import re
import subprocess
import sys
import tarfile
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from tests.programs import ROOT, Done, ended, with_variables
from tests.waiting import is_gone, until

pytestmark = pytest.mark.timeout(900)


def gpu_check(*arguments: str, python: str = sys.executable) -> Done:
    command = ["bash", "scripts/gpu_check.sh", *arguments]
    return ended(command, 850, env=with_variables(PYTHON=python))


def stages(*arguments: str) -> dict[str, tuple[int, str]]:
    """Seconds and command of each stage."""
    done = gpu_check("--list", *arguments)
    assert done.returncode == 0, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        name, seconds, _, command = line.split(maxsplit=3)
        found[name] = int(seconds), command
    return found


def test_three_calls_of_ten_minutes_run_every_stage_in_half_an_hour() -> None:
    """Back to back they build once; half an hour has room for a machine's start, too."""
    calls = [stages("--call", str(number)) for number in (1, 2, 3)]
    seconds = [sum(limit for limit, _ in each.values()) for each in calls]
    assert max(seconds) < 600
    assert sum(seconds) - 2 * stages()["build"][0] <= 24 * 60
    assert {name for each in calls for name in each} == set(stages())


def test_every_gpu_test_is_in_a_stage() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.gpu\b|\bplace: Place\b", path.read_text("utf-8"))
        and path != Path(__file__)
    }
    run = " ".join(command for _, command in stages().values())
    assert marked, "the pattern finds no test"
    assert not [path for path in marked if path not in run]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = gpu_check("--out", str(tmp_path / "out"))
    assert done.returncode == 3
    assert "there is no GPU" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [("--fast",), ("--out",), ("--call", "4")])
def test_wrong_arguments_are_refused(arguments: tuple[str, ...]) -> None:
    done = gpu_check(*arguments)
    assert done.returncode == 2
    assert "error: " in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_rehearsal_starts_every_stage_without_a_package(tmp_path: Path) -> None:
    done = gpu_check("--rehearse", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ stages in \d+ s, no failure\n\Z", done.stdout)
    assert (tmp_path / "gpu-all.tar.gz").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_rehearsal_sees_a_missing_module(tmp_path: Path) -> None:
    """The same tests, one of which needs a package that the machine lacks."""
    hidden = with_variables(
        PYTHONPATH=os.pathsep.join([str(ROOT / "tests" / "bare_machine"), str(ROOT)]),
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )
    test = tmp_path / "test_planted.py"
    test.write_text("import omegaconf\n\n\ndef test_it() -> None:\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    done = ended(command, cwd=tmp_path, env=hidden)
    assert done.returncode != 0
    assert "No module named 'omegaconf' on a bare machine" in done.stdout


@pytest.mark.slow  # some gigabytes of torch
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_rehearsal_with_the_machines_versions(tmp_path: Path) -> None:
    """Exactly torch 2.11, Triton 3.6, numpy and pytest, in an environment of their own."""
    python = str(tmp_path / "env" / "bin" / "python")
    packages = ("torch==2.11.*", "triton==3.6.*", "numpy", "pytest", "setuptools")
    for command in (
        [sys.executable, "-m", "venv", str(tmp_path / "env")],
        [python, "-m", "pip", "install", "-q", *packages],
    ):
        subprocess.run(command, check=True, timeout=800)
    done = gpu_check("--rehearse", "--out", str(tmp_path), python=python)
    assert done.returncode == 0, done.stdout + done.stderr


def load(name: str) -> ModuleType:
    """A module of scripts/."""
    with mock.patch.object(sys, "path", [str(ROOT / "scripts"), *sys.path]):
        return import_module(name)


def test_a_stage_out_of_time_ends_with_all_that_it_started(tmp_path: Path) -> None:
    """Its child would hold the GPU; what it has printed so far is in its log."""
    log, command = tmp_path / "log", ["sh", "-c", "sleep 600 & echo $!; wait"]
    assert load("gpu_check").run_within(command, dict(os.environ), log, 3) is None
    child = int(log.read_text())
    until(lambda: is_gone(child))


def test_a_failure_is_printed_when_it_happens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test = tmp_path / "test_planted.py"
    test.write_text(
        "import os\n\n\ndef test_it():\n    assert 1 == 2, 'planted'\n\n\n"
        "def test_the_end():\n    os._exit(9)\n"
    )
    command = [*(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")]
    command += ["-p", "tests.print_failures", str(test)]
    environment = with_variables(PYTHONPATH=str(ROOT))
    code = load("gpu_check").run_within(command, environment, tmp_path / "log", None)
    assert code == 9, "pytest itself prints failures at its end only"
    printed = capsys.readouterr().out
    assert "test_planted.py::test_it (call)" in printed
    assert "AssertionError: planted" in printed


def test_the_rehearsed_numbers_fill_the_table(tmp_path: Path) -> None:
    """Rows in the benches' own fields; sizes of the real run."""
    results = load("gpu_results")
    shared = {"count": 2**26, "wrong": 0, "bytes_moved": 12 * 2**26, "copy_us": 300.0}
    rows = [
        shared | {"op": "prune_encode", "format": "coo", "time_us": 400.0, "ratio": 1.25},
        shared | {"op": "prune_encode", "format": "rice_q4", "wrong": 7, "time_us": None},
        {"coder": "rans", "numel": 2**27, "bits": 4.0, "wrong": 0}
        | {"encode_gbps": 1000.0, "decode_gbps": 500.0},
    ]
    file = tmp_path / "speed.0.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with tarfile.open(tmp_path / "gpu-call-1.tar.gz", "w:gz") as archive:
        archive.add(file, "call-1/speed.0.jsonl")
    found = results.answers(list(results.rows_of(tmp_path / "gpu-call-1.tar.gz")))
    table = results.table(found)
    assert "|select and encode 1 %, COO|85 %||0.40, 80 %||" in table
    assert "|`safe`: select 22 %, 4 bits, Rice|60 %||7 bytes WRONG||" in table
    # 268 us for 604 MB; a copy of as many takes 225 us.
    assert "|encode moves, rANS|||0.27, 84 %||" in table


def test_the_page_has_every_question() -> None:
    results = load("gpu_results")
    page = results.PAGE.read_text("utf-8").split(results.BEGIN)[1].split(results.END)[0]
    rows = [line.split("|")[1] for line in page.strip().splitlines()[2:]]
    assert rows == [question.text for question in results.QUESTIONS]
