"""`bench time-to-loss`: its runs, the seconds that it reads from them, and its table.

A fake replaces Megatron.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from megatron_sparse.bench.study import time_to_loss
from megatron_sparse.bench.study.options import PLAIN, VALIDATIONS, RaceOptions
from megatron_sparse.run.composition import compose
from tests.bench.running import read_rows, run_cli
from tests.bench.study_runs import FakeRuns, leave, print_run

MS = {PLAIN: 1000.0, "bf16": 500.0, "safe": 100.0, "extreme": 50.0}
WIRE_RATIO = 0.05
"""Of every compressed run."""
ADDED = {PLAIN: 0.0, "bf16": 0.0, "safe": 0.0, "extreme": 1.0}
"""To the loss of every validation."""


def race(out: Path, *settings: str, **changed: Any) -> RaceOptions:
    fields: dict[str, Any] = {"settings": settings or list(MS), "netbed": True, "mbits": (100,)}
    return RaceOptions(out=out, **fields | {"iters": 20, "seeds": (1,)} | changed)


@pytest.fixture
def runs(monkeypatch) -> FakeRuns:
    """Each validation's loss is 0.1 below the one before."""

    def train(words, log):
        setting, rate, which = words["name"].split("-")
        place = ("run",) if rate == "loopback" else ("run_netbed", 4, (int(rate), 0, 1), 4)
        assert fake.places[-1] == place
        if which == "timed":
            print_run(log, [2 * MS[setting]] * 2 + [MS[setting]] * 8, [5.0] * 10)
            return
        last, interval = int(words["training.iterations"]), int(words["training.eval_interval"])
        curve = [
            (number, 6 - 0.1 * (number // interval) + ADDED[setting])
            for number in range(interval, last + 1, interval)
        ]
        of_plain = setting in (PLAIN, "bf16")
        # Only the times on the test bed count.
        times_ms = [1.0 if of_plain else MS[setting]] * last
        print_run(log, times_ms, [5.0] * last, curve, again=curve[-1][1])
        if not of_plain:
            leave(words, "summary.json", [{"total_wire_ratio": WIRE_RATIO}])
            line = {"wire_bytes": 3, "dense_bytes": 40, "param_dense_bytes": 20}
            first = [line | {"param_wire_bytes": 9}] * (last - last // VALIDATIONS)
            leave(words, "breakdown.jsonl", first + [line | {"param_wire_bytes": 2}] * last)

    fake = FakeRuns(monkeypatch, train)
    return fake


def test_seconds_are_those_of_iterations_up_to_a_loss(runs, tmp_path):
    plain, bf16, safe, extreme = time_to_loss.run(race(tmp_path))
    assert (plain.iterations, safe.iterations) == (20, 20), "22 are rounded"
    assert (plain.wire_ratio, safe.wire_ratio) == (1, WIRE_RATIO)
    assert bf16.wire_ratio == pytest.approx(32 / 48)
    # Plain Megatron is at 5 * 1.005 after 19.5 of its iterations.
    assert (plain.iteration_ms, plain.final_s) == (1000, pytest.approx(19.5))
    assert (plain.speedup, plain.over_best, plain.to_plain) == (1, 0.5, None)
    assert (bf16.speedup, bf16.over_best) == (pytest.approx(2), 1)
    assert safe.final_s == pytest.approx(1.95)
    assert (safe.speedup, safe.over_best) == (pytest.approx(10), pytest.approx(5))
    assert safe.to_plain == pytest.approx(0)
    # It never comes so far.
    assert (extreme.final_s, extreme.speedup, extreme.over_best) == (None, None, None)
    assert extreme.to_plain == pytest.approx(20)


def test_bits_of_a_whole_step_are_those_at_the_end(runs, tmp_path):
    plain, bf16, safe, _ = time_to_loss.run(race(tmp_path))
    assert (plain.bits, bf16.bits, safe.bits) == (48, 32, pytest.approx(48 * 5 / 60))


def test_megatron_trains_once_for_all_rates_and_is_timed_at_each(runs, tmp_path):
    rows = time_to_loss.run(race(tmp_path, PLAIN, "safe", mbits=(100, 1000), seeds=(1, 2)))
    assert runs.names == [
        *("plain-loopback-1", "plain-loopback-2"),
        *("plain-100-timed", "safe-100-1", "safe-100-2"),
        *("plain-1000-timed", "safe-1000-1", "safe-1000-2"),
    ]
    assert [(row.mbit, row.setting, row.seed) for row in rows] == [
        (mbit, setting, seed)
        for mbit in (100, 1000)
        for setting in (PLAIN, "safe")
        for seed in (1, 2)
    ]


def test_over_loopback_whole_runs_are_timed(runs, tmp_path):
    rows = time_to_loss.run(race(tmp_path, PLAIN, "safe", netbed=False, mbits=None))
    assert runs.names == ["plain-loopback-1", "safe-loopback-1"]
    assert [row.iteration_ms for row in rows] == [1, 100]


def test_a_comparison_goes_on_where_it_stopped(runs, tmp_path):
    time_to_loss.run(race(tmp_path, PLAIN))
    results = time_to_loss.run(race(tmp_path, PLAIN, "safe"))
    assert runs.names == ["plain-loopback-1", "plain-100-timed", "safe-100-1"]
    assert time_to_loss.run(race(tmp_path, PLAIN, "safe")) == results
    time_to_loss.run(race(tmp_path, PLAIN, overrides=["training.lr=1e-4"]))
    assert len(runs.commands) == 5, "other arguments are another run"


def test_bytes_are_those_of_the_whole_stretched_run(runs, tmp_path):
    _, safe = time_to_loss.run(race(tmp_path, PLAIN, "safe", iters=200))
    assert safe.wire_ratio == pytest.approx(WIRE_RATIO * 1.1)


def test_schedules_are_stretched_with_the_run(tmp_path):
    every = race(tmp_path, *time_to_loss.SETTINGS, iters=200)
    every_run = [run for run in time_to_loss.runs_of(every) if run.validates]
    configs = {run.setting: compose(run.arguments) for run in every_run}
    assert configs.keys() == time_to_loss.SETTINGS.keys()
    plain, safe, balanced = (configs[name] for name in (PLAIN, "safe", "balanced"))
    assert (plain.training.iterations, safe.training.iterations) == (200, 220)
    assert (plain.training.lr_warmup_iters, safe.training.lr_warmup_iters) == (20, 22)
    assert (plain.training.eval_interval, safe.training.eval_interval) == (20, 22)
    assert (safe.compression.warmup_iters, safe.compression.ramp_iters) == (33, 66)
    assert balanced.compression.ramp_iters == 154
    assert safe.parameters.method == "exact"
    for name, config in configs.items():
        assert config.training.use_distributed_optimizer == (name != "allreduce"), name
        assert (config.training.precision, config.training.min_lr) == ("bf16", 1e-4), name
        assert config.model == plain.model, name


def test_command_table_and_picture(runs, tmp_path, capsys):
    lines, pictures = tmp_path / "rows.jsonl", tmp_path / "pictures"
    arguments = ["time-to-loss", "--netbed", "--mbit", "100,1000", "--iters", "20"]
    arguments += ["--setting", "plain,safe", "--output", str(tmp_path / "runs")]
    assert run_cli(*arguments, "--json", str(lines), "--figures", str(pictures)) == 0
    assert "preset safe" in capsys.readouterr().out
    written = read_rows(lines)
    assert [(row["setting"], row["mbit"]) for row in written] == [
        (setting, mbit) for mbit in (100, 1000) for setting in (PLAIN, "safe") for _ in "12"
    ]
    for picture in (time_to_loss.PICTURE, time_to_loss.BYTES):
        assert (pictures / f"{picture}.png").stat().st_size > 5000
    with (pictures / f"{time_to_loss.PICTURE}.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4 * VALIDATIONS, "of one seed"
    assert len(runs.commands) == 8
