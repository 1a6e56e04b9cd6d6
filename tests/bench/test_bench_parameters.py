"""`bench parameters`: bits against the entropy, and the peers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megatron_sparse.bench.codec import parameters
from megatron_sparse.bench.codec.options import ParameterSweep
from megatron_sparse.bench.codec.parameters import (
    ParameterPair,
    conditional_entropy,
    measure,
    moves_of,
    run,
)
from tests.bench.running import read_rows

PAIR = Path(__file__).resolve().parents[1] / "data/parameter_pair.pt"
QUICK = {"elements": 200_000, "iters": 1, "warmup": 0}


def test_the_table_and_the_best_coder(tmp_path, capsys):
    """All rows are right; the entropy coder beats zstd by far, and nothing beats the entropy."""
    pytest.importorskip("zstandard")
    rows = run(ParameterSweep(rates=(1e-4,), **QUICK), tmp_path / "rows.jsonl")
    assert "synthetic" in capsys.readouterr().out
    written = read_rows(tmp_path / "rows.jsonl")
    assert written == [row.to_dict() for row in rows]
    assert not any(row.wrong for row in rows)
    bits = {row.coder: row.bits for row in rows}
    assert list(bits) == ["rans", "packed", "zstd"]
    assert rows[0].entropy is not None
    assert rows[0].entropy < bits["rans"] < 1.1 * rows[0].entropy
    assert 2 * bits["rans"] < bits["zstd"] < 16


def test_moves_of_a_real_run():
    """Coders and entropy stand to one another as on synthetic moves.

    The file: `old` and `new`, bf16, a few thousand numbers of each kind of parameter of the
    quickstart's GPT before and after iteration 50 of 52 at a learning rate of 3e-5; `names` and
    `sizes` of the kinds.
    """
    pair = torch.load(PAIR, weights_only=True)
    assert sum(pair["sizes"]) == pair["old"].numel() == 14_600
    case = ParameterPair("iteration 50", pair["old"], pair["new"])
    rows = list(measure(case, ["rans", "packed", "raw"], warmup=0, iters=1))
    assert not any(row.wrong for row in rows)
    bits = {row.coder: row.bits for row in rows}
    assert rows[0].entropy is not None
    # 5 % as in docs/parameters.md, and one short chunk's 16 tables of 40 bytes.
    tables = 8 * 16 * 40 / rows[0].numel
    assert rows[0].entropy < bits["rans"] < 1.05 * rows[0].entropy + tables
    assert bits["rans"] < bits["packed"] < bits["raw"] / 2


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_other_dtypes(dtype):
    rows = run(ParameterSweep(rates=(1e-4,), dtype=dtype, coders=("rans", "packed"), **QUICK))
    assert not any(row.wrong for row in rows)
    assert (rows[0].entropy is None) == (dtype == "fp32")
    assert rows[0].bits < rows[1].bits


def test_a_missing_peer_is_said(monkeypatch, capsys):
    monkeypatch.setattr(parameters, "is_installed", lambda name: False)
    rows = run(ParameterSweep(rates=(1e-4,), **QUICK))
    assert [row.coder for row in rows] == ["rans", "packed"]
    printed = capsys.readouterr().out
    assert "no rows of zstd: pip install 'megatron-sparse[bench]'" in printed


def test_the_entropy_of_known_moves():
    """Two contexts: in one nothing moves, in the other half the numbers move by one."""
    old = torch.tensor([1.0, 1.0, 4.0, 4.0]).bfloat16()
    new = torch.tensor([1.0, 1.0, 4.0, 4.03125]).bfloat16()
    case = ParameterPair("known", old, new)
    z_N = moves_of(case)
    assert z_N.tolist() == [0, 0, 0, 2]
    assert math.isclose(conditional_entropy(case, z_N), 0.5)
