"""The decoder under sanitizers: `scripts/fuzz.sh`, and that it finds what it is there to find."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(900)  # three instruction sets are compiled with sanitizers first


def fuzz(root, seconds):
    return subprocess.run(
        ["bash", "scripts/fuzz.sh", str(seconds)], cwd=root, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("seconds", [15, pytest.param(60, marks=pytest.mark.slow)])
def test_nothing_is_found(seconds):
    done = fuzz(ROOT, seconds)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
def test_a_missing_check_is_found(tmp_path):
    for name in ("cuda_ext/csrc", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "tests" / "kernels").mkdir(parents=True)
    shutil.copy(ROOT / "tests/kernels/fuzz_decode.cpp", tmp_path / "tests/kernels")
    decoder = tmp_path / "cuda_ext/csrc/decode_records.cpp"
    check = "index >= limit"
    assert decoder.read_text().count(check) == 1
    decoder.write_text(decoder.read_text().replace(check, "false"))
    done = fuzz(tmp_path, 30)
    assert done.returncode == 1, done.stdout[-3000:]
    assert "AddressSanitizer" in done.stderr


def test_an_unknown_argument_is_one_error():
    done = fuzz(ROOT, "soon")
    assert done.returncode == 2
    assert "an argument is unknown" in done.stderr
