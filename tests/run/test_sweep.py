"""Sweeps: unique names, and failures that end no other run."""

import json
from dataclasses import asdict
from itertools import product

import pytest

from megatron_sparse.errors import ConfigError, SweepError
from megatron_sparse.run import application, launch, sweep
from megatron_sparse.run.composition import compose


class TestNames:
    """The name of a run of a sweep."""

    @pytest.mark.parametrize(
        ("swept", "overrides", "name"),
        [
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
        leaks = ("0.5", "0.6", "0.7", "0.8", "0.9", "1.0")
        swept = (
            "scheme=dense,direct",
            f"compression.leak={','.join(leaks)}",
            "compression.density=0.1",
        )
        names = self.sweep(monkeypatch, tmp_path, lambda config: 0, *swept)
        each = product(("dense", "direct"), leaks)
        assert names == [f"run_scheme-{scheme}_leak-{leak}" for scheme, leak in each]
        assert [o.name for o in sweep.outcomes(tmp_path / "sweep")] == names

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

    def test_a_signal_ends_the_sweep(self, monkeypatch, tmp_path):
        started = []

        def stopped(config):
            started.append(config.name)
            return 130

        with pytest.raises(SystemExit, match="130"):
            self.sweep(monkeypatch, tmp_path, stopped, "scheme=dense,zen,direct")
        assert started == ["run_scheme-dense"]

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

    def test_options_of_a_folder_of_the_users_own(self, monkeypatch, tmp_path):
        own = tmp_path / "it's own"
        (own / "model").mkdir(parents=True)
        (own / "model/mine.yaml").write_text("model: {num_layers: 3}")
        (own / "base.yaml").write_text("defaults: [train, _self_]\nname: own")
        layers = []
        flags = f"--config-dir={own}", "--config-name", "base"
        names = self.sweep(
            monkeypatch,
            tmp_path,
            lambda config: layers.append(config.model.num_layers) or 0,
            *(*flags, "model=mine,gpt_tiny"),
        )
        assert names == ["own_model-mine", "own_model-gpt-tiny"]
        assert layers == [3, 4]

    @pytest.mark.parametrize(
        "swept",
        [['compression.keep_patterns=["a"],["a*"]'], ["name=a,b", "training.seed=1,2"]],
    )
    def test_runs_that_would_share_a_folder_are_refused(self, monkeypatch, tmp_path, swept):
        with pytest.raises(ConfigError, match="would have the folder"):
            self.sweep(monkeypatch, tmp_path, lambda config: 0, *swept)

    def test_a_folder_that_cannot_be_made_is_a_typed_error(self, monkeypatch, tmp_path):
        (tmp_path / "sweep").touch()
        with pytest.raises(ConfigError, match="the sweep's folder cannot be made"):
            self.sweep(monkeypatch, tmp_path, lambda config: 0, "scheme=dense,zen")

    def test_an_earlier_sweep_of_the_same_folder_does_not_count(self, monkeypatch, tmp_path):
        sweep.RunEnd("old", 2, "long ago").write(tmp_path / "sweep/multirun/2020-01-01/0")
        assert self.sweep(monkeypatch, tmp_path, lambda config: 0, "scheme=dense,zen")


class TestOutcomes:
    """The files that runs of a sweep leave."""

    def test_a_damaged_one_is_a_typed_error(self, tmp_path):
        (tmp_path / sweep.OUTCOME_FILE).write_text("[]")
        with pytest.raises(SweepError, match="damaged"):
            sweep.outcomes(tmp_path)

    def test_a_replaced_one_is_never_seen_in_part(self, tmp_path):
        first = sweep.RunEnd("run", 2, "no data")
        first.write(tmp_path)
        with (tmp_path / sweep.OUTCOME_FILE).open() as reader:
            sweep.RunEnd("run", 2, "a longer reason").write(tmp_path)
            assert json.loads(reader.read()) == asdict(first)
        assert [end.error for end in sweep.outcomes(tmp_path)] == ["a longer reason"]
