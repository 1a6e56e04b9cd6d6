"""`scripts/gpu_check.sh` without a GPU: its stages, its refusals, and a rehearsal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.programs import ROOT, Done, ended, with_variables

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


def test_three_calls_of_ten_minutes_run_every_stage_in_twenty() -> None:
    calls = [stages("--call", str(number)) for number in (1, 2, 3)]
    seconds = [sum(limit for limit, _ in each.values()) for each in calls]
    assert max(seconds) < 600
    assert sum(seconds) <= 20 * 60
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
