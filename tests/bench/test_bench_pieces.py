"""`bench collectives` of a bucket that is synchronised in pieces."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch

from megatron_sparse.bench.collectives.row import sent_figures, stages_us
from megatron_sparse.recording import BUCKET_STAGES, BucketRecord, StageTimer
from megatron_sparse.run import local_ranks


def timer(*spans: tuple[str, float, float]) -> StageTimer:
    made = StageTimer(torch.device("cpu"))
    for span in spans:
        made.add_span(*span)
    return made


def test_the_network_is_what_no_other_stage_hides() -> None:
    first = timer(("prune", 0, 1), ("network", 1, 4), ("decode", 5, 6))
    second = timer(("prune", 1, 3), ("network", 3, 7), ("network", 7.5, 8), ("decode", 8, 9))
    found = stages_us([first, second])
    assert set(found) == set(BUCKET_STAGES)
    assert (found["prune"], found["decode"]) == (3e6, 2e6)
    assert found["network"] == pytest.approx(3.5e6)  # 3 to 5, 6 to 7, 7.5 to 8
    assert stages_us([first]) == first.times_us()


def test_bytes_and_elements_of_pieces_add_up() -> None:
    records = [BucketRecord("b", 0, "direct", "target", 0.1, 100, nnz=10) for _ in range(3)]
    for record in records:
        record.wire_bytes, record.inside_bytes = 50, 20
    assert sent_figures(records) == {
        "wire_bytes": 150,
        "inside_bytes": 60,
        "nnz": 30,
        "selected_from": 300,
    }


def test_pieces_of_real_ranks_are_summed_right(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    command = local_ranks.command_line(
        [
            "bench",
            "collectives",
            "--ranks=3",
            "--min-bytes=8M",
            "--max-bytes=8M",
            "--density=0.05",
            "--value-bits=4",
            "--sum-bits=8",
            "--scheme=agsparse,direct,hierarchical",
            "--piece-numel=1024",
            "--warmup=1",
            "--iters=1",
            f"--json={path}",
        ]
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["scheme"] for row in rows] == ["agsparse", "direct", "hierarchical"]
    for row in rows:
        assert row["wrong"] == 0
        assert row["host_us"] > 0
        assert 0.04 < row["sent_density"] < 0.06
