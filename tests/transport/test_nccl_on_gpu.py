"""Two processes on one GPU, which NCCL takes for two machines: sums with and without the engine.

For correctness only: the processes take turns on the GPU.
"""

from pathlib import Path

import pytest

from tests.gpu_ranks import on_one_gpu
from tests.tracked import json_lines

BENCH = """
import sys
from pathlib import Path
from megatron_sparse.bench.exchange.collectives import CollectiveBench
from megatron_sparse.bench.exchange.frame import run
from megatron_sparse.bench.exchange.options import CollectiveSweep, NodePlace

sweep = CollectiveSweep(
    min_bytes=2**20,
    max_bytes=2**20,
    densities=(0.05,),
    dtypes=("fp32", "bf16"),
    schemes=("direct", "agsparse"),
    ops=("all_reduce", "reduce_scatter"),
    capacity=1.25,
    nccl_engine=sys.argv[1] == "engine",
    warmup=1,
    iters=2,
    timeout_s=60.0,
)
sys.exit(run(CollectiveBench, sweep, NodePlace(), Path(sys.argv[2])))
"""
"""Not by the command line: a bare GPU machine lacks Typer."""


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["c10d", "engine"])
def test_the_sum_is_right(way: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    on_one_gpu(2, "-c", BENCH, way, str(path))
    rows = json_lines(path)
    assert len(rows) == 8
    assert not any(row["wrong"] for row in rows)
