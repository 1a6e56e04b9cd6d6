"""`scripts/gpu_check.sh` where there is no GPU: stages and refusals; and its bench's numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_sparse.bench import peer

ROOT = Path(__file__).resolve().parents[2]


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "scripts/gpu_check.sh", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHON": sys.executable},
        timeout=120,
    )


def test_a_dry_run_lists_stages_that_end_within_ten_minutes() -> None:
    done = gpu_check("--dry-run")
    assert done.returncode == 0, done.stderr
    stages = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert list(stages) == [
        "build",
        "tests",
        "memcheck",
        "racecheck",
        "codecs",
        "hashing",
        "host",
        "engine",
        "two-shot",
    ]
    assert sum(int(line.split()[1]) for line in stages.values()) < 600
    assert "-m gpu" in stages["tests"]
    assert "--tool racecheck" in stages["racecheck"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = gpu_check("--out", str(tmp_path / "out"))
    assert done.returncode == 3
    assert "there is no GPU" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [("--fast",), ("--out",)])
def test_wrong_arguments_are_refused(arguments: tuple[str, ...]) -> None:
    done = gpu_check(*arguments)
    assert done.returncode == 2
    assert "remedy" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_bench_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        peer.main([])
    assert "there is no GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        peer.main(["--ranks", "two"])
    assert "--ranks is not a list of numbers" in capsys.readouterr().err


def test_the_floor_counts_every_byte_once() -> None:
    """Two ranks, 8192 elements, one non-zero element each in the first shard."""
    layout = peer.even_layout(8192, 2)
    grads = [torch.zeros(8192) for _ in range(2)]
    grads[0][5], grads[1][9] = 1, 2
    one, none, two = 48 + 32, 48, 48 + 32
    gradients_and_outputs = 2 * 2 * 4 * 8192
    messages = 2 * 2 * (one + none)
    sums = 3 * (two + none)
    assert peer.floor_bytes(grads, grads[0] + grads[1], layout) == (
        gradients_and_outputs + messages + sums
    )


def test_a_wrong_row_shows_no_times() -> None:
    row = peer.PeerRow(
        world_size=2, density=0.01, count=1, bytes=4, bytes_moved=8, window_bytes=1, wrong=3
    )
    assert row.line().split()[4:8] == ["-"] * 4
    row.time_us, row.copy_us, row.host_us = 20.0, 10.0, 5.0
    assert "50%" in row.line()
