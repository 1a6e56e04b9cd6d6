"""`bench bucket` on the CPU: its rows and its arithmetic; and how a row declares its columns."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_sparse.bench.exchange.bucket import run
from megatron_sparse.bench.exchange.options import BucketSweep
from megatron_sparse.run.rows import CellRow, cell
from tests.tracked import json_lines


@pytest.mark.parametrize("scheme", ["direct", "agsparse", "dense_ring"])
def test_rows(scheme: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    sweep = BucketSweep(min_bytes=2**14, max_bytes=2**16, schemes=[scheme], warmup=0, iters=2)
    rows = run(sweep, path)
    assert [row.bytes for row in rows] == [2**14, 2**16]
    for row, written in zip(rows, json_lines(path), strict=True):
        assert (row.scheme, row.wrong) == (scheme, 0)
        for name in ("time_us", "floor_us", "host_us", "busy_us", "both_us"):
            assert written[name] == getattr(row, name) > 0
        assert row.waits is None or torch.cuda.is_available()
    assert not dist.is_initialized(), "the group of one rank is gone"


@dataclass
class Pace(CellRow):
    """Two columns of its own, one before and one behind."""

    op: str = cell("not shown")
    count: int = cell("elements", "half >5 half | count >5")
    time_us: float | None = cell(
        "of a call", ">8.1f time(us) | time_us/count >5.1f each", default=None
    )

    @property
    def half(self) -> int:
        """For the first column."""
        return self.count // 2


def test_columns_follow_the_fields() -> None:
    """In their order, ratios among them; all but what is computed are in the JSON."""
    assert Pace.COLUMNS.header.split() == ["#half", "count", "time(us)", "each"]
    assert Pace("add", 4, 6.0).line().split() == ["2", "4", "6.0", "1.5"]
    assert Pace("add", 4).line().split() == ["2", "4", "-", "-"]
    assert Pace("add", 4).to_dict() == {"op": "add", "count": 4, "time_us": None}
