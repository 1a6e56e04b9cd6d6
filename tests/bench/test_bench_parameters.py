"""`bench parameters`: bits against the entropy, and the peers."""

from __future__ import annotations

import json
import math

import pytest
import torch

from megatron_sparse.bench.parameters import command
from megatron_sparse.bench.parameters.command import (
    Case,
    conditional_entropy,
    moves_of,
    run,
)
from megatron_sparse.bench.parameters.sweep import ParameterSweep
from megatron_sparse.errors import ConfigError
from megatron_sparse.sparsity.parameter_pairs import ParameterPairWriter

QUICK = {"elements": 200_000, "iters": 1, "warmup": 0}


def test_the_table_and_the_best_coder(tmp_path, capsys):
    """All rows are right; the entropy coder beats zstd by far, and nothing beats the entropy."""
    pytest.importorskip("zstandard")
    pytest.importorskip("lz4")
    rows = run(ParameterSweep(rates=(1e-4,), **QUICK), tmp_path / "rows.jsonl")
    assert "synthetic" in capsys.readouterr().out
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert written == [row.to_dict() for row in rows]
    assert not any(row.wrong for row in rows)
    bits = {row.coder: row.bits for row in rows}
    assert list(bits) == ["rans", "packed", "raw", "zstd", "lz4"]
    assert rows[0].entropy is not None
    assert rows[0].entropy < bits["rans"] < 1.1 * rows[0].entropy
    assert 2 * bits["rans"] < bits["zstd"] < bits["lz4"] < bits["raw"]
    assert 16 < bits["raw"] < 16.01


def test_recorded_pairs_by_iteration_and_by_kind(tmp_path):
    writer = ParameterPairWriter(tmp_path, [1, 2])
    for step in (1, 2, 3):
        weight = torch.full((40,), float(step)).bfloat16()
        named = [(f"module.layers.{layer}.weight", weight) for layer in (0, 1)]
        buckets = {("group-0-1", f"dense0.{b}"): named for b in (0, 1)}
        writer.step_begins(step, buckets)
    rows = run(ParameterSweep(pairs=tmp_path, coders=("raw",), iters=1))
    assert [(row.parameters, row.numel) for row in rows] == [
        ("iteration 1", 160),
        ("iteration 2", 160),
    ]
    (row,) = run(ParameterSweep(pairs=tmp_path, kinds=True, coders=("raw",), iters=1))
    assert (row.parameters, row.numel, row.dtype) == ("layers.weight", 320, "bf16")


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_other_dtypes(dtype):
    rows = run(ParameterSweep(rates=(1e-4,), dtype=dtype, coders=("rans", "packed"), **QUICK))
    assert not any(row.wrong for row in rows)
    assert (rows[0].entropy is None) == (dtype == "fp32")
    assert rows[0].bits < rows[1].bits


def test_a_missing_peer_is_said(monkeypatch, capsys):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(command, "import_module", missing)
    rows = run(ParameterSweep(rates=(1e-4,), **QUICK))
    assert [row.coder for row in rows] == ["rans", "packed", "raw"]
    printed = capsys.readouterr().out
    assert "no rows of zstd: pip install 'megatron-sparse[bench]'" in printed
    assert "no rows of lz4" in printed


def test_the_entropy_of_known_moves():
    """Two contexts: in one nothing moves, in the other half the numbers move by one."""
    old = torch.tensor([1.0, 1.0, 4.0, 4.0]).bfloat16()
    new = torch.tensor([1.0, 1.0, 4.0, 4.03125]).bfloat16()
    case = Case("known", old, new)
    z_N = moves_of(case)
    assert z_N.tolist() == [0, 0, 0, 2]
    assert math.isclose(conditional_entropy(case, z_N), 0.5)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"dtype": "fp64"}, "dtype"),
        ({"coders": ("gzip",)}, "coder"),
        ({"rates": (-1.0,)}, "lr"),
        ({"kinds": True}, "kinds"),
    ],
)
def test_mistakes_are_one_error(options, word):
    with pytest.raises(ConfigError, match=f"{word} is out of range"):
        ParameterSweep(**options)
