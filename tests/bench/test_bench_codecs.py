"""`bench codecs` and `bench parameters`.

Checks before timing, rows on disk and screen; bits of moves against their entropy.
"""

import math
import sys
from itertools import product

import pytest
import torch

from megatron_sparse.bench.codec import codecs, hashing, parameters, records
from megatron_sparse.bench.codec.frame import CodecRow
from megatron_sparse.bench.codec.options import OPS, RICE_FORMS, CodecSweep, ParameterSweep
from megatron_sparse.errors import ConfigError
from megatron_sparse.formats.message import WIRE_CODES
from tests.programs import ROOT, ended
from tests.tracked import json_lines

SMALL = {"min_bytes": 2**16, "max_bytes": 2**16, "warmup": 1, "iters": 2, "threads": 1}


def is_timed(row: CodecRow, *more: str) -> bool:
    """It is right, and its times are positive; `more` names further ones."""
    times = [getattr(row, field) for field in ("time_us", "copy_us", "ratio", *more)]
    return row.wrong == 0 and all(time > 0 and math.isfinite(time) for time in times)


@pytest.fixture(autouse=True)
def quick_oracle(monkeypatch):
    monkeypatch.setattr(records, "ORACLE_NUMEL", 2**13)
    monkeypatch.setattr(hashing, "SMALL_NUMEL", 2**10)


RECORD_OPS = ("prune_encode", "encode", "decode_add", "place", "decode_sum", "seal", "verify")


def rows_of(*forms: str, density: float = 0.5, dtype: str = "fp32", **changed) -> list[CodecRow]:
    sweep = CodecSweep(densities=(density,), dtypes=(dtype,), forms=forms, **SMALL | changed)
    return codecs.run(sweep)


def test_rows_are_right_timed_and_written(tmp_path, capsys):
    path, threads = tmp_path / "rows.jsonl", torch.get_num_threads()
    sweep = CodecSweep(densities=(0.01, 1.0), dtypes=("fp32", "bf16"), ops=OPS, **SMALL)
    rows = codecs.run(sweep, path)
    assert torch.get_num_threads() == threads
    assert json_lines(path) == [row.to_dict() for row in rows]
    printed = capsys.readouterr().out.splitlines()
    assert "#wrong" in printed[3]
    assert len(printed) == 4 + len(rows)
    assert {row.op for row in rows} == {"prune", *RECORD_OPS}
    assert {row.format for row in rows} == {"-", "coo", "pici", "pici_paper", "blocks", "dense"}
    assert {row.peer for row in rows} >= {"torch nonzero", "torch index_add_"}
    for row in rows:
        assert is_timed(row, *(() if row.op == "place" else ("peer_us",)))


def test_rice_records_are_in_the_same_table():
    rows = rows_of(*RICE_FORMS, density=0.05)
    done = {(row.format, row.op) for row in rows}
    assert done == set(product(RICE_FORMS, set(RECORD_OPS) - {"encode"}))
    assert {row.density for row in rows if row.format == "dense_q4"} == {1.0}
    assert {row.peer for row in rows} >= {"torch ops", "one by one"}
    assert all(map(is_timed, rows))


@pytest.mark.parametrize("density", [0.01, 0.5])
def test_hashing_and_rows_are_in_the_same_table(density):
    rows = rows_of("hash_bitmap", "pairs", "row_sparse", density=density, dtype="bf16")
    done = {(row.format, row.op) for row in rows}
    both = set(product(("hash_bitmap", "pairs"), ("encode", "decode_add")))
    assert done == both | {("row_sparse", "encode"), ("pairs", "hash_partition")}
    assert all(map(is_timed, rows))


@pytest.mark.parametrize(
    ("module", "function", "breaks", "form", "wrong"),
    [
        # A byte of the message's first section.
        (records.ops, "prune_encode", lambda _, given: given[4][60:61].bitwise_xor_(1), "coo", 1),
        (records.ops, "prune_", lambda _, given: given[1].residual_N[-1:].add_(1), "coo", None),
        (records.ops, "decode_add_", lambda _, given: given[0][-1:].add_(1), "rice_q4", None),
        (hashing.hash_bitmap, "encode", lambda made, _: made[-1:].add_(1), "hash_bitmap", None),
        (
            hashing.hierarchical_hash,
            "split",
            lambda made, _: made.values_K[-1:].add_(1),
            "pairs",
            None,
        ),
        (
            hashing.RowPart,
            "decode",
            lambda made, _: made.indices_K[-1:].add_(1),
            "row_sparse",
            None,
        ),
    ],
)
def test_what_is_wrong_is_counted_and_not_timed(module, function, breaks, form, wrong, monkeypatch):
    real = getattr(module, function)

    def broken(*arguments, **options):
        result = real(*arguments, **options)
        breaks(result, arguments)
        return result

    monkeypatch.setattr(module, function, broken)
    row = next(row for row in rows_of(form) if row.wrong)
    assert wrong in (None, row.wrong)
    assert row.time_us is None


