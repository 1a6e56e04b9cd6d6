"""Sweeps: unique names, failures that end no other run, one table."""

import csv
import json
import os
from itertools import product
from pathlib import Path

import pytest

from megatron_sparse.errors import ConfigError, SweepError
from megatron_sparse.run import application, launch, preparation, sweep
from megatron_sparse.run.composition import compose, save
from tests.commands import run
from tests.tracked import json_lines


def made_run(folder: Path, name: str, *overrides: str, loss: float | None = None) -> None:
    """The folder of a run; without a loss the run has not finished."""
    config = compose(
        ["training.iterations=5", "training.lr_warmup_iters=1", f"name={name}", *overrides]
    )
    (folder / name).mkdir(parents=True)
    save(config, folder / name / preparation.CONFIG_FILE, "command")
    if loss is not None:
        steady = {"wire_ratio": 0.1, "iteration_ms": 2.0}
        summary = {"iterations": 5, "loss_last": loss, "phases": {"target": steady}}
        (folder / name / "summary.json").write_text(json.dumps(summary))


class TestNames:
    """The name of a run of a sweep."""

    def test_swept_keys_are_those_with_several_values(self):
        assert sweep.swept_keys(
            [
                "scheme=dense,direct",
                "model=gpt_tiny",
                "compression.leak=choice(0.9,1)",
                "++megatron.seed=1,2",
                "training.lr=1e-3",
            ]
        ) == ["scheme", "compression.leak", "megatron.seed"]

    @pytest.mark.parametrize(
        ("swept", "overrides", "name"),
        [
            (
                ["scheme", "compression.leak"],
                ["scheme=direct", "a.b=3", "compression.leak=0.9"],
                "run_scheme-direct_leak-0.9",
            ),
            (["megatron.lr"], ["++megatron.lr=1e-3"], "run_lr-0.001"),
            (["x"], ["x='a b/c'"], "run_x-a-b-c"),
            (["x"], ["x=-1"], "run_x-minus1"),
            (["name"], ["name=mine"], "run"),
            ([], ["scheme=direct"], "run"),
        ],
    )
    def test_a_name_has_the_swept_values_and_can_be_a_folder(self, swept, overrides, name):
        assert sweep.run_name("run", swept, overrides) == name
        compose([f"name={name}"])


class TestMultirun:
    """`train --multirun`, with a stand-in for the run itself."""

    def sweep(self, monkeypatch, tmp_path, runs, *overrides: str) -> list[str]:
        names = []

        def run(config, command):
            names.append(config.name)
            return runs(config)

        monkeypatch.setattr(launch, "run", run)
        monkeypatch.delenv("RANK", raising=False)
        monkeypatch.chdir(tmp_path)
        application.train(["--multirun", "runs_dir=sweep", *overrides])
        return names

    def test_every_combination_has_a_name_of_its_own(self, monkeypatch, tmp_path):
        swept = "scheme=dense,direct", "compression.leak=0.9,1.0", "compression.density=0.1"
        names = self.sweep(monkeypatch, tmp_path, lambda config: 0, *swept)
        each = product(("dense", "direct"), ("0.9", "1.0"))
        assert names == [f"run_scheme-{scheme}_leak-{leak}" for scheme, leak in each]
        assert {o.name for o in sweep.outcomes(tmp_path / "sweep")} == set(names)

    def test_a_failed_run_ends_no_other_and_is_reported_at_the_end(
        self, monkeypatch, tmp_path, capsys
    ):
        def fails_once(config):
            if config.scheme.name == "dense":
                raise ConfigError("nothing to train on", got="nothing")
            return 7 if config.scheme.name == "zen" else 0

        with pytest.raises(SweepError) as caught:
            self.sweep(monkeypatch, tmp_path, fails_once, "scheme=dense,zen,direct")
        text = str(caught.value)
        assert "2 of 3 runs of the sweep failed" in text
        assert "run_scheme-dense: nothing to train on" in text
        assert "run_scheme-zen: a rank ended with code 7" in text
        assert "error: nothing to train on" in capsys.readouterr().err
        codes = {o.name: o.exit_code for o in sweep.outcomes(tmp_path / "sweep")}
        assert codes == {"run_scheme-dense": 2, "run_scheme-zen": 7, "run_scheme-direct": 0}

    def test_a_rank_without_a_reason_leaves_the_reason_of_another(self, monkeypatch, tmp_path):
        """In a job of Slurm, where another rank may report first."""
        reason = sweep.RunEnd("run_scheme-zen", 2, "no data")

        def refused_elsewhere(config):
            monkeypatch.setenv("RANK", "0")
            (folder,) = (tmp_path / "sweep" / sweep.MULTIRUN).glob("*/0")
            reason.write(folder)
            return 2

        with pytest.raises(SweepError, match="run_scheme-zen: no data"):
            self.sweep(monkeypatch, tmp_path, refused_elsewhere, "scheme=choice(zen)")

    def test_an_earlier_sweep_of_the_same_folder_does_not_count(self, monkeypatch, tmp_path):
        sweep.RunEnd("old", 2, "long ago").write(tmp_path / "sweep/multirun/2020-01-01/0")
        assert self.sweep(monkeypatch, tmp_path, lambda config: 0, "scheme=dense,zen")


