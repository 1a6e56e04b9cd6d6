"""`bench training`: the runs that it starts, and its results. A fake replaces Megatron.

`tests/integration/test_netbed.py` runs the real one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_sparse.bench import training
from megatron_sparse.cli import main
from megatron_sparse.errors import ConfigError, MegatronSparseError
from megatron_sparse.run import local_ranks
from megatron_sparse.run.composition import compose

LINE = (
    "[1]  [2026-01-01 00:00:00.000000] iteration        {i}/       4 | consumed samples:   2 | "
    "elapsed time per iteration (ms): {ms} | learning rate: 2.8E-04 | lm loss: {loss}E+00 | "
    "loss scale: 1.0 |\n"
)


def setting(**changed) -> training.Setting:
    fields = {
        "schemes": ["plain", "direct"],
        "densities": [0.01],
        "ranks": 2,
        "mbit": None,
        "warmup": 1,
        "iters": 3,
        "overrides": [],
    }
    return training.Setting(**fields | changed)


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Replaces the runs: each has 4 iterations of 100, 10, 30, 20 ms times its number."""
    commands = []

    def run(command, log):
        commands.append(command)
        words = dict(word.split("=", 1) for word in command if "=" in word)
        for i, ms in enumerate((100, 10, 30, 20)):
            log.write(LINE.format(i=i + 1, ms=ms / len(commands), loss=9 - i))
        folder = Path(words["runs_dir"]) / words["name"]
        folder.mkdir()
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
        (folder / "breakdown.jsonl").write_text("".join(json.dumps(li) + "\n" for li in lines))
        return 0

    monkeypatch.setattr(local_ranks, "run", run)
    monkeypatch.setattr(training, "foreign_share", lambda *_: 0.0)
    return commands


def test_rows(runs, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    rows = training.run(setting(), tmp_path / "out", path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    plain, direct = rows
    assert (plain["iteration_ms"], plain["slowest_ms"], plain["speedup"]) == (20, 30, 1)
    assert plain["wire_bytes"] is plain["host_cpu_us"] is None
    assert direct["host_cpu_us"] == 200  # 1 ms of five buckets
    assert (direct["iteration_ms"], direct["speedup"]) == (10, 2)
    assert (direct["exposed_ms"], direct["wire_bytes"], direct["dense_bytes"]) == (2, 20, 4000)
    parameters = direct["param_exposed_ms"], direct["param_wire_bytes"]
    assert (*parameters, direct["param_dense_bytes"]) == (4, 10, 3000)
    assert (plain["parameters"], direct["parameters"]) == (None, "auto")
    assert (direct["loss_first"], direct["loss_last"]) == (9, 6)
    assert "plugin=false" in runs[0]
    assert "scheme=direct" in runs[1]
    assert "2.00" in capsys.readouterr().out.splitlines()[-1]


def test_a_row_for_each_way_to_gather_parameters(runs, tmp_path):
    given = setting(
        schemes=["plain", "dense"],
        parameters=["raw", "exact"],
        overrides=["training.use_distributed_optimizer=true"],
    )
    rows = training.run(given, tmp_path / "out")
    assert [row["parameters"] for row in rows] == [None, "raw", "exact"]
    assert not any("parameters." in word for word in runs[0])
    assert "parameters.method=raw" in runs[1]
    assert "parameters.method=exact" in runs[2]
    names = {word for command in runs for word in command if word.startswith("name=")}
    assert names == {"name=plain_1", "name=dense_1_raw", "name=dense_1_exact"}


def test_hosts_of_the_test_bed_are_nodes():
    arguments = setting(mbit=500, ranks=4).arguments(
        training.Variant("direct", 0.05, "auto"), Path("out")
    )
    config = compose(arguments)
    assert (config.cluster.nodes, config.cluster.ranks_per_node) == (4, 1)
    assert config.compression.density == 0.05
    assert config.training.iterations == 4


def test_levels_have_rows_of_sparse_schemes_and_nodes_have_several_ranks():
    given = setting(
        schemes=["plain", "dense", "direct"],
        mbit=500,
        ranks=4,
        ranks_per_node=2,
        levels=["rank", "node"],
    )
    rows = list(given.rows())
    assert [(row.scheme, row.level) for row in rows] == [
        ("plain", "rank"),
        ("dense", "rank"),
        ("direct", "rank"),
        ("direct", "node"),
    ]
    assert rows[-1].run_name == "direct_0.01_node"
    config = compose(given.arguments(rows[-1], Path("out")))
    assert (config.cluster.nodes, config.cluster.ranks_per_node) == (2, 2)
    assert config.compression.level == "node"


def test_dense_schemes_have_one_row():
    rows = setting(schemes=["plain", "dense_ring", "zen"], densities=[0.1, 0.2]).rows()
    found = [(row.scheme, row.density) for row in rows]
    assert found == [("plain", 1.0), ("dense_ring", 1.0), ("zen", 0.1), ("zen", 0.2)]


def test_the_slow_rank_sleeps_in_every_row_and_is_pinned_where_it_can_be():
    slow = setting(schemes=["dense", "straggler"], ranks=4, slow_rank=1, slow_ms=300.0)
    rows = list(slow.rows())
    assert [(row.scheme, row.density) for row in rows] == [("dense", 1.0), ("straggler", 1.0)]
    dense, aware = (compose(slow.arguments(row, Path("out"))) for row in rows)
    for config in (dense, aware):
        assert config.straggler.inject_rank == 1
        assert config.straggler.inject_delay_ms == 300
    assert dense.sparse.straggler.mode == "off"
    assert (aware.sparse.straggler.mode, aware.straggler.rank) == ("pinned", 1)


def test_a_run_that_fails_shows_the_end_of_its_log(monkeypatch, tmp_path):
    def run(command, log):
        log.write("it was the memory\n")
        return 3

    monkeypatch.setattr(local_ranks, "run", run)
    with pytest.raises(MegatronSparseError, match="it was the memory") as caught:
        training.run(setting(), tmp_path)
    assert "exit code 3 and 0 iterations" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scheme=telepathy"], "plain"),
        (["model.nmu_layers=3"], "nmu_layers"),
        (["training.lr=0"], "training.lr"),
        (["--netbed"], "--mbit R"),
        (["--density=0"], "(0, 1]"),
        (["--slow-rank=1"], "no plain"),
        (["--scheme=dense", "--slow-rank=2"], "0 to 1"),
        (["--scheme=dense", "--slow-rank=1", "--slow-ms=0"], "more than 0"),
    ],
)
def test_mistakes_are_found_before_anything_runs(arguments, words, runs, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main.main(["bench", "training", f"--out={tmp_path / 'out'}", *arguments])
    assert caught.value.code == ConfigError.exit_code
    error = capsys.readouterr().err
    assert error.count("error:") == 1
    assert words in error
    assert not runs
    assert not (tmp_path / "out").exists()
