"""`bench convergence` and `bench time-to-loss`: the runs that they start, and their reports.

A fake replaces Megatron; `test_convergence_regression.py` runs the real one.
"""

import csv
from pathlib import Path
from typing import Any

import pytest

from megatron_sparse.bench.study import convergence, time_to_loss
from megatron_sparse.bench.study.options import (
    PLAIN,
    VALIDATIONS,
    ConvergenceOptions,
    RaceOptions,
)
from megatron_sparse.run import local_ranks
from megatron_sparse.run.composition import compose
from tests.bench.study_runs import FakeRuns, leave, overrides, print_run
from tests.commands import run
from tests.tracked import json_lines

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
        # A run with SGD ends in its ramp.
        phase = "ramp" if "sgd" in name else "target"
        phases = {} if "dense" in name else {phase: target}
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
    # Without an iteration at the target the whole run stands for it.
    assert (found["sgd_topk1"].wire_ratio_target, found["sgd_topk1"].bits_target) == (0.2, 5.5)


def test_a_study_goes_on_where_it_stopped(runs, tmp_path):
    convergence.run(one(tmp_path, "dense"))
    assert len(runs.commands) == 1
    first = convergence.run(one(tmp_path, "dense", "topk1"))
    assert runs.names[1:] == ["gpt-topk1-1"]
    assert convergence.run(one(tmp_path, "dense", "topk1")) == first
    assert len(runs.commands) == 2
    # Other arguments are another run.
    changed = one(tmp_path, "dense", overrides=["training.lr=1e-4"])
    (again,) = convergence.runs_of(changed)
    assert again.saved() is None


def test_dense_runs_first(tmp_path):
    order = [run.name for run in convergence.runs_of(study(tmp_path, models=["gpt", "starcoder"]))]
    dense = [f"{model}-dense-{seed}" for model in ("gpt", "starcoder") for seed in (1, 2)]
    assert order[:4] == dense
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
    command = "bench convergence --model=gpt --setting=dense,topk1 --iters=100"
    command += f" --output={tmp_path}/out --json={lines} --figures={folder}"
    assert run(command) == 0
    printed = capsys.readouterr().out
    assert "4.1205" in printed
    assert "+2.50" in printed
    assert [row["setting"] for row in json_lines(lines)] == ["dense", "topk1"]
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


MS = {PLAIN: 1000.0, "bf16": 500.0, "safe": 100.0, "extreme": 50.0}
WIRE_RATIO = 0.05
"""Of every compressed run."""
ADDED = {PLAIN: 0.0, "bf16": 0.0, "safe": 0.0, "extreme": 1.0}
"""To the loss of every validation."""


def race(out: Path, *settings: str, **changed: Any) -> RaceOptions:
    fields: dict[str, Any] = {"settings": settings or list(MS), "netbed": True, "mbits": (100,)}
    return RaceOptions(out=out, **fields | {"iters": 20, "seeds": (1,)} | changed)


@pytest.fixture
def races(monkeypatch) -> FakeRuns:
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


def test_seconds_are_those_of_iterations_up_to_a_loss(races, tmp_path):
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
    # Bits of a whole step are those at the end.
    assert (plain.bits, bf16.bits, safe.bits) == (48, 32, pytest.approx(48 * 5 / 60))


def test_megatron_trains_once_for_all_rates_and_is_timed_at_each(races, tmp_path):
    rows = time_to_loss.run(race(tmp_path, PLAIN, "safe", mbits=(100, 1000), seeds=(1, 2)))
    assert races.names == [
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


def test_over_loopback_whole_runs_are_timed(races, tmp_path):
    rows = time_to_loss.run(race(tmp_path, PLAIN, "safe", netbed=False, mbits=None))
    assert races.names == ["plain-loopback-1", "safe-loopback-1"]
    assert [row.iteration_ms for row in rows] == [1, 100]


def test_bytes_are_those_of_the_whole_stretched_run(races, tmp_path):
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
    for preset in (safe, balanced):  # a user's schedule, and a user's buckets
        assert preset.compression.warmup_iters is preset.compression.ramp_iters is None
        assert preset.megatron["ddp_bucket_size"] is None
    assert plain.megatron["ddp_bucket_size"] == 2_000_000
    assert safe.parameters.method == "exact"
    for name, config in configs.items():
        assert config.training.use_distributed_optimizer == (name != "allreduce"), name
        assert (config.training.precision, config.training.min_lr) == ("bf16", 1e-4), name
        assert config.model == plain.model, name


def test_command_table_and_picture(races, tmp_path, capsys):
    lines, pictures = tmp_path / "rows.jsonl", tmp_path / "pictures"
    asked = "--netbed --mbit 100,1000 --iters 20 --setting plain,safe"
    files = "--output", tmp_path / "runs", "--json", lines, "--figures", pictures
    assert run("bench time-to-loss", asked, *files) == 0
    assert "preset safe" in capsys.readouterr().out
    written = json_lines(lines)
    assert [(row["setting"], row["mbit"]) for row in written] == [
        (setting, mbit) for mbit in (100, 1000) for setting in (PLAIN, "safe") for _ in "12"
    ]
    for picture in (time_to_loss.PICTURE, time_to_loss.BYTES):
        assert (pictures / f"{picture}.png").stat().st_size > 5000
    with (pictures / f"{time_to_loss.PICTURE}.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4 * VALIDATIONS, "of one seed"
    assert len(races.commands) == 8
