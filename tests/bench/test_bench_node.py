"""`bench node` between real ranks of this host."""

from __future__ import annotations

import json
import math

import pytest

from megatron_sparse.bench.node.sweep import OPS, NodeSweep, check_ranks
from megatron_sparse.errors import ConfigError
from megatron_sparse.run import local_ranks


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rows_of_every_operation(dtype, tmp_path):
    path = tmp_path / "rows.jsonl"
    options = ["--ranks=3", "--min-bytes=64K", "--max-bytes=256K", f"--dtype={dtype}"]
    options += ["--warmup=0", "--iters=2", f"--json={path}"]
    assert local_ranks.run_loopback(local_ranks.command_line(["bench", "node", *options]), 3) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    sizes = [size - size % (3 * (4 if dtype == "fp32" else 2)) for size in (2**16, 2**18)]
    assert [(row["bytes"], row["op"]) for row in rows] == [(s, op) for s in sizes for op in OPS]
    sent = {"all_reduce": 4 / 3, "exchange": 1}
    for row in rows:
        assert row["wrong"] == 0
        assert math.isfinite(row["time_us"])
        assert math.isfinite(row["gloo_us"])
        assert row["sent_bytes"] == round(row["bytes"] * sent.get(row["op"], 2 / 3))


def test_arguments_are_checked():
    with pytest.raises(ConfigError, match="bench node: op"):
        NodeSweep(ops=["broadcast"])
    with pytest.raises(ConfigError, match="bench node: ranks"):
        check_ranks(1)
