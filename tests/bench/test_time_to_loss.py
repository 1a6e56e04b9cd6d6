"""`bench time-to-loss`: its runs, the seconds that it reads from them, its table and refusals.

A fake replaces Megatron.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_sparse.bench.time_to_loss import command, report
from megatron_sparse.bench.time_to_loss.settings import BY_NAME, PLAIN, VALIDATIONS, Race
from megatron_sparse.cli import main
from megatron_sparse.errors import ConfigError, MegatronSparseError
from megatron_sparse.megatron import corpus
from megatron_sparse.run import local_ranks
from megatron_sparse.run.composition import compose

ITERATION = "iteration {number}/ {all} | elapsed time per iteration (ms): {ms} | lm loss: 5.0E+00\n"
VALIDATION = (
    " validation loss at iteration {number}{again} | lm loss value: {loss:E} | lm loss PPL\n"
)
MS = {PLAIN: 1000.0, "safe": 100.0, "extreme": 50.0}
WIRE_RATIO = 0.05
"""Of every compressed run."""
ADDED = {PLAIN: 0.0, "safe": 0.0, "extreme": 1.0}
"""To the loss of every validation."""


def race(out: Path, **changed: Any) -> Race:
    fields: dict[str, Any] = {
        **{"settings": list(MS), "ranks": 4, "mbits": (100,), "iters": 20, "batch": 2, "seed": 1},
        "out": out,
    }
    return Race(**fields | changed)


def overrides(line: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line if "=" in word)


@pytest.fixture
def commands(monkeypatch) -> list[list[str]]:
    """Replaces the runs: each validation's loss is 0.1 below the one before."""
    started: list[list[str]] = []

    def run(line, ranks, mbit, nodes, log):
        assert (ranks, nodes) == (4, 4)
        started.append(line)
        words = overrides(line)
        setting, rate = words["name"].rsplit("-", 1)
        assert mbit == int(rate)
        last, interval = int(words["training.iterations"]), int(words["training.eval_interval"])
        loss = 0.0
        for number in range(1, last + 1):
            log.write(ITERATION.format(number=number, all=last, ms=MS[setting]))
            if number % interval == 0:
                loss = 6 - 0.1 * (number // interval) + ADDED[setting]
                log.write(VALIDATION.format(number=number, again="", loss=loss))
        log.write(VALIDATION.format(number=last, again=" on validation set", loss=loss))
        if setting != PLAIN:
            folder = Path(words["runs_dir"], words["name"])
            folder.mkdir()
            summary = json.dumps({"total_wire_ratio": WIRE_RATIO})
            (folder / "summary.json").write_text(summary)
        return 0

    monkeypatch.setattr(local_ranks, "run_netbed", run)
    monkeypatch.setattr(corpus, "prepare", lambda kind, folder, size: (kind, folder, size))
    return started


def test_seconds_are_those_of_iterations_up_to_a_loss(commands, tmp_path):
    plain, safe, extreme = report.rows_of(command.run(race(tmp_path)))
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


def test_a_comparison_goes_on_where_it_stopped(commands, tmp_path):
    command.run(race(tmp_path, settings=[PLAIN]))
    results = command.run(race(tmp_path, settings=[PLAIN, "safe"]))
    assert [overrides(line)["name"] for line in commands] == ["plain-100", "safe-100"]
    assert command.run(race(tmp_path, settings=[PLAIN, "safe"])) == results
    command.run(race(tmp_path, settings=[PLAIN], overrides=["training.lr=1e-4"]))
    assert len(commands) == 3, "other arguments are another run"


def test_bytes_are_those_of_the_whole_stretched_run(commands, tmp_path):
    _, safe = report.rows_of(command.run(race(tmp_path, settings=[PLAIN, "safe"], iters=200)))
    assert safe.wire_ratio == pytest.approx(WIRE_RATIO * 1.1)


def test_gradients_in_bf16_are_sent_so(tmp_path):
    both = race(tmp_path, settings=[PLAIN, "bf16"])
    config = compose({run.setting.name: both.arguments(run) for run in both.runs()}["bf16"])
    assert (config.scheme.name, config.scheme.wire_dtype) == ("dense", "bf16")
    assert config.compression.enabled, "switched off, all travels in the gradient's own dtype"


def test_schedules_are_stretched_with_the_run(tmp_path):
    every = race(tmp_path, settings=list(BY_NAME), iters=200)
    configs = {run.setting.name: compose(every.arguments(run)) for run in every.runs()}
    assert configs.keys() == BY_NAME.keys()
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


def test_command_table_and_picture(commands, tmp_path, capsys):
    rows, pictures = tmp_path / "rows.jsonl", tmp_path / "pictures"
    arguments = ["bench", "time-to-loss", "--netbed", "--mbit", "100,1000", "--iters", "20"]
    arguments += ["--setting", "plain,safe", "--out", str(tmp_path / "runs")]
    with pytest.raises(SystemExit) as left:
        main.main([*arguments, "--json", str(rows), "--figures", str(pictures)])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert "safe, parameters in 4 bits" in printed
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(row["setting"], row["mbit"]) for row in written] == [
        (setting, mbit) for mbit in (100, 1000) for setting in (PLAIN, "safe")
    ]
    for picture in (report.PICTURE, report.BYTES):
        assert (pictures / f"{picture}.png").stat().st_size > 5000
    with (pictures / f"{report.PICTURE}.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4 * VALIDATIONS
    assert len(commands) == 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"settings": ["safe"]}, "plain among them"),
        ({"settings": [PLAIN, "quick"]}, "setting is out of range"),
        ({"iters": 25}, "a multiple of 10"),
        ({"ranks": 1}, "2 or more"),
        ({"batch": 0}, "1 or more"),
    ],
)
def test_refusals(changed, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        race(tmp_path, **changed)


def test_a_failed_run_is_an_error_with_the_end_of_its_log(monkeypatch, tmp_path):
    monkeypatch.setattr(corpus, "prepare", lambda kind, folder, size: None)

    def fail(line, ranks, mbit, nodes, log):
        log.write("no more memory\n")
        return 1

    monkeypatch.setattr(local_ranks, "run_netbed", fail)
    with pytest.raises(MegatronSparseError, match="plain-100 failed") as caught:
        command.run(race(tmp_path))
    assert "no more memory" in str(caught.value)
