"""A run's records of delays: lines, summary, scalars."""

import json
import tracemalloc

import pytest

from megatron_sparse.config.tracking import TrackingConfig
from megatron_sparse.recording import ReadinessRecord
from megatron_sparse.telemetry.readiness import (
    READINESS_FILE,
    load_readiness,
    read_readiness,
    summary_of,
)
from megatron_sparse.telemetry.run import RunTelemetry

QUIET = TrackingConfig(console="off", tensorboard=False, wandb="disabled")


def _iterate(telemetry, iterations):
    """Two buckets; an iteration knows the delays of the one two before it."""
    for iteration in iterations:
        if iteration > 2:
            step = iteration - 3
            telemetry.record_readiness(ReadinessRecord("a", step, (0.003, 0.0, 0.001 * iteration)))
            telemetry.record_readiness(ReadinessRecord("b", step, (0.0, 0.002, 0.005)))
        last = telemetry.end_iteration(iteration, iteration_s=0.1)
    return last


def test_lines_scalars_and_summary(tmp_path):
    telemetry = RunTelemetry(tmp_path, QUIET, is_writer=True)
    last = _iterate(telemetry, range(1, 6))
    # Of step 2: 3 ms of bucket a, whose other ranks waited 3 and 5 ms, and 2 ms of b.
    assert last.extra == {
        "straggler/buckets_without": 0,
        "straggler/delay_ms": pytest.approx(5),
        "straggler/rank": 1,
    }
    stragglers = telemetry.close()["stragglers"]
    assert stragglers["count"] == 6
    assert stragglers["max_ms"] == pytest.approx(3)
    assert stragglers["persistence"] == 1
    assert (stragglers["rank"], stragglers["share"]) == (0, 0.5)
    records = load_readiness(tmp_path)
    assert [record.step for record in records["a"]] == [0, 1, 2]
    assert records["b"][0].waited_s == (0.0, 0.002, 0.005)


def test_a_resumed_run_writes_each_iteration_once(tmp_path):
    first = RunTelemetry(tmp_path, QUIET, is_writer=True)
    _iterate(first, range(1, 8))
    first.close()
    second = RunTelemetry(tmp_path, QUIET, is_writer=True)
    for iteration in (4, 5, 6):  # from the checkpoint of iteration 3: steps 3 and 4 anew
        if iteration == 6:
            second.record_readiness(ReadinessRecord("a", 3, (0.0, 0.007)))
        second.end_iteration(iteration, iteration_s=0.1)
    second.close()
    lines = [json.loads(line) for line in (tmp_path / READINESS_FILE).read_text().splitlines()]
    assert [line["iteration"] for line in lines if line["bucket"] == "a"] == [1, 2, 3, 4]
    assert len((tmp_path / "breakdown.jsonl").read_text().splitlines()) == 6


def test_a_run_that_measures_nothing_has_no_file(tmp_path):
    telemetry = RunTelemetry(tmp_path, QUIET, is_writer=True)
    telemetry.end_iteration(1, iteration_s=0.1)
    assert telemetry.close()["stragglers"] is None
    assert not (tmp_path / READINESS_FILE).exists()
    assert load_readiness(tmp_path) == {}


def _summary(**steps_of):
    """Of buckets, by name: in each step a rank of three is last, so many milliseconds late."""
    records = []
    for bucket, steps in steps_of.items():
        for step, (late_rank, late_ms) in enumerate(steps):
            waited_s = [0.0 if rank == late_rank else late_ms / 1e3 for rank in range(3)]
            records.append(ReadinessRecord(bucket, step, tuple(waited_s)))
    return summary_of(records)


def test_statistics_by_hand():
    assert _summary(a=[(2, 2), (2, 1), (0, 4)], b=[(2, 3)]) == {
        "count": 4,
        "median_ms": pytest.approx(2.5),
        "mean_ms": pytest.approx(2.5),
        "max_ms": pytest.approx(4),
        "persistence": 0.5,
        "rank": 2,
        "share": 0.75,
    }
    assert _summary(b=[(2, 3)])["persistence"] is None
    assert _summary() is None


def test_steps_of_different_buckets_do_not_follow_one_another():
    assert _summary(a=[(0, 1)] * 3, b=[(1, 1)] * 3)["persistence"] == 1


def test_the_summary_of_a_long_run_takes_little_memory(tmp_path):
    waited_ms = [float(rank) for rank in range(64)]
    lines = [
        json.dumps({"iteration": 1 + number, "bucket": "a", "waited_ms": waited_ms})
        for number in range(2000)
    ]
    (tmp_path / READINESS_FILE).write_text("\n".join(lines) + "\n")
    tracemalloc.start()
    try:
        found = summary_of(read_readiness(tmp_path))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found is not None
    assert found["count"] == 2000
    assert most_bytes < 200 * 2000, "64 numbers of a line take ten times as much"
