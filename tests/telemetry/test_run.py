"""A run's files: content, time of writing, the writing rank, and resuming."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from megatron_sparse.config.tracking import TrackingConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.recording import STAGES, STEP_STAGES, GatherRecord
from megatron_sparse.telemetry import RunTelemetry, breakdown, load_summary, run
from tests.records import Sink, bucket_record
from tests.tracked import json_lines

QUIET = TrackingConfig(console="off")
CONFIG = {"name": "demo", "compression": {"density": 0.01}}
LOSS = {1: 9.0, 2: 8.0, 3: 7.0, 4: 6.0, 5: 5.0, 6: 4.0}
PHASE = {1: "warmup", 2: "warmup", 3: "ramp", 4: "target", 5: "target", 6: "target"}
NNZ = {"warmup": 1000, "ramp": 250, "target": 10}


def open_run(run_dir, *, is_writer=True, sinks=(), tracking=QUIET):
    return RunTelemetry(run_dir, tracking, is_writer=is_writer, sinks=sinks, resolved_config=CONFIG)


def iterate(telemetry, iteration, *, loss=None, buckets=2, **keywords):
    phase = PHASE.get(iteration, "target")
    for bucket in range(buckets):
        record = bucket_record(
            f"b{bucket}",
            phase=phase,
            nnz=NNZ[phase],
            dense_bytes=6000,
            wire_bytes=6 * NNZ[phase] + 48,
            stage_us={"prune": 1000.0 * iteration, "network": 500.0 * iteration},
        )
        telemetry.record_bucket(record)
    telemetry.record_stage("host_wait", 0.001 * iteration)
    return telemetry.end_iteration(
        iteration,
        iteration_s=0.1 * iteration,
        loss=LOSS.get(iteration) if loss is None else loss,
        **keywords,
    )


def ran(run_dir, iterations, **keywords):
    telemetry = open_run(run_dir)
    for iteration in iterations:
        iterate(telemetry, iteration, **keywords)
    return telemetry.close()


def lines(run_dir):
    return json_lines(run_dir / "breakdown.jsonl")


def iterations(run_dir, name="breakdown.jsonl"):
    return [line["iteration"] for line in json_lines(run_dir / name)]


def test_files_of_a_run(tmp_path):
    run_dir = tmp_path / "runs" / "demo"
    telemetry = open_run(run_dir)
    for iteration in range(1, 7):
        iterate(telemetry, iteration, skipped=iteration == 2)
    summary = telemetry.close()

    assert iterations(run_dir) == [1, 2, 3, 4, 5, 6]
    assert iterations(run_dir, "buckets.jsonl") == [i for i in range(1, 7) for _ in range(2)]
    assert [line["loss"] for line in lines(run_dir)] == list(LOSS.values())
    assert set(lines(run_dir)[0]["stage_ms"]) == set(STAGES)
    assert load_summary(run_dir) == summary
    files = sorted(path.name for path in run_dir.iterdir())
    assert files == ["breakdown.jsonl", "buckets.jsonl", "summary.json"]


def test_summary_of_a_run(tmp_path):
    telemetry = open_run(tmp_path)
    iterate(telemetry, 1, loss=float("nan"))
    for iteration in range(2, 6):
        iterate(telemetry, iteration, skipped=iteration == 2)
    iterate(telemetry, 6, loss=float("inf"))
    summary = telemetry.close()

    assert (summary["name"], summary["iterations"], summary["skipped"]) == ("demo", 6, 1)
    assert (summary["loss_first"], summary["loss_last"]) == (8.0, 5.0)
    assert list(summary["phases"]) == ["warmup", "ramp", "target"]
    warmup, ramp, target = summary["phases"].values()
    # two buckets an iteration; 6 bytes for each element sent and 48 of header
    assert (warmup["iterations"], warmup["wire_bytes"]) == (2, 2 * 2 * 6048)
    assert (ramp["iterations"], ramp["wire_bytes"]) == (1, 2 * 1548)
    assert (target["iterations"], target["wire_bytes"]) == (3, 3 * 2 * 108)
    assert (warmup["density"], ramp["density"], target["density"]) == (1.0, 0.25, 0.01)
    for key in ("iterations", "dense_bytes", "wire_bytes"):
        assert summary[key] == sum(phase[key] for phase in summary["phases"].values())
    assert summary["dense_bytes"] == 6 * 2 * 6000
    assert summary["wire_ratio"] == summary["wire_bytes"] / summary["dense_bytes"]
    # Of iterations 1..6: 2 buckets x i ms, i ms, and 100 i ms; iteration 6 is the longest of three.
    assert summary["stage_ms"]["prune"] == summary["stage_ms_mean"]["prune"] == 7.0
    assert summary["stage_ms"]["host_wait"] == 3.5
    assert target["stage_ms_p95"]["host_wait"] == pytest.approx(5.9)
    assert (target["network_ms_least"], target["stage_ms"]["network"]) == (4.0, 5.0)
    assert target["exposed_share"] == pytest.approx(15 / 1500)
    assert summary["target_begins"] == 4
    assert summary["iteration_ms"] == pytest.approx(350.0, rel=1e-12)  # 0.1 * 3 is not exact
    assert target["iteration_ms"] == pytest.approx(500.0, rel=1e-12)
    assert (summary["target_density"], summary["world_size"]) == (0.01, 1)
    assert summary["versions"]["torch"] == torch.__version__


def test_summary_of_no_iteration(tmp_path):
    summary = ran(tmp_path, [])
    assert (summary["iterations"], summary["loss_first"], summary["phases"]) == (0, None, {})
    assert summary["iteration_ms"] is None
    json.dumps(summary, allow_nan=False)


def test_resume_replaces_repeated_iterations(tmp_path):
    ran(tmp_path, range(1, 6))
    assert ran(tmp_path, [4], loss=40.0)["iterations"] == 4
    again = open_run(tmp_path)
    iterate(again, 5, loss=50.0)
    iterate(again, 6, loss=60.0)
    summary = again.close()

    assert [line["loss"] for line in lines(tmp_path)] == [9.0, 8.0, 7.0, 40.0, 50.0, 60.0]
    assert iterations(tmp_path, "buckets.jsonl") == [i for i in range(1, 7) for _ in range(2)]
    assert (summary["loss_first"], summary["loss_last"]) == (9.0, 60.0)

    uninterrupted = open_run(tmp_path / "other")
    for iteration, loss in zip(range(1, 7), (9.0, 8.0, 7.0, 40.0, 50.0, 60.0), strict=True):
        iterate(uninterrupted, iteration, loss=loss)
    assert uninterrupted.close() == summary


def test_a_repeated_iteration_replaces_all_from_it_on(tmp_path):
    """In one process, and by a run that is started again from the beginning."""
    for repeated, kept in (((1, 2, 3, 2), [1, 2]), ((1,), [1])):
        assert ran(tmp_path, repeated)["iterations"] == len(kept)
        assert iterations(tmp_path) == kept
        assert iterations(tmp_path, "buckets.jsonl") == [i for i in kept for _ in range(2)]


@pytest.mark.parametrize("cut", [1, 40], ids=["newline lost", "object cut"])
@pytest.mark.parametrize("name", ["breakdown.jsonl", "buckets.jsonl"])
def test_damaged_last_line_is_dropped_with_a_warning(tmp_path, caplog, name, cut):
    ran(tmp_path, (1, 2), buckets=1)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-cut])
    ran(tmp_path, [3], buckets=1)
    assert [r.message for r in caplog.records] == [f"{name}: dropped a damaged line at its end"]
    assert iterations(tmp_path, name) == [1, 3]


def test_damaged_line_in_the_middle_is_left_out_with_its_number(tmp_path, caplog):
    ran(tmp_path, (1, 2, 3))
    path = tmp_path / "breakdown.jsonl"
    one, two, three = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(one + b"\0" * (len(two) - 1) + b"\n" + three)
    assert ran(tmp_path, [])["iterations"] == 2
    (said,) = (record.message for record in caplog.records)
    assert said == "breakdown.jsonl: line 2 is damaged and left out"


def test_lines_of_another_version_are_a_typed_error(tmp_path):
    ran(tmp_path, [1])
    (line,) = lines(tmp_path)
    more, fewer = line | {"colour": "blue"}, {k: v for k, v in line.items() if k != "nnz"}
    for other, named in ((more, "colour"), (fewer, "nnz")):
        (tmp_path / "breakdown.jsonl").write_text(json.dumps(other) + "\n")
        with pytest.raises(ConfigError, match=named):
            open_run(tmp_path)


def test_only_the_writer_writes(tmp_path, capsys):
    sink = Sink()
    other = open_run(tmp_path / "run", is_writer=False, sinks=[sink], tracking=TrackingConfig())
    breakdown = iterate(other, 1)
    assert breakdown.wire_bytes == 2 * 6048
    assert other.close()["iterations"] == 1
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""
    assert (sink.rows, sink.closed) == ({}, 1)


def test_writer_prints_the_table_once_and_close_is_idempotent(tmp_path, capsys):
    telemetry = open_run(tmp_path, tracking=TrackingConfig())
    iterate(telemetry, 1)
    assert telemetry.close() is telemetry.close()
    assert capsys.readouterr().out.count("run demo: 1 iterations") == 1


def test_without_a_folder_there_is_a_summary_and_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ran(None, [1])["wire_bytes"] == 2 * 6048
    assert list(tmp_path.iterdir()) == []


def test_flush_interval(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "FLUSH_EVERY", 3)
    telemetry, seen = open_run(tmp_path), []
    for iteration in range(1, 8):
        iterate(telemetry, iteration)
        seen.append(len(lines(tmp_path)))
    telemetry.close()
    assert seen == [0, 0, 3, 3, 3, 6, 6]
    assert len(lines(tmp_path)) == 7


def test_nothing_is_lost_when_the_program_dies_of_an_exception(tmp_path):
    program = (
        "import pathlib, sys\n"
        "from megatron_sparse.config.tracking import TrackingConfig\n"
        "from megatron_sparse.telemetry import RunTelemetry\n"
        "t = RunTelemetry(pathlib.Path(sys.argv[1]), TrackingConfig(), is_writer=True)\n"
        "t.end_iteration(1, iteration_s=0.1)\n"
        "raise SystemError('no close')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True)
    assert b"no close" in done.stderr
    assert iterations(tmp_path) == [1]


def test_a_folder_that_cannot_be_made_is_a_typed_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="folder"):
        open_run(tmp_path / "file" / "run")


def test_a_disk_that_fails_does_not_stop_training(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(run, "FLUSH_EVERY", 1)
    telemetry = open_run(tmp_path)
    iterate(telemetry, 1)
    (tmp_path / "breakdown.jsonl").unlink()
    (tmp_path / "breakdown.jsonl").mkdir()
    for iteration in (2, 3):
        iterate(telemetry, iteration)
    assert telemetry.close()["iterations"] == 3
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "no more JSON lines" in caplog.text


def test_summary_is_replaced_whole(tmp_path, monkeypatch, caplog):
    """A write that fails half way leaves the summary of before."""
    (tmp_path / "summary.json").write_text('{"old": true}')
    telemetry = open_run(tmp_path)
    iterate(telemetry, 1)
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError("no space left on device")))
    telemetry.close()
    assert load_summary(tmp_path) == {"old": True}
    assert "summary.json cannot be written" in caplog.text


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff\xfe"])
def test_a_missing_or_damaged_summary(tmp_path, content):
    if content is not None:
        (tmp_path / "summary.json").write_bytes(content)
    with pytest.raises(ConfigError):
        load_summary(tmp_path)


def test_no_bucket_costs_a_system_call_or_the_general_encoder(tmp_path, monkeypatch):
    """An iteration of 100 buckets: its line is encoded once, and files are opened to flush."""
    telemetry = open_run(tmp_path)
    iterate(telemetry, 1, buckets=100)  # the names are quoted once
    telemetry.flush()
    counts = Counter()

    def counted(name, function):
        def call(*arguments, **keywords):
            counts[name] += 1
            return function(*arguments, **keywords)

        return call

    monkeypatch.setattr(breakdown, "_encode", counted("encoded", breakdown._encode))
    monkeypatch.setattr(json, "dumps", counted("encoded", json.dumps))
    monkeypatch.setattr(Path, "open", counted("opened", Path.open))
    iterate(telemetry, 2, buckets=100)
    assert counts == {"encoded": 1}
    telemetry.flush()
    assert counts == {"encoded": 1, "opened": 2}


def test_stage_outside_the_vocabulary_is_our_own_bug():
    telemetry = open_run(None)
    for stage in STEP_STAGES:
        telemetry.record_stage(stage, 0.0)
    with pytest.raises(AssertionError, match="prune"):
        telemetry.record_stage("prune", 1.0)


def test_gathers_count_to_the_iteration_and_earlier_waits_do_not(tmp_path):
    telemetry = open_run(tmp_path)
    telemetry.record_gather(GatherRecord("a", 0, "raw", numel=10, dense_bytes=40, wire_bytes=40))
    telemetry.record_stage("param_wait", 5.0)  # as before an evaluation
    telemetry.begin_iteration(1)
    telemetry.record_gather(GatherRecord("a", 0, "exact", numel=10, dense_bytes=40, wire_bytes=8))
    telemetry.record_stage("param_wait", 0.25)
    b = telemetry.end_iteration(1, iteration_s=1.0)
    assert b.param_exposed_ms == 250.0
    assert (b.param_dense_bytes, b.param_wire_bytes) == (80, 48)
    assert telemetry.end_iteration(2, iteration_s=1.0).param_gathers == {}
    summary = telemetry.close()
    assert (summary["param_dense_bytes"], summary["param_wire_bytes"]) == (80, 48)
    assert summary["total_wire_ratio"] == 0.6
