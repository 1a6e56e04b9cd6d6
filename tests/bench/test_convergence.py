"""`bench convergence`: the runs that it starts and continues, its report and its refusals.

A fake replaces Megatron; `test_convergence_regression.py` runs the real one.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from megatron_sparse.bench.convergence import command as convergence
from megatron_sparse.bench.convergence import report
from megatron_sparse.bench.convergence.settings import BY_NAME, SETTINGS, Run, Study
from megatron_sparse.cli import main
from megatron_sparse.errors import ConfigError, MegatronSparseError
from megatron_sparse.megatron import corpus
from megatron_sparse.run import local_ranks
from megatron_sparse.run.composition import compose

LINES = (
    " validation loss at iteration 50 | lm loss value: {first:E} | lm loss PPL: 1.0E+00 | \n"
    " validation loss at iteration 100 | lm loss value: {last:E} | lm loss PPL: 1.0E+00 | \n"
    " validation loss at iteration 100 on validation set | lm loss value: {again:E} | lm loss PPL\n"
)
LOSS = {"dense": 4.0, "topk1": 4.1, "topk01": 4.4, "sgd_dense": 5.0, "sgd_topk1": 5.2}


def study(out: Path, **changed) -> Study:
    fields = {"models": ["gpt"], "settings": list(LOSS), "seeds": [1, 2], "iters": 100, "out": out}
    return Study(**fields | changed)


def overrides(command: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in command if "=" in word)


@pytest.fixture
def commands(monkeypatch) -> list[list[str]]:
    """Replaces the runs; the second seed's losses are one part in a hundred higher."""
    started: list[list[str]] = []

    def run(command, log):
        started.append(command)
        words = overrides(command)
        name, seed = words["name"].split("-")[1:]
        last = LOSS.get(name, 4.2) * (1.01 if seed == "2" else 1)
        log.write(LINES.format(first=6, last=last * 0.998, again=last * 1.002))
        folder = Path(words["runs_dir"]) / words["name"]
        folder.mkdir(parents=True)
        target = {"wire_ratio": 0.03, "bits_per_element": 1.25}
        phases = {} if "dense" in name else {"target": target}
        ratio, bits = (1.0, 32.0) if "dense" in name else (0.2, 5.5)
        summary = {"wire_ratio": ratio, "bits_per_element": bits, "phases": phases}
        (folder / "summary.json").write_text(json.dumps(summary))
        return 0

    monkeypatch.setattr(local_ranks, "run", run)
    monkeypatch.setattr(local_ranks, "run_loopback", lambda command, ranks, log: run(command, log))
    monkeypatch.setattr(corpus, "prepare", lambda kind, folder, size: (kind, folder, size))
    return started


def rows(results) -> dict[tuple[str, str], report.Row]:
    return {(row.model, row.setting): row for row in report.rows_of(results)}


def test_more_ranks_share_the_batch_and_are_other_runs(commands, tmp_path):
    convergence.run(study(tmp_path, settings=["dense"], seeds=[1]))
    convergence.run(study(tmp_path / "four", settings=["dense"], seeds=[1], ranks=4))
    two, four = map(overrides, commands)
    assert two["cluster.ranks_per_node"] == "2"
    assert "training.micro_batch_size" not in two
    assert (four["cluster.ranks_per_node"], four["training.micro_batch_size"]) == ("4", "4")
    assert not [each for each in convergence.run(study(tmp_path, ranks=2)) if each.bits is None]
    with pytest.raises(ConfigError, match="a divisor of 16"):
        study(tmp_path, ranks=3)


def test_ranks_of_several_nodes_are_started_here(commands, monkeypatch, tmp_path):
    """`train` starts those of one node."""
    groups: list[int] = []
    run = local_ranks.run

    def run_loopback(command, ranks, log):
        groups.append(ranks)
        return run(command, log)

    monkeypatch.setattr(local_ranks, "run_loopback", run_loopback)
    nodes = ["compression.level=node", "cluster.nodes=2", "cluster.ranks_per_node=2"]
    convergence.run(study(tmp_path, settings=["safe"], seeds=[1], ranks=4, overrides=nodes))
    assert groups == [4]
    assert commands[0][:4] == local_ranks.command_line(["train"])


