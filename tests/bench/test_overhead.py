"""`bench overhead`: dense through the plugin trains as Megatron alone does."""

from pathlib import Path

import pytest

from megatron_sparse.bench.study.options import OverheadOptions
from megatron_sparse.bench.study.overhead import run
from tests.tracked import json_lines


def test_both_copies_have_the_same_losses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # which the bench sets, and leaves
    path = tmp_path / "rows.jsonl"
    assert run(OverheadOptions(ranks=2, warmup=0, iters=2), path) == 0
    rows = json_lines(path)
    assert [row["overlap"] for row in rows] == [False, True]
    for row in rows:
        assert row["losses_equal"] == 1
        assert row["ratio_q1"] <= row["ratio"] <= row["ratio_q3"]
