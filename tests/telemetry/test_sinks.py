"""Dashboards: their files are read back; no key is in them; a failure stays in its sink."""

from __future__ import annotations

import json
import logging
import sys
import types

import pytest

from megatron_sparse.config.tracking import TrackingConfig
from megatron_sparse.errors import ConfigError, DependencyError
from megatron_sparse.telemetry import RunTelemetry, TensorBoardSink, WandbSink, open_sinks
from megatron_sparse.telemetry.metrics import GROUPS
from megatron_sparse.telemetry.sinks import wandb_mode
from tests.records import Sink
from tests.tracked import tensorboard_scalars, wandb_history, wandb_records

KEY = "0123456789abcdef" * 2 + "feedc0de"  # 40 characters, as wandb's keys have


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """A wandb without credentials, settings or state of the machine it runs on."""
    module = pytest.importorskip("wandb")
    for name in ("API_KEY", "MODE", "BASE_URL", "IDENTITY_TOKEN_FILE", "DIR", "RUN_ID"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(home / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(home / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(home / "data"))
    module.teardown()
    yield module
    module.teardown()


def train(run_dir, sinks, iterations):
    telemetry = RunTelemetry(run_dir, TrackingConfig(console="off"), is_writer=True, sinks=sinks)
    for iteration in iterations:
        telemetry.record_stage("optimizer", 0.25)
        telemetry.end_iteration(iteration, iteration_s=0.5, loss=8.0 / iteration)
    telemetry.close()


def test_tensorboard_reads_back(tmp_path):
    sinks = open_sinks(tmp_path, TrackingConfig(wandb="disabled"))
    train(tmp_path, sinks, [1, 2])
    scalars = tensorboard_scalars(tmp_path / "tensorboard")
    assert scalars["train/loss"] == [(1, 8.0), (2, 4.0)]
    assert scalars["breakdown/optimizer_ms"] == [(1, 250.0), (2, 250.0)]


def test_tensorboard_hides_iterations_that_a_resumed_run_repeats(tmp_path):
    tracking = TrackingConfig(wandb="disabled")
    train(tmp_path, open_sinks(tmp_path, tracking), [1, 2, 3])
    train(tmp_path, open_sinks(tmp_path, tracking, first_iteration=2), [2])
    steps = [step for step, _ in tensorboard_scalars(tmp_path / "tensorboard")["train/loss"]]
    assert steps == [1, 2]


def test_a_writer_that_is_not_ours_is_flushed_and_left_open():
    class Writer:
        def __init__(self):
            self.calls = []

        def add_scalar(self, name, value, step):
            self.calls.append((name, value, step))

        def flush(self):
            self.calls.append("flush")

        def close(self):
            raise AssertionError("Megatron still needs its writer")

    writer = Writer()
    sink = TensorBoardSink(writer)
    sink.log({"a": 1.0, "b": 2.0}, 5)
    sink.close()
    assert writer.calls == [("a", 1.0, 5), ("b", 2.0, 5), "flush"]


def test_a_run_that_is_not_ours_is_logged_to_and_left_open():
    class Run:
        def __init__(self):
            self.logged, self.metrics, self.config = None, {}, {}

        def define_metric(self, name, step_metric=None, hidden=False):
            self.metrics[name] = (step_metric, hidden)

        def log(self, scalars, step):
            self.logged = (scalars, step)

        def finish(self):
            raise AssertionError("Megatron finishes its own run")

    run = Run()
    sink = WandbSink(run)
    sink.log({"a": 1.0}, 5)
    sink.close()
    assert run.logged == ({"a": 1.0, "iteration": 5}, 5)
    assert run.metrics.pop("iteration") == (None, True)
    assert run.metrics == {f"{group}/*": ("iteration", False) for group in GROUPS}


def test_wandb_offline_reads_back_and_no_file_has_the_key(wandb, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    run_dir = tmp_path / "runs" / "demo"
    tracking = TrackingConfig(tensorboard=True, wandb="offline", wandb_project="proj")
    config = {"compression": {"density": 0.01}, "cluster": {"env": {"HF_TOKEN": "planted"}}}
    train(run_dir, open_sinks(run_dir, tracking, config), [1, 2])

    rows = wandb_history(run_dir)
    assert [(row["_step"], row["train/loss"]) for row in rows] == [(1, 8.0), (2, 4.0)]
    assert all(row["breakdown/optimizer_ms"] == 250.0 for row in rows)
    (run,) = (r.run for r in wandb_records(run_dir) if r.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name) == ("proj", "demo")
    assert {u.key: json.loads(u.value_json) for u in run.config.update if u.key != "_wandb"} == {
        "compression": {"density": 0.01},
        "cluster": {"env": {"HF_TOKEN": "***"}},
    }

    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    for secret in (KEY, "planted"):
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
    output = capfd.readouterr()
    assert KEY not in output.out + output.err


def test_wandb_resumes_under_the_same_id(wandb, tmp_path):
    tracking = TrackingConfig(tensorboard=False, wandb="offline")
    for iterations in ([1, 2], [3]):
        train(tmp_path, open_sinks(tmp_path, tracking), iterations)
    runs = [r.run for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "run"]
    assert len(runs) == 2
    assert len({run.run_id for run in runs}) == 1
    assert [row["_step"] for row in wandb_history(tmp_path)] == [1, 2, 3]


def test_auto_is_online_with_a_key_in_the_environment_and_else_offline(wandb, monkeypatch):
    assert wandb_mode(TrackingConfig(wandb="auto")) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert wandb_mode(TrackingConfig(wandb="auto")) == "online"


@pytest.mark.parametrize(("host", "mode"), [("api.wandb.ai", "online"), ("elsewhere", "offline")])
def test_auto_asks_netrc(wandb, tmp_path, host, mode):
    (tmp_path / "home" / ".netrc").write_text(f"machine {host}\n  login user\n  password {KEY}\n")
    assert wandb_mode(TrackingConfig(wandb="auto")) == mode


@pytest.mark.parametrize("mode", ["online", "offline", "disabled"])
def test_an_explicit_mode_wins(wandb, monkeypatch, mode):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode(TrackingConfig(wandb=mode)) == mode
    assert wandb_mode(TrackingConfig(wandb="auto")) == "offline"


def test_disabled_opens_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert open_sinks(tmp_path, TrackingConfig(tensorboard=False, wandb="disabled")) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "tracking"),
    [
        ("torch.utils.tensorboard", TrackingConfig(wandb="disabled")),
        ("wandb", TrackingConfig(tensorboard=False)),
    ],
)
def test_a_missing_package_is_a_typed_error(tmp_path, monkeypatch, module, tracking):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DependencyError, match="pip install"):
        open_sinks(tmp_path, tracking)


