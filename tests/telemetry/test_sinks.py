"""Dashboards: what they are handed and in which mode they run; a failure stays in its sink."""

import logging
import sys
from unittest.mock import Mock, call

import pytest

from megatron_sparse.config.tracking import TrackingConfig
from megatron_sparse.errors import DependencyError
from megatron_sparse.telemetry import RunTelemetry, TensorBoardSink, WandbSink
from megatron_sparse.telemetry.metrics import GROUPS
from megatron_sparse.telemetry.sinks import run_id, wandb_mode
from tests.records import Sink

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
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(home / name.lower()))
    module.teardown()
    yield module
    module.teardown()


def train(run_dir, sinks, iterations):
    telemetry = RunTelemetry(run_dir, TrackingConfig(console="off"), is_writer=True, sinks=sinks)
    for iteration in iterations:
        telemetry.record_stage("optimizer", 0.25)
        telemetry.end_iteration(iteration, iteration_s=0.5, loss=8.0 / iteration)
    telemetry.close()


def test_a_writer_that_is_not_ours_is_flushed_and_left_open():
    writer = Mock()
    sink = TensorBoardSink(writer)
    sink.log({"a": 1.0, "b": 2.0}, 5)
    sink.close()
    added = [call.add_scalar("a", 1.0, 5), call.add_scalar("b", 2.0, 5)]
    assert writer.mock_calls == [*added, call.flush()], "Megatron still needs its writer"


def test_a_run_that_is_not_ours_is_logged_to_and_left_open():
    run = Mock()
    sink = WandbSink(run, {"env": {"HF_TOKEN": "planted"}})
    sink.log({"a": 1.0}, 5)
    sink.close()
    config = {"megatron_sparse": {"env": {"HF_TOKEN": "***"}}}
    assert run.mock_calls == [
        call.define_metric("iteration", hidden=True),
        *(call.define_metric(f"{group}/*", step_metric="iteration") for group in GROUPS),
        call.config.update(config, allow_val_change=True),
        call.log({"a": 1.0, "iteration": 5}, step=5),
    ], "Megatron finishes its own run"


def test_a_resumed_run_has_the_same_id(tmp_path):
    first = run_id(tmp_path / "wandb")
    assert run_id(tmp_path / "wandb") == first != run_id(tmp_path / "other")


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


def test_a_missing_package_is_a_typed_error(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(DependencyError, match="pip install"):
        wandb_mode(TrackingConfig())


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
