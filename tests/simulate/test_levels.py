"""Whole synchronisations by level: the issue's figures, rows, table and picture."""

from __future__ import annotations

import csv
import json

import pytest

from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.pricing.cluster import find
from megatron_sparse.simulate.levels import Training, level_rows
from tests.commands import run

CLUSTER = find("ethernet_25gbit_8")
PRESETS = {name: SparseConfig.preset(name) for name in ("safe", "balanced")}
FEW = ("direct",)


def rows_of(ranks, training=None, settings=None, cluster=CLUSTER):
    found = level_rows(training or Training(), cluster, settings or PRESETS, ranks, FEW)
    return {(row.preset, row.ranks, row.level): row for row in found}


def test_a_model_of_1500_million_parameters():
    """On 64 and 256 ranks in nodes of 8, 2.5 bits a parameter: docs/levels.md has the numbers."""
    rows = rows_of((64, 256))
    for ranks in (64, 256):
        for preset, least in (("safe", 7.5), ("balanced", 9.5)):
            row = rows[preset, ranks, "node"]
            assert row.speedup >= least
            assert row.gradient_over_rank >= 3
            assert row.parameters == "exact per node"
            assert row.nodes == ranks // 8
            assert row.best_dense_ms <= row.dense_ms
            assert row.modelled


def test_instances_have_a_level_that_compresses_their_sum_alone():
    """Two nodes of 8 as two instances: at `rank` an eighth of the model crosses whole."""
    rows = rows_of((16,), Training(instances=2))
    rank, instance = (rows["safe", 16, level] for level in ("rank", "instance"))
    assert (rank.nodes, instance.nodes) == (2, 2)
    assert instance.across_ms < 0.25 * rank.across_ms
    # Parameters are gathered inside an instance.
    assert rank.parameters == instance.parameters == "raw"
    assert rank.dense_ms > rows_of((8,))["safe", 8, "rank"].dense_ms


def test_sums_of_a_row():
    for row in rows_of((16,)).values():
        assert row.gradient_ms == pytest.approx(row.inside_ms + row.across_ms)
        assert row.total_ms == pytest.approx(row.gradient_ms + row.parameters_ms)
        assert row.speedup == pytest.approx(row.dense_ms / row.total_ms)


def test_on_one_node_every_level_is_dense():
    for row in rows_of((4,)).values():
        assert (row.scheme, row.parameters, row.speedup) == ("dense", "raw", pytest.approx(1.0))


def test_what_never_prunes_is_the_backends_own():
    rows = rows_of((16,), settings={"lossless": SparseConfig.preset("lossless")})
    for row in rows.values():
        assert row.scheme == "dense"
        assert row.gradient_ms == pytest.approx(row.dense_gradient_ms)


def test_without_the_distributed_optimizer_nothing_is_gathered():
    for row in rows_of((16,), Training(sharded=False)).values():
        assert (row.parameters, row.parameters_ms) == ("none", 0.0)
        assert row.dense_ms == row.dense_gradient_ms


def test_narrower_gradients_and_moves_take_less():
    wide, narrow = Training(), Training(gradient_bytes=2, move_bits=1.0)
    wide, narrow = (rows_of((16,), each)["safe", 16, "node"] for each in (wide, narrow))
    assert narrow.dense_gradient_ms < 0.6 * wide.dense_gradient_ms
    assert narrow.inside_ms < wide.inside_ms
    assert narrow.parameters_ms < wide.parameters_ms


def test_moves_as_wide_as_numbers_have_a_price():
    """Once per node they may pay even so: the backend's ring is flat."""
    wide, narrow = (rows_of((8, 16), Training(move_bits=bits)) for bits in (16, 2.5))
    assert all(wide[case].parameters_ms >= row.parameters_ms for case, row in narrow.items())
    assert wide["safe", 8, "node"].parameters == "raw"


def test_nodes_of_different_sizes_are_refused():
    with pytest.raises(ConfigError, match="level node needs nodes of one size"):
        rows_of((12,))


@pytest.mark.parametrize("field", [{"numel": 0}, {"move_bits": 0.0}, {"move_bits": 17.0}])
def test_numbers_out_of_range_are_refused(field):
    with pytest.raises(ConfigError):
        Training(**field)


def test_the_command(tmp_path, capsys):
    out, lines = tmp_path / "figures", tmp_path / "levels.jsonl"
    options = ["--ranks", "8,16", "--schemes", "direct", "--preset", "safe"]
    assert run("levels", *options, "--output", out, "--json", lines) == 0
    printed = capsys.readouterr().out
    assert "1.5 B parameters on ethernet_25gbit_8: fp32 gradients" in printed
    assert "not measured" in printed
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    found = [(row["ranks"], row["level"]) for row in rows]
    assert found == [(8, "rank"), (8, "node"), (16, "rank"), (16, "node")]
    with (out / "levels.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert (out / "levels.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "option",
    [
        *("--gradients=fp64", "--preset=none", "--cluster=none", "--schemes=none"),
        *("--instances=3", "--ranks=12", "--ranks=1", "--parameters=inf", "--move-bits=17"),
    ],
)
def test_mistakes_are_one_error(option, capsys):
    assert run("levels --ranks 16 --schemes direct", option) == 2
    assert capsys.readouterr().err.count("error:") == 1