class TestTable:
    """`megatron-sparse sweep FOLDER`."""

    def test_columns_are_differing_keys_and_results(self, tmp_path):
        made_run(tmp_path, "a", "scheme=direct", "compression.leak=0.9", loss=2.0)
        made_run(tmp_path, "b", "scheme=zen", "compression.leak=0.9", loss=3.0)
        made_run(tmp_path, "c", "scheme=zen", "compression.leak=0.5")
        sweep.RunEnd("d", 2, "no data\n  expected: some").write(tmp_path / "multirun/now/3")
        rows = {row["name"]: row for row in sweep.rows(tmp_path)}
        assert list(rows) == ["a", "b", "c", "d"]
        assert {key for key in rows["a"] if "." in key} == {"scheme.name", "compression.leak"}
        states = ["finished", "finished", "unfinished", "failed"]
        assert [row["state"] for row in rows.values()] == states
        assert (rows["b"]["scheme.name"], rows["b"]["compression.leak"]) == ("zen", 0.9)
        assert (rows["b"]["loss_last"], rows["c"]["loss_last"]) == (3.0, None)
        assert rows["b"]["wire_ratio"] == 0.1
        assert rows["d"]["error"].startswith("no data")

    def test_a_repeated_run_counts_by_its_last_result(self, tmp_path):
        made_run(tmp_path, "a", loss=2.0)
        sweep.RunEnd("a", 2, "at first").write(tmp_path / "multirun/1/0")
        first = tmp_path / "multirun/1/0" / sweep.OUTCOME_FILE
        sweep.RunEnd("a", 0, "").write(tmp_path / "multirun/2/0")
        second = tmp_path / "multirun/2/0" / sweep.OUTCOME_FILE
        # The clock of a disk may be too coarse to tell the two apart.
        os.utime(first, (1, 1))
        os.utime(second, (2, 2))
        (row,) = sweep.rows(tmp_path)
        assert (row["state"], row["error"]) == ("finished", "")

    def test_files_hold_the_table(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "300")
        made_run(tmp_path, "a", "scheme=direct", loss=2.0)
        files = ("--output", tmp_path / "t.csv", "--json", tmp_path / "t.json")
        assert run("sweep", tmp_path, *files) == 0
        printed = capsys.readouterr().out
        assert "1 runs in" in printed
        with (tmp_path / "t.csv").open() as file:
            (line,) = csv.DictReader(file)
        (row,) = json_lines(tmp_path / "t.json")
        assert line["name"] == row["name"] == "a"
        assert float(line["loss_last"]) == row["loss_last"] == 2.0

    @pytest.mark.parametrize("columns", [80, 100])
    def test_settings_are_rows_and_words_are_whole(self, tmp_path, capsys, monkeypatch, columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        schemes = ["agsparse", "dense", "direct", "zen"]
        names = [f"run_scheme-{scheme}_leak-0.9" for scheme in schemes]
        for name, scheme in zip(names, schemes, strict=True):
            made_run(tmp_path, name, f"scheme={scheme}", loss=2.0)
        assert run("sweep", tmp_path) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines[1:])) <= columns
        found = [word for line in lines if line.startswith("name ") for word in line.split()[1:]]
        assert found == names
        rows = [line.split()[1:] for line in lines if line.startswith("scheme.name")]
        assert [scheme for row in rows for scheme in row] == schemes

    def test_mistakes_are_typed(self, tmp_path):
        made_run(tmp_path, "a", loss=2.0)
        with pytest.raises(ConfigError, match="table cannot be written"):
            sweep.report(tmp_path, tmp_path / "no/such.csv", None)
        (tmp_path / "a" / "summary.json").write_text("{")
        with pytest.raises(ConfigError, match="damaged"):
            sweep.rows(tmp_path)
        (tmp_path / sweep.OUTCOME_FILE).write_text("[]")
        with pytest.raises(SweepError, match="damaged"):
            sweep.rows(tmp_path)
