"""`bench prune` checks results before timing, and writes the table's numbers."""

from __future__ import annotations

import pytest

from megatron_sparse.bench.codec import prune as bench
from megatron_sparse.bench.codec.options import PruneSweep
from tests.bench.codec_rows import is_timed, printed_and_written

FIELDS = {
    *("op", "format", "dtype", "density", "count", "bytes_moved", "time_us", "copy_us"),
    *("peer", "peer_us", "device", "wrong", "stream_us", "ratio"),
}


@pytest.mark.parametrize(
    ("dtype", "residual_dtype"), [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp32")]
)
def test_rows_are_right_timed_and_written(dtype, residual_dtype, tmp_path, capsys):
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
    rows = printed_and_written(lambda path: bench.run(sweep, path), tmp_path, capsys)
    assert len(rows) == 2 * 2 * 3  # sizes, densities, operations
    for row in rows:
        assert set(row) == FIELDS
        assert is_timed(row, "peer_us")
    assert {(r["op"], r["format"]) for r in rows} >= {("encode", "coo"), ("encode", "dense")}


def test_a_wrong_result_is_counted_and_not_timed(monkeypatch):
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
