"""`bench codecs` checks before it times, writes what the table says, and guards the baseline."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_sparse import cli
from megatron_sparse.bench import codec_baseline, codec_cases, codecs
from megatron_sparse.errors import ConfigError, MegatronSparseError

BASELINE = Path(__file__).resolve().parents[2] / "benchmarks" / "baseline_codecs.json"
SMALL = {"min_bytes": 2**16, "max_bytes": 2**16, "warmup": 1, "iters": 2, "threads": 1}


@pytest.fixture(autouse=True)
def quick_oracle(monkeypatch):
    monkeypatch.setattr(codec_cases, "ORACLE_NUMEL", 2**13)


def test_rows_are_right_timed_and_written(tmp_path, capsys):
    path, threads = tmp_path / "rows.jsonl", torch.get_num_threads()
    rows = codecs.run(codecs.Sweep(densities=(0.01, 1.0), dtypes=("fp32", "bf16"), **SMALL), path)
    assert torch.get_num_threads() == threads
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    assert {row["op"] for row in rows} == set(codecs.OPS)
    assert {row["format"] for row in rows} == {"coo", "pici", "pici_paper", "blocks", "dense"}
    assert {row["peer"] for row in rows} >= {"torch nonzero", "torch to_sparse", "numpy"}
    for row in rows:
        assert row["wrong"] == 0
        timed = ("time_us", "copy_us", "ratio", "peer_us")
        assert all(row[field] > 0 and math.isfinite(row[field]) for field in timed)
        assert (row["stream_us"] is None) == (row["op"] == "prune_encode")
    printed = capsys.readouterr().out.splitlines()
    assert "#wrong" in printed[1]
    assert len(printed) == 2 + len(rows)


def test_a_wrong_result_is_counted_and_not_timed(monkeypatch):
    real = codec_cases.ops.prune_encode

    def broken(*arguments, **options):
        sizes, nnz = real(*arguments, **options)
        arguments[10][60] ^= 1  # a byte of the message's first section
        return sizes, nnz

    monkeypatch.setattr(codec_cases.ops, "prune_encode", broken)
    (row, *_) = codecs.run(codecs.Sweep(densities=(0.01,), forms=("coo",), **SMALL))
    assert row["wrong"] == 1
    assert row["time_us"] is None
    with pytest.raises(MegatronSparseError, match="a codec is wrong"):
        codec_baseline.compare([row], {}, 1.0)


def test_a_worsened_baseline_fails(tmp_path):
    """Against a baseline of this very machine, and one that says half and a tenth of it."""
    sweep = codecs.Sweep(densities=(0.01,), forms=("coo", "pici"), peers=False, **SMALL)
    path = tmp_path / "baseline.json"
    codecs.run(sweep, save_baseline=path)
    # Other tests may run beside this one: noise tenfold.
    codecs.run(sweep, check=path, margin=10 / codec_baseline.LEAST_NOISE)
    content = json.loads(path.read_text())
    for row in content["rows"]:
        row["ratio"] /= 1000
    path.write_text(json.dumps(content))
    with pytest.raises(MegatronSparseError, match="6 of 6 rows are slower than the baseline"):
        codecs.run(sweep, check=path, margin=10 / codec_baseline.LEAST_NOISE)


def test_the_committed_baseline_holds(capsys):
    """At 1 MiB and with 16 times the noise (five times the ratio): tests may run beside this one.

    What it finds is a codec that lost its vectors, not one that lost a few percent.
    """
    with pytest.raises(SystemExit) as done:
        cli.main([
            "bench", "codecs", "--max-bytes", "1M", "--density", "0.01,0.5", "--format",
            "coo,pici", "--no-peers", "--threads", "1", "--warmup", "1", "--iters", "9", "--check",
            str(BASELINE), "--margin", "16",
        ])  # fmt: skip
    captured = capsys.readouterr()
    assert done.value.code == 0, captured.err
    assert "rows are within the baseline" in captured.out


@pytest.mark.parametrize("content", ["", "{}", '{"rows": [{"op": 1}]}', "[]"])
def test_a_file_that_is_no_baseline_is_one_error(content, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="the baseline cannot be read"):
        codec_baseline.read(path)


def test_nothing_to_compare_is_an_error():
    row = {"op": "encode", "format": "coo", "dtype": "fp32", "density": 0.1, "count": 1, "ratio": 1}
    with pytest.raises(ConfigError, match="nothing that was measured"):
        codec_baseline.compare([row], {}, 1.0)


@pytest.mark.parametrize(("argument", "value"), [
    ("min_bytes", 0), ("max_bytes", 2), ("densities", [1.5]), ("dtypes", ["fp8"]),
    ("forms", ["csr"]), ("ops", ["sort"]), ("iters", 0), ("threads", 0), ("warmup", -1),
])  # fmt: skip
def test_refuses(argument, value):
    with pytest.raises(ConfigError, match="bench codecs"):
        codecs.Sweep(**({"min_bytes": 4, "max_bytes": 64} | {argument: value}))