def test_a_study_compares_within_a_seed(commands, tmp_path):
    found = rows(convergence.run(study(tmp_path)))
    dense, sparse = found["gpt", "dense"], found["gpt", "topk1"]
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
    assert found["gpt", "sgd_topk1"].to_dense == pytest.approx(4.0)


def test_a_study_goes_on_where_it_stopped(commands, tmp_path):
    convergence.run(study(tmp_path, settings=["dense"], seeds=[1]))
    assert len(commands) == 1
    first = convergence.run(study(tmp_path, settings=["dense", "topk1"], seeds=[1]))
    assert [overrides(command)["name"] for command in commands[1:]] == ["gpt-topk1-1"]
    assert convergence.found(study(tmp_path)) == first
    # Other arguments are another run.
    changed = study(tmp_path, settings=["dense"], seeds=[1], overrides=["training.lr=1e-4"])
    assert convergence.find(changed, Run("gpt", BY_NAME["dense"], 1)) is None


def test_what_matters_most_runs_first(tmp_path):
    order = [run.name for run in study(tmp_path, models=["gpt", "starcoder"]).runs()]
    assert order[:3] == ["gpt-dense-1", "gpt-topk1-1", "gpt-topk01-1"]
    assert order.index("starcoder-topk01-2") < order.index("gpt-sgd_dense-1")
    assert len(order) == len(set(order)) == 2 * 2 * len(LOSS)


def test_every_setting_is_a_configuration_and_differs_from_the_default(tmp_path):
    every = study(tmp_path, settings=list(BY_NAME), seeds=[3], models=["starcoder"], iters=1000)
    configs = {run.setting.name: compose(every.arguments(run)) for run in every.runs()}
    assert list(BY_NAME) == [setting.name for setting in SETTINGS]
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


def test_command_table_and_figures(commands, tmp_path, capsys):
    lines, folder = tmp_path / "rows.jsonl", tmp_path / "figures"
    command = [
        "bench",
        "convergence",
        "--model=gpt",
        "--setting=dense,topk1",
        "--iters=100",
        f"--out={tmp_path / 'out'}",
        f"--json={lines}",
        f"--figures={folder}",
    ]
    with pytest.raises(SystemExit) as left:
        main.main(command)
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert "4.1205" in printed
    assert "+2.50" in printed
    assert [json.loads(line)["setting"] for line in lines.open()] == ["dense", "topk1"]
    pictures = (report.CURVES, report.FINAL, report.BITS)
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
    with pytest.raises(SystemExit) as left:
        main.main([*command, "--report"])
    assert left.value.code == 0
    assert len(commands) == 4
    table = [line for line in printed.splitlines() if " to dense" in line or "dense " in line]
    assert all(line in capsys.readouterr().out for line in table[-1:])


def test_a_run_that_fails_is_one_error_with_the_end_of_its_log(commands, monkeypatch, tmp_path):
    def fail(command, log):
        log.write("error: the network is gone\n")
        return 3

    monkeypatch.setattr(local_ranks, "run", fail)
    with pytest.raises(MegatronSparseError, match=r"exit code 3(?s:.*)the network is gone"):
        convergence.run(study(tmp_path))
    assert not list(tmp_path.glob(f"*/{convergence.RESULT_FILE}"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model=llama"], "gpt | starcoder"),
        (["--setting=topk2"], "topk1"),
        (["--seeds=one"], "whole numbers"),
        (["--seeds=0"], "1 or more"),
        (["--iters=205"], "a multiple of 10"),
        (["--report"], "nothing to report"),
        (["training.learning_rate=1"], "training.learning_rate"),
    ],
)
def test_mistakes_are_one_typed_error(arguments, said, tmp_path, capsys, commands):
    with pytest.raises(SystemExit) as left:
        main.main(["bench", "convergence", f"--out={tmp_path}", *arguments])
    assert left.value.code == ConfigError.exit_code
    assert said in capsys.readouterr().err
    assert not commands
