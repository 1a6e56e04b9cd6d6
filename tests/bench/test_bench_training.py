"""`bench training`: the runs that it starts, and its results. A fake replaces Megatron.

`tests/integration/test_netbed.py` runs the real one.
"""

from pathlib import Path

import pytest

from megatron_sparse.bench.study import training
from megatron_sparse.bench.study.options import TrainingOptions
from megatron_sparse.errors import MegatronSparseError
from megatron_sparse.reduction.straggler_policy import SLOW_RANK
from megatron_sparse.run.composition import compose
from tests.bench.study_runs import FakeRuns, leave, print_run
from tests.commands import run
from tests.tracked import json_lines


def options(out: Path = Path("out"), **changed) -> TrainingOptions:
    fields = {"ranks": 2, "warmup": 1, "iters": 3, "out": out}
    return TrainingOptions(**fields | changed)


def configs(given: TrainingOptions) -> list:
    runs = [training.run_of(given, variant) for variant in training.variants(given)]
    return [compose(run.arguments) for run in runs]


def rows_of(given: TrainingOptions) -> list[tuple[str, float, str]]:
    return [(row.scheme, row.density, row.level) for row in training.variants(given)]


@pytest.fixture
def runs(monkeypatch) -> FakeRuns:
    """Each run has 4 iterations of 100, 10, 30, 20 ms, over its number."""

    def train(words, log):
        times_ms = [ms / len(fake.commands) for ms in (100, 10, 30, 20)]
        print_run(log, times_ms, (9, 8, 7, 6))
        lines = [
            {
                "stage_ms": {"host_wait": ms, "param_wait": 2 * ms},
                "param_wire_bytes": 5 * ms,
                "param_dense_bytes": 3000,
                "wire_bytes": 10 * ms,
                "inside_bytes": 0,
                "dense_bytes": 4000,
                "host_cpu_ms": 0.5 * ms,
                "schemes": {"direct": 3, "dense": 2},
            }
            for ms in (9, 1, 3, 2)
        ]
        leave(words, "breakdown.jsonl", lines)

    fake = FakeRuns(monkeypatch, train)
    return fake


def test_rows(runs, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    training.run(options(tmp_path / "out"), path)
    plain, direct = json_lines(path)
    assert (plain["iteration_ms"], plain["slowest_ms"], plain["speedup"]) == (20, 30, 1)
    assert plain["wire_bytes"] is plain["host_cpu_us"] is None
    assert direct["host_cpu_us"] == 200  # 1 ms of five buckets
    assert (direct["iteration_ms"], direct["speedup"]) == (10, 2)
    assert (direct["exposed_ms"], direct["wire_bytes"], direct["dense_bytes"]) == (2, 20, 4000)
    parameters = direct["param_exposed_ms"], direct["param_wire_bytes"]
    assert (*parameters, direct["param_dense_bytes"]) == (4, 10, 3000)
    assert (plain["parameters"], direct["parameters"]) == (None, "auto")
    assert (direct["loss_first"], direct["loss_last"]) == (9, 6)
    assert "plugin=false" in runs.commands[0]
    assert "scheme=direct" in runs.commands[1]
    assert "2.00" in capsys.readouterr().out.splitlines()[-1]


def test_a_row_for_each_way_to_gather_parameters(runs, tmp_path):
    given = options(
        tmp_path / "out",
        schemes=["plain", "dense"],
        methods=["raw", "exact"],
        overrides=["training.use_distributed_optimizer=true"],
    )
    assert [row.parameters for row in training.run(given)] == [None, "raw", "exact"]
    assert not any("parameters." in word for word in runs.commands[0])
    assert "parameters.method=raw" in runs.commands[1]
    assert "parameters.method=exact" in runs.commands[2]
    assert runs.names == ["plain_1", "dense_1_raw", "dense_1_exact"]


def test_levels_have_rows_of_sparse_schemes_and_nodes_have_several_ranks(runs, tmp_path):
    schemes, levels = ["plain", "dense", "direct"], ["rank", "node"]
    bed = {"netbed": True, "mbit": 500, "ranks": 4, "delay_ms": 30, "sites": 2}
    given = options(tmp_path, schemes=schemes, levels=levels, ranks_per_node=2, **bed)
    expected = [("plain", "rank"), ("dense", "rank"), ("direct", "rank"), ("direct", "node")]
    assert [(scheme, level) for scheme, _, level in rows_of(given)] == expected
    config = configs(given)[-1]
    assert (config.cluster.nodes, config.cluster.ranks_per_node) == (2, 2)
    assert (config.compression.level, config.training.iterations) == ("node", 4)
    row = training.run(given)[-1]
    assert (row.mbit, row.delay_ms, row.sites) == (500, 30, 2)
    assert runs.names[-1] == "direct_0.01_node"
    assert set(runs.places) == {("run_netbed", 4, (500, 30, 2), 2)}
    # With one rank on each host, hosts are nodes.
    config = configs(options(schemes=["direct"], densities=[0.05], **bed))[0]
    assert (config.cluster.nodes, config.cluster.ranks_per_node) == (4, 1)
    assert config.compression.density == 0.05


def test_bits_are_those_of_the_product_unless_an_argument_says_otherwise():
    def bits(*overrides):
        found = configs(options(schemes=["direct", "zen"], overrides=overrides))
        return [(c.sparse.compression.value_bits, c.sparse.scheme.sum_bits) for c in found]

    assert bits() == [(4, 8), (None, None)]
    assert bits("compression.value_bits=null") == [(None, None)] * 2


def test_presets_have_rows_of_their_own_density_and_bits():
    given = options(schemes=["plain"], presets=["lossless", "balanced", "auto"])
    assert [row.run_name for row in training.variants(given)] == [
        *("plain_1", "lossless_1", "balanced_0.07", "auto_0.22")
    ]
    _, lossless, balanced, auto = (config.compression for config in configs(given))
    assert (lossless.enabled, balanced.density, balanced.value_bits) == (False, 0.07, 3)
    assert auto.density == "auto"


def test_dense_schemes_have_one_row():
    rows = rows_of(options(schemes=["plain", "dense_ring", "zen"], densities=[0.1, 0.2]))
    densities = [("plain", 1.0), ("dense_ring", 1.0), ("zen", 0.1), ("zen", 0.2)]
    assert [row[:2] for row in rows] == densities


def test_the_slow_rank_sleeps_in_every_row_and_is_pinned_where_it_can_be():
    slow = options(schemes=["dense", "straggler"], ranks=4, slow_rank=1, slow_ms=300.0)
    assert [row[:2] for row in rows_of(slow)] == [("dense", 1.0), ("straggler", 1.0)]
    dense, aware = configs(slow)
    for config in (dense, aware):
        assert config.cluster.env[SLOW_RANK] == "1:300"
    assert dense.sparse.straggler.mode == "off"
    assert (aware.sparse.straggler.mode, aware.straggler.rank) == ("pinned", 1)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("training", "exit code 3, 0 iterations"),
        ("convergence --iters=100 --model=gpt --setting=dense", "the run gpt-dense-1 failed"),
        ("time-to-loss", "the run plain-loopback-1 failed"),
    ],
)
def test_a_run_that_fails_shows_the_end_of_its_log(command, said, tmp_path, capsys, monkeypatch):
    def train(words, log):
        log.write("it was the memory\n")
        return 3

    FakeRuns(monkeypatch, train)
    assert run("bench", command, "--output", tmp_path) == MegatronSparseError.exit_code
    error = capsys.readouterr().err
    for words in (said, "exit code 3", "it was the memory"):
        assert words in error
    assert not list(tmp_path.glob("*/outcome.json"))