USUAL_RATIOS = {
    ("prune_encode", "coo"): (3.6, 3.1),
    ("encode", "coo"): (4.5, 4.1),
    ("decode_add", "coo"): (2.9, 4.6),
    ("prune_encode", "pici"): (3.4, 3.1),
    ("encode", "pici"): (4.3, 4.0),
    ("decode_add", "pici"): (3.6, 1.4),
}
"""Time over that of a copy at 1 MiB, at densities 1 % and 50 %, with AVX-512 and one thread."""


def test_a_codec_that_is_no_longer_vectorised_is_found():
    """With five times the usual ratio as the limit: other tests may run beside this one."""
    fixed = dict(min_bytes=2**20, max_bytes=2**20, iters=9, threads=1, peers=False)
    ops, forms = ("prune_encode", "encode", "decode_add"), ("coo", "pici")
    rows = codecs.run(CodecSweep(densities=(0.01, 0.5), forms=forms, ops=ops, **fixed))
    assert len(rows) == 12
    for row in rows:
        low, high = USUAL_RATIOS[row.op, row.format]
        assert row.ratio < 5 * (low if row.density == 0.01 else high), row


def test_the_documentation_s_table_has_a_line_for_each_operation(tmp_path):
    path, script = tmp_path / "rows.jsonl", ROOT / "benchmarks" / "codec_tables.py"
    shown = {"forms": ("coo", "pici"), "ops": ("prune_encode", "encode", "decode_add")}
    codecs.run(CodecSweep(densities=(0.01, 1.0), **shown, **SMALL), path)
    made = ended([sys.executable, script, path], check=True).stdout.splitlines()
    assert len(made) == 2 + 2 * 3 + 3  # both formats become dense; one row is left
    assert all(line.count("|") == made[0].count("|") for line in made)
    assert "torch nonzero" in next(line for line in made if "| encode | coo |" in line)


@pytest.mark.parametrize(
    ("sweep", "argument", "value"),
    [
        (CodecSweep, "max_bytes", 2),
        (CodecSweep, "iters", 0),
        (CodecSweep, "dtypes", ["fp8"]),
        (ParameterSweep, "rates", (-1.0,)),
    ],
)
def test_every_bench_of_codecs_refuses(sweep, argument, value):
    with pytest.raises(ConfigError, match=rf"{sweep.NAME}: [\w-]+ is out of range"):
        sweep(**{argument: value})


PAIR = ROOT / "tests/data/parameter_pair.pt"
QUICK = {"elements": 200_000, "iters": 1, "warmup": 0}


def test_the_coder_is_right_and_near_the_entropy(tmp_path, capsys):
    rows = parameters.run(ParameterSweep(rates=(1e-4,), **QUICK), tmp_path / "rows.jsonl")
    assert "synthetic" in capsys.readouterr().out
    written = json_lines(tmp_path / "rows.jsonl")
    assert written == [row.to_dict() for row in rows]
    (row,) = rows
    assert (row.coder, row.wrong) == ("rans", 0)
    assert row.entropy is not None
    assert row.entropy < row.bits < 1.1 * row.entropy


def test_moves_of_a_real_run():
    """Coder and entropy stand to one another as on synthetic moves.

    The file: `old` and `new`, bf16, a few thousand numbers of each kind of parameter of the
    quickstart's GPT before and after iteration 50 of 52 at a learning rate of 3e-5; `names` and
    `sizes` of the kinds.
    """
    pair = torch.load(PAIR, weights_only=True)
    assert sum(pair["sizes"]) == pair["old"].numel() == 14_600
    case = parameters.ParameterPair("iteration 50", pair["old"], pair["new"])
    row = parameters.measure(case, warmup=0, iters=1)
    assert row.wrong == 0
    assert row.entropy is not None
    # 5 % as in docs/parameters.md, and one short chunk's 16 tables of 40 bytes.
    tables = 8 * 16 * 40 / row.numel
    assert row.entropy < row.bits < 1.05 * row.entropy + tables
    assert row.bits < 8


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_other_dtypes(dtype):
    rows = parameters.run(ParameterSweep(rates=(1e-4,), dtype=dtype, **QUICK))
    assert not any(row.wrong for row in rows)
    assert (rows[0].entropy is None) == (dtype == "fp32")
    assert rows[0].bits < {"fp32": 32, "fp16": 16}[dtype]


def test_the_entropy_of_known_moves():
    """Two contexts: in one nothing moves, in the other half the numbers move by one."""
    old = torch.tensor([1.0, 1.0, 4.0, 4.0]).bfloat16()
    new = torch.tensor([1.0, 1.0, 4.0, 4.03125]).bfloat16()
    case = parameters.ParameterPair("known", old, new)
    moves, _ = parameters.moves_of(case, WIRE_CODES["bf16"])
    assert moves.tolist() == [0, 0, 0, 2]
    assert math.isclose(parameters.conditional_entropy(case, WIRE_CODES["bf16"]), 0.5)
