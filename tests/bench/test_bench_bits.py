"""`bench bits`: positions near their entropy, records as long as the table says, small errors."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_sparse.bench.codec.bits import (
    VALUE_DTYPES,
    BitsRow,
    bits_row,
    entropy,
    error_rows,
    run,
)
from megatron_sparse.bench.codec.options import BitsSweep
from megatron_sparse.reference.rice import SegmentPlace, encode
from megatron_sparse.reference.rice_chunk import RiceForm
from megatron_sparse.wire import rice_span
from tests.bench.running import read_rows, run_cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("density", [0.001, 0.005, 0.01, 0.05, 0.1])
def test_positions_take_at_most_5_percent_more_than_their_entropy(density):
    row = bits_row(2**20, density)
    assert row.entropy < row.rice < 1.05 * row.entropy
    assert not row.bad


def test_a_row_says_the_bytes_of_real_records():
    count, density = 20_000, 0.05
    row = bits_row(count, density)
    index = np.flatnonzero(np.random.default_rng(0).random(count, dtype=np.float32) < density)
    assert row.entries == index.size
    for name, code in VALUE_DTYPES.items():
        form = RiceForm(code, rice_span(density))
        record = encode(
            torch.ones(index.size), torch.from_numpy(index), SegmentPlace(count, 0, 0), form
        ).record
        assert getattr(row, name) == 8 * len(record) / index.size
    assert row.coo == pytest.approx(32, rel=0.01)


def test_entropy_ends_at_0():
    assert entropy(1.0) == 0
    assert bits_row(1000, 1.0).entries == 1000
    assert bits_row(10, 1e-6).entries == 1


def test_fitted_levels_lose_less():
    """The quality that presets rely on: errors of the values, as parts of the values."""
    rows = {(row.distribution, row.tail, row.bits): row for row in error_rows([0.05], 100)}
    for (distribution, _, bits), row in rows.items():
        assert row.fitted < row.even, (distribution, bits)
    assert rows["normal", 0.05, 4].fitted < 0.033
    assert rows["normal", 0.05, 3].fitted < 0.055
    assert rows["normal", 0.05, 2].fitted < 0.09
    assert rows["laplace", 0.05, 2].fitted < 0.16


def test_the_command_prints_both_tables_and_writes_their_rows(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    words = "bits --elements 64K --density 0.05 --tails 0.25 --groups 5 --json"
    assert run_cli(*words.split(), str(path)) == 0
    printed = capsys.readouterr().out
    rows = read_rows(path)
    assert len(rows) == 1 + 2 * 4
    assert rows[0]["count"] == 2**16
    assert printed.count("\n") == 3 + 2 + 1 + 8
    assert run(BitsSweep(elements=(4096,), densities=(0.5,), tails=(1.0,), groups=1))[0].rice > 2


def test_a_row_that_misses_its_target_is_an_error(monkeypatch):
    monkeypatch.setattr("megatron_sparse.bench.codec.bits.TARGET", 1.0)
    assert run_cli("bits", "--elements", "64K", "--density", "0.05", "--groups", "1") == 1


def test_the_documented_rows_are_the_command_s():
    """docs/wire-format.md has the rows of 1 M elements; they are made again."""
    page = (ROOT / "docs" / "wire-format.md").read_text("utf-8")
    for density in BitsSweep().densities:
        line = bits_row(2**20, density).line().strip()
        assert re.sub(" +", " ", line) in re.sub(" +", " ", page)
    assert BitsRow.COLUMNS.header.strip("# ")[:20] in page
