"""`bench time-to-loss`: its runs, the seconds that it reads from them, and its table.

A fake replaces Megatron.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from megatron_sparse.bench.study import time_to_loss
from megatron_sparse.bench.study.options import RaceOptions
from megatron_sparse.bench.study.settings import PLAIN, VALIDATIONS
from megatron_sparse.run.composition import compose
from tests.bench.running import read_rows, run_cli
from tests.bench.study_runs import FakeRuns, leave, print_run

MS = {PLAIN: 1000.0, "safe": 100.0, "extreme": 50.0}
WIRE_RATIO = 0.05
"""Of every compressed run."""
ADDED = {PLAIN: 0.0, "safe": 0.0, "extreme": 1.0}
"""To the loss of every validation."""


def race(out: Path, *settings: str, **changed: Any) -> RaceOptions:
    fields: dict[str, Any] = {"settings": settings or list(MS), "netbed": True, "mbits": (100,)}
    return RaceOptions(out=out, **fields | {"iters": 20} | changed)


@pytest.fixture
def runs(monkeypatch) -> FakeRuns:
    """Each validation's loss is 0.1 below the one before."""

    def train(words, log):
        setting, rate = words["name"].rsplit("-", 1)
        assert fake.places[-1] == ("run_netbed", 4, (int(rate), 0, 1), 4)
        last, interval = int(words["training.iterations"]), int(words["training.eval_interval"])
        curve = [
            (number, 6 - 0.1 * (number // interval) + ADDED[setting])
            for number in range(interval, last + 1, interval)
        ]
        print_run(log, [MS[setting]] * last, [5.0] * last, curve, again=curve[-1][1])
        if setting != PLAIN:
            leave(words, "summary.json", [{"total_wire_ratio": WIRE_RATIO}])

    fake = FakeRuns(monkeypatch, train)
    return fake


def test_seconds_are_those_of_iterations_up_to_a_loss(runs, tmp_path):
    plain, safe, extreme = time_to_loss.run(race(tmp_path))
    assert (plain.iterations, safe.iterations) == (20, 20), "22 are rounded"
    assert (plain.wire_ratio, safe.wire_ratio) == (1, WIRE_RATIO)
    # Plain Megatron is at 80 % after 16 of its iterations, and at 5 * 1.005 after 19.5.
    assert (plain.early_s, plain.early_speedup, plain.to_plain) == (pytest.approx(16), 1, None)
    assert plain.final_s == pytest.approx(19.5)
    assert (safe.early_s, safe.final_s) == (pytest.approx(1.6), pytest.approx(1.95))
    assert safe.early_speedup == safe.final_speedup == pytest.approx(10)
    assert safe.to_plain == pytest.approx(0)
    # It never comes so far.
    assert (extreme.early_s, extreme.final_s, extreme.final_speedup) == (None, None, None)
    assert extreme.to_plain == pytest.approx(20)


def test_a_comparison_goes_on_where_it_stopped(runs, tmp_path):
    time_to_loss.run(race(tmp_path, PLAIN))
    results = time_to_loss.run(race(tmp_path, PLAIN, "safe"))
    assert runs.names == ["plain-100", "safe-100"]
    assert time_to_loss.run(race(tmp_path, PLAIN, "safe")) == results
    time_to_loss.run(race(tmp_path, PLAIN, overrides=["training.lr=1e-4"]))
    assert len(runs.commands) == 3, "other arguments are another run"


def test_bytes_are_those_of_the_whole_stretched_run(runs, tmp_path):
    _, safe = time_to_loss.run(race(tmp_path, PLAIN, "safe", iters=200))
    assert safe.wire_ratio == pytest.approx(WIRE_RATIO * 1.1)


def test_gradients_in_bf16_are_sent_so(tmp_path):
    _, bf16 = time_to_loss.runs_of(race(tmp_path, PLAIN, "bf16"))
    config = compose(bf16.arguments)
    assert (config.scheme.name, config.scheme.wire_dtype) == ("dense", "bf16")
    assert config.compression.enabled, "switched off, all travels in the gradient's own dtype"


def test_schedules_are_stretched_with_the_run(tmp_path):
    every = race(tmp_path, *time_to_loss.SETTINGS, iters=200)
    configs = {run.setting: compose(run.arguments) for run in time_to_loss.runs_of(every)}
    assert configs.keys() == time_to_loss.SETTINGS.keys()
    plain, safe, balanced = (configs[name] for name in (PLAIN, "safe", "balanced"))
    assert (plain.training.iterations, safe.training.iterations) == (200, 220)
    assert (plain.training.lr_warmup_iters, safe.training.lr_warmup_iters) == (20, 22)
    assert (plain.training.eval_interval, safe.training.eval_interval) == (20, 22)
    assert (safe.compression.warmup_iters, safe.compression.ramp_iters) == (33, 66)
    assert balanced.compression.ramp_iters == 154
    assert (safe.parameters.method, safe.parameters.bits) == ("lossy", 4)
    for name, config in configs.items():
        assert config.training.use_distributed_optimizer, name
        assert (config.model, config.cluster) == (plain.model, plain.cluster), name


def test_command_table_and_picture(runs, tmp_path, capsys):
    lines, pictures = tmp_path / "rows.jsonl", tmp_path / "pictures"
    arguments = ["time-to-loss", "--netbed", "--mbit", "100,1000", "--iters", "20"]
    arguments += ["--setting", "plain,safe", "--output", str(tmp_path / "runs")]
    assert run_cli(*arguments, "--json", str(lines), "--figures", str(pictures)) == 0
    assert "safe, parameters in 4 bits" in capsys.readouterr().out
    written = read_rows(lines)
    assert [(row["setting"], row["mbit"]) for row in written] == [
        (setting, mbit) for mbit in (100, 1000) for setting in (PLAIN, "safe")
    ]
    for picture in (time_to_loss.PICTURE, time_to_loss.BYTES):
        assert (pictures / f"{picture}.png").stat().st_size > 5000
    with (pictures / f"{time_to_loss.PICTURE}.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4 * VALIDATIONS
    assert len(runs.commands) == 4
