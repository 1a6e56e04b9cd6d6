"""`bench convergence`: the runs that it starts and continues, and its report.

A fake replaces Megatron; `test_convergence_regression.py` runs the real one.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from megatron_sparse.bench.study import convergence
from megatron_sparse.bench.study.options import ConvergenceOptions
from megatron_sparse.run import local_ranks
from megatron_sparse.run.composition import compose
from tests.bench.running import read_rows, run_cli
from tests.bench.study_runs import FakeRuns, leave, overrides, print_run

LOSS = {"dense": 4.0, "topk1": 4.1, "topk01": 4.4, "sgd_dense": 5.0, "sgd_topk1": 5.2}


def study(out: Path, **changed) -> ConvergenceOptions:
    fields = {"models": ["gpt"], "settings": list(LOSS), "seeds": [1, 2], "iters": 100, "out": out}
    return ConvergenceOptions(**fields | changed)


def one(out: Path, *settings: str, **changed) -> ConvergenceOptions:
    return study(out, settings=list(settings), seeds=[1], **changed)


@pytest.fixture
def runs(monkeypatch) -> FakeRuns:
    """The second seed's losses are one part in a hundred higher."""

    def train(words, log):
        name, seed = words["name"].split("-")[1:]
        last = LOSS.get(name, 4.2) * (1.01 if seed == "2" else 1)
        print_run(log, [], [], [(50, 6), (100, last * 0.998)], again=last * 1.002)
        target = {"wire_ratio": 0.03, "bits_per_element": 1.25}
        phases = {} if "dense" in name else {"target": target}
        ratio, bits = (1.0, 32.0) if "dense" in name else (0.2, 5.5)
        summary = {"wire_ratio": ratio, "bits_per_element": bits, "phases": phases}
        leave(words, "summary.json", [summary])

    return FakeRuns(monkeypatch, train)


def test_more_ranks_share_the_batch_and_are_other_runs(runs, tmp_path):
    convergence.run(one(tmp_path, "dense"))
    convergence.run(one(tmp_path / "four", "dense", ranks=4))
    two, four = map(overrides, runs.commands)
    assert (two["cluster.ranks_per_node"], two["training.micro_batch_size"]) == ("2", "8")
    assert (four["cluster.ranks_per_node"], four["training.micro_batch_size"]) == ("4", "4")


def test_ranks_of_several_nodes_are_started_here(runs, tmp_path):
    """`train` starts those of one node."""
    nodes = ["compression.level=node", "cluster.nodes=2", "cluster.ranks_per_node=2"]
    convergence.run(one(tmp_path, "safe", ranks=4, overrides=nodes))
    convergence.run(one(tmp_path, "safe"))
    assert runs.places == [("run_loopback", 4), ("run",)]
    assert all(each[:4] == local_ranks.command_line(["train"]) for each in runs.commands)


def test_a_study_compares_within_a_seed(runs, tmp_path):
    found = {row.setting: row for row in convergence.run(study(tmp_path))}
    dense, sparse = found["dense"], found["topk1"]
    assert (dense.seeds, dense.to_dense, dense.wire_ratio_target) == (2, None, 1.0)
    assert dense.final == pytest.approx(4.02)
    assert dense.spread == pytest.approx(100 * 0.04 / 4.02)
    # Both seeds lie 2.5 % above their own dense run, although they lie 1 % apart.
    assert sparse.to_dense == pytest.approx(2.5)
    assert sparse.to_dense_spread == pytest.approx(0, abs=1e-9)
    # Both validations say the same of it, although they lie 0.4 % apart.
    assert sparse.noise == pytest.approx(0, abs=1e-9)
    assert dense.noise is None
    assert (sparse.wire_ratio, sparse.wire_ratio_target) == (0.2, 0.03)
    assert (sparse.bits, sparse.bits_target) == (5.5, 1.25)
    assert (dense.bits, dense.bits_target) == (32.0, 32.0)
    # SGD is compared with dense SGD.
    assert found["sgd_topk1"].to_dense == pytest.approx(4.0)