def test_wandb_that_does_not_start_is_a_typed_error(tmp_path, monkeypatch):
    class Error(Exception):
        pass

    def init(**_):
        raise Error("no route to host")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(Error=Error, init=init))
    with pytest.raises(ConfigError, match=r"no route to host\n.*tracking\.wandb=offline"):
        open_sinks(tmp_path, TrackingConfig(tensorboard=False, wandb="online"))


def test_tensorboard_that_cannot_write_is_a_typed_error(tmp_path):
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(ConfigError, match=r"tracking\.tensorboard=false"):
        open_sinks(tmp_path, TrackingConfig(wandb="disabled"))


def test_a_sink_that_fails_is_logged_once_turned_off_and_closed(tmp_path, caplog):
    breaking, working = Sink(breaks_at=2), Sink()
    with caplog.at_level(logging.ERROR):
        train(tmp_path, [breaking, working], [1, 2, 3, 4])
    assert (list(breaking.rows), breaking.closed) == ([1, 2], 1)
    assert (list(working.rows), working.closed) == ([1, 2, 3, 4], 1)
    assert [r.getMessage() for r in caplog.records] == [
        "Sink failed and is off for the rest of the run: ConnectionError: gone"
    ]


def test_a_sink_that_fails_to_close_is_logged(tmp_path, caplog):
    train(tmp_path, [Sink(breaks_at=9)], [1])
    assert "still gone" in caplog.text
