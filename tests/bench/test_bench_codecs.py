"""`bench codecs`: checks before timing, rows on disk and on screen, the baseline."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_sparse.bench.codecs import baseline as codec_baseline
from megatron_sparse.bench.codecs import cases, command, hash_cases, rice_cases
from megatron_sparse.cli import main
from megatron_sparse.errors import ConfigError, MegatronSparseError

BASELINE = Path(__file__).resolve().parents[2] / "benchmarks" / "baseline_codecs.json"
SMALL = {"min_bytes": 2**16, "max_bytes": 2**16, "warmup": 1, "iters": 2, "threads": 1}


@pytest.fixture(autouse=True)
def quick_oracle(monkeypatch):
    monkeypatch.setattr(cases, "ORACLE_NUMEL", 2**13)


def test_rows_are_right_timed_and_written(tmp_path, capsys):
    path, threads = tmp_path / "rows.jsonl", torch.get_num_threads()
    rows = command.run(command.Sweep(densities=(0.01, 1.0), dtypes=("fp32", "bf16"), **SMALL), path)
    assert torch.get_num_threads() == threads
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    assert {row["op"] for row in rows} == {"prune_encode", "encode", "decode_add"}
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


def test_rice_records_are_in_the_same_table():
    forms = ("rice", "rice_q8", "rice_q4", "rice_q3", "rice_q2")
    rows = command.run(command.Sweep(densities=(0.05,), dtypes=("fp32",), forms=forms, **SMALL))
    done = {(row["format"], row["op"]) for row in rows}
    ops = ("prune_encode", "decode_add", "decode_sum")
    assert done == {(form, op) for form in forms for op in ops}
    assert {row["peer"] for row in rows} >= {"torch ops", "torch ops, zstd", "one by one"}
    assert all(row["wrong"] == 0 and row["time_us"] > 0 and row["ratio"] > 0 for row in rows)


def test_wrong_rice_records_are_counted_and_not_timed(monkeypatch):
    real = rice_cases.ops.decode_add_

    def broken(acc_N, *arguments, **options):
        real(acc_N, *arguments, **options)
        acc_N[-1] += 1

    monkeypatch.setattr(rice_cases.ops, "decode_add_", broken)
    for row in command.run(command.Sweep(densities=(0.05,), forms=("rice_q4",), **SMALL)):
        assert (row["wrong"] > 0, row["time_us"]) == (True, None)


def test_hashing_and_rows_are_in_the_same_table(monkeypatch):
    monkeypatch.setattr(hash_cases, "SMALL_NUMEL", 2**10)
    forms = ("hash_bitmap", "pairs", "row_sparse")
    rows = command.run(command.Sweep(densities=(0.01, 0.5), dtypes=("bf16",), forms=forms, **SMALL))
    done = {(row["format"], row["op"]) for row in rows}
    both = {(form, op) for form in forms[:2] for op in ("encode", "decode_add")}
    steps = {("row_sparse", op) for op in ("encode", "row_union", "row_match", "row_expand")}
    assert done == both | steps | {("pairs", "hash_partition")}
    assert all(row["wrong"] == 0 and row["time_us"] > 0 and row["ratio"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("module", "function", "form"),
    [
        (hash_cases.hash_bitmap, "encode", "hash_bitmap"),
        (hash_cases.hierarchical_hash, "split", "pairs"),
        (hash_cases.row_sparse, "match", "row_sparse"),
    ],
)
def test_wrong_hashing_is_counted_and_not_timed(module, function, form, monkeypatch):
    real = getattr(module, function)

    def broken(*arguments, **options):
        result = real(*arguments, **options)
        (result.values_K if function == "split" else result)[-1] += 1
        return result

    monkeypatch.setattr(module, function, broken)
    sweep = command.Sweep(densities=(0.5,), forms=(form,), **SMALL)
    (row, *_) = [row for row in command.run(sweep) if row["wrong"]]
    assert row["time_us"] is None


def test_a_wrong_result_is_counted_and_not_timed(monkeypatch):
    real = cases.ops.prune_encode

    def broken(*arguments, **options):
        sizes, nnz = real(*arguments, **options)
        arguments[4][60] ^= 1  # a byte of the message's first section
        return sizes, nnz

    monkeypatch.setattr(cases.ops, "prune_encode", broken)
    (row, *_) = command.run(command.Sweep(densities=(0.01,), forms=("coo",), **SMALL))
    assert row["wrong"] == 1
    assert row["time_us"] is None
    with pytest.raises(MegatronSparseError, match="a codec is wrong"):
        codec_baseline.compare([row], {}, 1.0)


def test_a_planted_slowdown_fails(tmp_path, monkeypatch):
    """Against a baseline of this machine: first unchanged, then with an encoder 400 times slower.

    Other tests may run beside this one, so a row may take eleven times its baseline, whatever noise
    the baseline states.
    """
    small = SMALL | {"iters": 9}
    sweep = command.Sweep(densities=(0.01,), forms=("coo", "pici"), peers=False, **small)
    path, margin = tmp_path / "baseline.json", 10 / codec_baseline.LEAST_NOISE
    command.run(sweep, save_baseline=path)
    baseline = json.loads(path.read_text())
    for row in baseline["rows"]:
        row["noise"] = codec_baseline.LEAST_NOISE
    path.write_text(json.dumps(baseline))
    command.run(sweep, check=path, margin=margin)
    real = cases.ops.encode

    def slow(*arguments, **options):
        for _ in range(400):
            sizes = real(*arguments, **options)
        return sizes

    monkeypatch.setattr(cases.ops, "encode", slow)
    with pytest.raises(MegatronSparseError, match="2 of 6 rows are slower") as caught:
        command.run(sweep, check=path, margin=margin)
    assert "encode coo" in caught.value.got
    assert "encode pici" in caught.value.got
    assert "prune_encode" not in caught.value.got


def test_the_committed_baseline_holds(capsys):
    """At 1 MiB and with 16 times the noise (five times the ratio): tests may run beside this one.

    It finds a codec that is no longer vectorised, not one that is a few percent slower.
    """
    with pytest.raises(SystemExit) as done:
        main.main(
            [
                "bench",
                "codecs",
                "--max-bytes",
                "1M",
                "--density",
                "0.01,0.5",
                "--format",
                "coo,pici",
                "--no-peers",
                "--threads",
                "1",
                "--warmup",
                "1",
                "--iters",
                "9",
                "--check",
                str(BASELINE),
                "--margin",
                "16",
            ]
        )
    captured = capsys.readouterr()
    assert done.value.code == 0, captured.err
    assert "rows are within the baseline" in captured.out


@pytest.mark.parametrize("content", ["", "{}", '{"rows": [{"op": 1}]}', "[]"])
def test_a_file_that_is_no_baseline_is_one_error(content, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="the baseline cannot be read"):
        codec_baseline.read(path)


def test_the_documentation_s_table_has_a_line_for_each_operation(tmp_path):
    path, script = tmp_path / "rows.jsonl", BASELINE.with_name("codec_tables.py")
    command.run(command.Sweep(densities=(0.01, 1.0), forms=("coo", "pici"), **SMALL), path)
    made = subprocess.run(
        [sys.executable, str(script), str(path)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(made) == 2 + 2 * 3 + 3  # both formats become dense; one row is left
    assert all(line.count("|") == made[0].count("|") for line in made)
    assert "torch nonzero" in next(line for line in made if "| encode | coo |" in line)


def test_nothing_to_compare_is_an_error():
    row = {"op": "encode", "format": "coo", "dtype": "fp32", "density": 0.1, "count": 1, "ratio": 1}
    with pytest.raises(ConfigError, match="nothing that was measured"):
        codec_baseline.compare([row], {}, 1.0)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("min_bytes", 0),
        ("max_bytes", 2),
        ("densities", [1.5]),
        ("dtypes", ["fp8"]),
        ("forms", ["csr"]),
        ("ops", ["sort"]),
        ("iters", 0),
        ("threads", 0),
        ("warmup", -1),
        ("device", "tpu"),
    ],
)
def test_refuses(argument, value):
    with pytest.raises(ConfigError, match="bench codecs"):
        command.Sweep(**({"min_bytes": 4, "max_bytes": 64} | {argument: value}))
