"""Mistakes and failed runs of the benches that train: one typed error each. A fake trains."""

from __future__ import annotations

import pytest

from megatron_sparse.errors import ConfigError, MegatronSparseError
from tests.bench.running import run_cli
from tests.bench.study_runs import FakeRuns


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("training --scheme=telepathy", "plain"),
        ("training model.nmu_layers=3", "nmu_layers"),
        ("training training.lr=0", "training.lr"),
        ("training --netbed", "--mbit R"),
        ("training --delay-ms=30", "0 without --netbed"),
        ("training --netbed --mbit=100 --ranks=3 --sites=2", "an even number of hosts"),
        ("training --density=0", "(0, 1]"),
        ("training --slow-rank=1", "no plain"),
        ("training --scheme=dense --slow-rank=2", "0 to 1"),
        ("training --scheme=dense --slow-rank=1 --slow-ms=0", "more than 0"),
        ("convergence --model=llama", "gpt | starcoder"),
        ("convergence --setting=topk2", "topk1"),
        ("convergence --seeds=one", "numbers from 1 on"),
        ("convergence --seeds=0", "numbers from 1 on"),
        ("convergence --iters=205", "a multiple of 10"),
        ("convergence --ranks=3", "a divisor of 16"),
        ("convergence --report", "nothing to report"),
        ("convergence training.learning_rate=1", "training.learning_rate"),
        ("time-to-loss --setting=safe", "plain among them"),
        ("time-to-loss --setting=plain,quick", "setting is out of range"),
        ("time-to-loss --iters=25", "a multiple of 10"),
        ("time-to-loss --ranks=1", "2 or more"),
        ("time-to-loss --batch=0", "1 or more"),
    ],
)
def test_mistakes_are_found_before_anything_runs(command, said, tmp_path, capsys, monkeypatch):
    runs = FakeRuns(monkeypatch, lambda words, log: None)
    assert run_cli(*command.split(), f"--output={tmp_path / 'out'}") == ConfigError.exit_code
    error = capsys.readouterr().err
    assert error.count("error:") == 1
    assert said in error
    assert not runs.commands
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("training", "exit code 3, 0 iterations"),
        ("convergence --iters=100", "the run gpt-dense-1 failed"),
        ("time-to-loss", "the run plain-loopback-1 failed"),
    ],
)
def test_a_run_that_fails_shows_the_end_of_its_log(command, said, tmp_path, capsys, monkeypatch):
    def train(words, log):
        log.write("it was the memory\n")
        return 3

    FakeRuns(monkeypatch, train)
    assert run_cli(*command.split(), f"--output={tmp_path}") == MegatronSparseError.exit_code
    error = capsys.readouterr().err
    assert said in error
    assert "exit code 3" in error
    assert "it was the memory" in error
    assert not list(tmp_path.glob("*/outcome.json"))
