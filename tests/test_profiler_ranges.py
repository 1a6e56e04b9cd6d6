"""Ranges for profilers: on every thread if a profiler runs, almost free if not; and timelines."""

import json
import sys
import threading
from contextlib import nullcontext

import pytest
import torch

from megatron_sparse.config.tracking import TrackingConfig
from megatron_sparse.profiler_ranges import PREFIX, marked
from megatron_sparse.recording import BUCKET_STAGES, BucketRecord, GatherRecord, StageTimer
from megatron_sparse.telemetry import RunTelemetry
from megatron_sparse.telemetry.profiling import Timeline
from tests.records import bucket_record


def test_without_a_profiler_there_are_no_ranges():
    assert isinstance(marked("prune"), nullcontext)
    timer = StageTimer()
    with timer.stage("prune"), marked("host_wait"):
        pass
    assert timer.times_us()["prune"] > 0


def test_asking_is_one_call_into_torch():
    """0.07 us on a 2-core machine, at every stage of every bucket."""
    called = []
    sys.setprofile(lambda frame, event, argument: called.append(event))
    try:
        marked("prune")
    finally:
        sys.setprofile(None)
    # The last one is that of `setprofile` itself.
    assert called.count("call") <= 2
    assert called.count("c_call") <= 2


def test_a_profiler_sees_a_stage_and_its_end_also_when_it_fails():
    timer = StageTimer()

    def fail():
        with timer.stage("prune"):
            raise ValueError("planted")

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with pytest.raises(ValueError, match="planted"):
            fail()
        with timer.stage("decode"):
            torch.ones(8).add_(1)
    events = {event.name: event for event in profiler.events()}
    prune, decode = events[f"{PREFIX}prune"], events[f"{PREFIX}decode"]
    assert prune.time_range.end <= decode.time_range.start
    inside = [child.name for child in decode.cpu_children]
    assert "aten::add_" in inside
    assert isinstance(marked("prune"), nullcontext)


def test_threads_that_emit_nvtx_does_not_cover_push_ranges(monkeypatch):
    """With a stand-in for NVTX; nobody has looked at the ranges in Nsight Systems."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))

    def stage(name: str) -> None:
        with StageTimer().stage(name):
            pass

    with torch.autograd.profiler.profile(use_kineto=False):
        stage("optimizer")
        thread = threading.Thread(target=stage, args=("prune",))
        thread.start()
        thread.join()
    stage("decode")
    assert calls == [f"{PREFIX}prune", "pop"]


def test_the_profile_has_the_stages_of_both_threads_and_the_buckets_timeline(tmp_path):
    """Includes the progress thread, which is older than the profiler; both use one clock."""
    tracking = TrackingConfig(console="off", profile_iters=2, trace_start=2)
    telemetry = RunTelemetry(tmp_path, tracking, is_writer=True)
    turn, done = threading.Semaphore(0), threading.Semaphore(0)
    records: list[BucketRecord] = []

    def progress():
        for _ in range(4):
            turn.acquire()
            record = bucket_record()
            for stage in BUCKET_STAGES:
                with record.timer.stage(stage):
                    torch.ones(8).add_(1)
            record.launched_s, record.finished_s = (
                record.timer.spans[0][1],
                record.timer.spans[-1][2],
            )
            records.append(record)
            done.release()

    thread = threading.Thread(target=progress, daemon=True)
    thread.start()
    for iteration in range(1, 5):
        telemetry.begin_iteration(iteration)
        with marked("forward_backward"):
            turn.release()
            done.acquire()
        telemetry.record_bucket(records[-1])
        telemetry.record_stage("forward_backward", 0.001)
        telemetry.end_iteration(iteration, iteration_s=0.01)
    thread.join()
    telemetry.close()

    events = json.loads((tmp_path / "profile.json").read_text())["traceEvents"]
    ranged = [event for event in events if event["name"].startswith(PREFIX)]
    assert [e["name"] for e in ranged].count(f"{PREFIX}forward_backward") == 2
    for stage in BUCKET_STAGES:
        (a, b) = [event for event in ranged if event["name"] == PREFIX + stage]
        assert (
            a["tid"]
            == b["tid"]
            != next(e["tid"] for e in ranged if e["name"].endswith("forward_backward"))
        )
        # The same stage on the timeline's row, by the host's clock: within 5 ms, which is far
        # more than the clocks differ and less than a wrong origin would cause.
        mine = [e for e in events if e["name"] == stage and e.get("ph") == "X"]
        assert [e["ts"] for e in mine] == pytest.approx([a["ts"], b["ts"]], abs=5e3)
    assert {e["args"]["iteration"] for e in events if e["name"] == "b0"} == {2, 3}
    assert all(e["pid"] > 2**22 for e in events if e["name"] == "b0"), "no GPU's, no process's"
    assert not list(tmp_path.glob(".*"))


def test_a_second_profiler_is_reported_and_training_goes_on(tmp_path, caplog):
    tracking = TrackingConfig(console="off", profile_iters=1)
    telemetry = RunTelemetry(tmp_path, tracking, is_writer=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        telemetry.begin_iteration(1)
        telemetry.end_iteration(1, iteration_s=0.1)
    telemetry.begin_iteration(2)
    telemetry.end_iteration(2, iteration_s=0.1)
    telemetry.close()
    assert "another torch.profiler is active" in caplog.text
    assert not (tmp_path / "profile.json").exists()


def test_a_gather_has_a_row_with_its_stages():
    gather = GatherRecord("group0.0", 3, "exact", numel=10, wire_bytes=8, launched_s=1.0)
    gather.finished_s = 1.5
    gather.timer.spans.append(("decode", 1.25, 1.375))
    timeline = Timeline(0)
    timeline.add(7, [], [gather])
    events = timeline.events(origin_us=0.5e6)
    rows = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    whole, stage = spans["group0.0 parameters"], spans["decode"]
    assert rows[whole["tid"]] == "group0.0 parameters"
    assert stage["tid"] == whole["tid"]
    assert (whole["ts"], whole["dur"]) == (0.5e6, 0.5e6)
    assert (stage["ts"], stage["dur"]) == (0.75e6, 0.125e6)
    assert whole["args"] == {"iteration": 7, "method": "exact", "numel": 10, "wire_bytes": 8}
