"""The bench checks results before timing, and writes the table's numbers."""

from __future__ import annotations

import json
import math

import pytest
import torch

from megatron_sparse.bench import prune as bench
from megatron_sparse.bench.codecs.sweep import PruneSweep
from megatron_sparse.errors import ConfigError

FIELDS = {
    "op",
    "format",
    "dtype",
    "density",
    "count",
    "bytes_moved",
    "time_us",
    "copy_us",
    "peer",
    "peer_us",
    "device",
    "wrong",
}


@pytest.mark.parametrize(
    ("dtype", "residual_dtype"), [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp32")]
)
def test_rows_are_right_timed_and_written(dtype, residual_dtype, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    threads = torch.get_num_threads()
    sweep = PruneSweep(
        min_bytes=2**14,
        max_bytes=2**16,
        densities=[0.01, 0.9],
        dtype=dtype,
        residual_dtype=residual_dtype,
        warmup=1,
        iters=2,
        threads=1,
    )
    rows = bench.run(sweep, path)
    assert torch.get_num_threads() == threads
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    assert len(rows) == 2 * 2 * 3  # sizes, densities, operations
    for row in rows:
        assert set(row) == FIELDS
        assert row["wrong"] == 0
        assert all(row[f] > 0 and math.isfinite(row[f]) for f in ("time_us", "copy_us", "peer_us"))
    assert {(r["op"], r["format"]) for r in rows} >= {("encode", "coo"), ("encode", "dense")}
    printed = capsys.readouterr().out.splitlines()
    assert "#wrong" in printed[1]
    assert len(printed) == 2 + len(rows)


def test_a_wrong_result_is_counted_and_not_timed(monkeypatch, capsys):
    def broken(grad_N, *arguments):
        nnz = real(grad_N, *arguments)
        grad_N[:3] = 123.0
        return nnz

    real = bench.ops.prune_
    monkeypatch.setattr(bench.ops, "prune_", broken)
    sweep = PruneSweep(min_bytes=2**12, max_bytes=2**12, densities=[0.01], iters=1)
    row = next(r for r in bench.run(sweep) if r["op"] == "prune")
    assert row["wrong"] == 3
    assert row["time_us"] is None


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("min_bytes", 0),
        ("max_bytes", 2),
        ("densities", [1.0]),
        ("dtype", "fp8"),
        ("residual_dtype", "fp16"),
        ("iters", 0),
        ("threads", 0),
        ("warmup", -1),
    ],
)
def test_refuses(argument, value):
    call = {"min_bytes": 4, "max_bytes": 64} | {argument: value}
    with pytest.raises(ConfigError, match="bench prune"):
        PruneSweep(**call)