def test_a_study_goes_on_where_it_stopped(runs, tmp_path):
    convergence.run(one(tmp_path, "dense"))
    assert len(runs.commands) == 1
    first = convergence.run(one(tmp_path, "dense", "topk1"))
    assert runs.names[1:] == ["gpt-topk1-1"]
    assert convergence.run(study(tmp_path), trains=False) == first
    # Other arguments are another run.
    changed = one(tmp_path, "dense", overrides=["training.lr=1e-4"])
    (again,) = convergence.runs_of(changed)
    assert again.saved() is None


def test_what_matters_most_runs_first(tmp_path):
    order = [run.name for run in convergence.runs_of(study(tmp_path, models=["gpt", "starcoder"]))]
    assert order[:3] == ["gpt-dense-1", "gpt-topk1-1", "gpt-topk01-1"]
    assert order.index("starcoder-topk01-2") < order.index("gpt-sgd_dense-1")
    assert len(order) == len(set(order)) == 2 * 2 * len(LOSS)


def test_every_setting_is_a_configuration_and_differs_from_the_default(tmp_path):
    names = list(convergence.SETTINGS)
    every = study(tmp_path, settings=names, seeds=[3], models=["starcoder"], iters=1000)
    configs = {run.setting: compose(run.arguments) for run in convergence.runs_of(every)}
    assert sorted(configs) == sorted(names)
    default = configs.pop("topk1")
    assert (default.compression.density, default.training.seed) == (0.01, 3)
    assert (default.compression.warmup_iters, default.compression.ramp_iters) == (150, 300)
    assert default.model.position_embedding_type == "rope"
    for name, config in configs.items():
        assert config != default, name
        assert (config.model, config.data) == (default.model, default.data), name
    assert not configs["dense"].compression.enabled
    assert configs["topk5"].compression.density == 0.05
    assert configs["topk01"].compression.density == 0.001
    assert configs["leak09"].compression.leak == 0.9
    assert configs["cold"].compression.warmup_iters == configs["cold"].compression.ramp_iters == 0
    assert configs["noramp"].compression.warmup_iters == 150
    assert configs["noramp"].compression.ramp_iters == 0
    assert configs["longramp"].compression.ramp_iters == 700
    assert configs["sgd_topk1"].megatron["optimizer"] == "sgd"


def test_command_table_and_figures(runs, tmp_path, capsys):
    lines, folder = tmp_path / "rows.jsonl", tmp_path / "figures"
    command = ["convergence", "--model=gpt", "--setting=dense,topk1", "--iters=100"]
    command += [f"--output={tmp_path / 'out'}", f"--json={lines}", f"--figures={folder}"]
    assert run_cli(*command) == 0
    printed = capsys.readouterr().out
    assert "4.1205" in printed
    assert "+2.50" in printed
    assert [row["setting"] for row in read_rows(lines)] == ["dense", "topk1"]
    pictures = (convergence.CURVES, convergence.FINAL, convergence.BITS)
    assert all((folder / f"{name}.png").stat().st_size > 1000 for name in pictures)
    with (folder / "convergence-bits.csv").open() as file:
        points = [(row["series"], row["label"], row["to_dense"]) for row in csv.DictReader(file)]
    assert points == [("gpt, fp32 values", "1 %", "2.5")]
    with (folder / "convergence-curves.csv").open() as file:
        curve = [row for row in csv.DictReader(file) if row["seed"] == "1"]
    assert [(row["setting"], row["iteration"], float(row["loss"])) for row in curve] == [
        ("dense", "50", 6),
        ("dense", "100", 4),
        ("topk1", "50", 6),
        ("topk1", "100", 4.1),
    ]
    # `--report` trains nothing and says the same.
    assert run_cli(*command, "--report") == 0
    assert len(runs.commands) == 4
    row = next(line for line in printed.splitlines() if "+2.50" in line)
    assert row in capsys.readouterr().out
