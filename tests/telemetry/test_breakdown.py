"""The breakdown of an iteration: sums, overlap, and values that JSON lacks."""

import json
import math

import pytest

from megatron_sparse.compression.schedule import Phase
from megatron_sparse.recording import BUCKET_STAGES, INSIDE_TIER, STAGES, WAITS, GatherRecord
from megatron_sparse.telemetry.breakdown import (
    IterationBreakdown,
    bucket_line,
    in_flight_s,
    iteration_breakdown,
)
from megatron_sparse.telemetry.dashboard import ITERATION_PARTS
from tests.records import bucket_record as record


def of(*records, waits=None, iteration_s=1.0, **more):
    """The breakdown of an iteration with these buckets and seconds of the training thread."""
    return iteration_breakdown(1, records, waits or {}, iteration_s=iteration_s, **more)


def test_sums_over_buckets():
    one, other = {"dense_bytes": 6000, "wire_bytes": 200}, {"dense_bytes": 18000, "nnz": 90}
    dense = {"scheme": "dense", "numel": 3000, "wire_bytes": 18000}
    records = [
        record("a", **one, stage_us={"prune": 1500.0, "network": 250.0}),
        record("b", **dense, **other, stage_us={"network": 750.0}),
    ]
    b = iteration_breakdown(
        7,
        records,
        {"forward_backward": 0.04, "host_wait": 0.005},
        iteration_s=0.05,
        loss=2.5,
        grad_norm=1.25,
        extra={"learning_rate": 1e-3, "residual_norm": 4.0},
    )
    assert set(b.stage_ms) == set(STAGES)
    assert b.stage_ms["prune"] == 1.5
    assert b.stage_ms["network"] == 1.0
    assert b.stage_ms["forward_backward"] == 40.0
    assert b.stage_ms["optimizer"] == 0.0
    assert (b.iteration_ms, b.exposed_ms) == (50.0, 5.0)
    assert (b.dense_bytes, b.wire_bytes, b.nnz, b.numel) == (24000, 18200, 100, 4000)
    assert b.density == 0.025
    assert b.planned_density == 0.01
    assert b.schemes == {"agsparse": 1, "dense": 1}
    assert (b.loss, b.grad_norm, b.learning_rate, b.skipped) == (2.5, 1.25, 1e-3, False)
    assert b.extra == {"residual_norm": 4.0}


def test_overlap_counts_time_in_flight_once_and_without_the_wait():
    records = [
        record("a", launched_s=1.0, finished_s=3.0),
        record("b", launched_s=2.0, finished_s=4.0),
        record("c", launched_s=2.5, finished_s=2.75),
        record("d", launched_s=10.0, finished_s=10.5),
    ]
    assert in_flight_s(records) == 3.5
    assert in_flight_s(records[::-1]) == 3.5
    assert of(*records, waits={"host_wait": 1.5}, iteration_s=12.0).overlapped_ms == 2000.0
    # A thread that waits longer than any bucket was in flight has no overlap, not a negative one.
    assert of(*records, waits={"host_wait": 9.0}, iteration_s=12.0).overlapped_ms == 0
    assert in_flight_s([]) == 0.0


def test_phase_is_that_of_most_elements():
    records = [
        record("a", phase=Phase.OFF, numel=10),
        record("b", phase=Phase.OFF, numel=10),
        record("c", phase=Phase.RAMP, numel=100),
    ]
    phase = of(*records).phase
    assert phase == "ramp"
    assert type(phase) is str


def test_iteration_without_buckets():
    b = of(iteration_s=0.25, skipped=True)
    assert (b.phase, b.density, b.wire_ratio, b.schemes) == ("off", None, None, {})
    of_bytes, of_time = ("dense", "wire", "inside"), ("inside", "exposed", "grad_exposed")
    assert b.scalars() == {
        **{f"comm/{name}_bytes": 0.0 for name in of_bytes},
        **{f"comm/{name}_ms": 0.0 for name in (*of_time, "overlapped")},
        "comm/exposed_share": 0.0,
        "breakdown/iteration_ms": 250.0,
        "breakdown/other_ms": 250.0,
        **{f"breakdown/{stage}_ms": 0.0 for stage in STAGES if stage not in WAITS},
        "train/skipped": 1.0,
    }


def test_gathers_of_parameters_are_counted_beside_gradients():
    gathers = [
        GatherRecord("a", 1, "raw", numel=1000, dense_bytes=600, wire_bytes=600),
        GatherRecord("b", 1, "exact", numel=1000, dense_bytes=600, wire_bytes=150),
        GatherRecord("c", 1, "exact", numel=1000, dense_bytes=600, wire_bytes=150),
    ]
    waits = {"host_wait": 0.01, "param_wait": 0.02}
    b = of(record(dense_bytes=1200, wire_bytes=100), waits=waits, iteration_s=0.1, gathers=gathers)
    assert (b.param_dense_bytes, b.param_wire_bytes) == (1800, 900)
    assert b.param_gathers == {"raw": 1, "exact": 2}
    assert (b.wire_ratio, b.total_wire_ratio) == (100 / 1200, 1000 / 3000)
    assert (b.exposed_ms, b.grad_exposed_ms, b.param_exposed_ms) == (30.0, 10.0, 20.0)
    assert (b.exposed_share, b.other_ms) == (0.3, 70.0)
    scalars = b.scalars()
    # Stacked in a dashboard the parts are as high as the iteration.
    parts_ms = sum(scalars[name] for name in ITERATION_PARTS)
    assert parts_ms == pytest.approx(scalars["breakdown/iteration_ms"])
    assert scalars["params/exposed_ms"] == 20.0
    assert scalars["comm/total_wire_ratio"] == 1000 / 3000
    assert IterationBreakdown(**json.loads(b.line())) == b


def test_scalars_have_units_and_names():
    bucket = record(dense_bytes=1000, wire_bytes=250, stage_us={"prune": 2000.0})
    extra = {"learning_rate": 0.5, "residual_norm": 2.0, "cluster/rtt_ms": 1.0}
    waits = {"optimizer": 0.01}
    scalars = of(bucket, waits=waits, iteration_s=0.1, loss=3.0, extra=extra).scalars()
    assert scalars["breakdown/prune_ms"] == 2.0
    assert scalars["breakdown/optimizer_ms"] == 10.0
    assert scalars["train/loss"] == 3.0
    assert scalars["train/learning_rate"] == 0.5
    assert scalars["compression/target_density"] == 0.01
    assert scalars["planner/buckets/agsparse"] == 1.0
    assert scalars["extra/residual_norm"] == 2.0
    assert scalars["cluster/rtt_ms"] == 1.0
    assert "train/grad_norm" not in scalars
    assert all(type(value) is float for value in scalars.values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_become_null(value):
    b = of(record(), loss=value, grad_norm=value, extra={"x": value})
    assert (b.loss, b.grad_norm, b.extra) == (None, None, {"x": None})
    assert IterationBreakdown(**json.loads(b.line())) == b
    assert not {"train/loss", "train/grad_norm", "extra/x"} & set(b.scalars())


def test_lines_read_back():
    r = record(
        'odd "name"\n\\',
        launched_s=5.25,
        finished_s=5.5,
        dense_bytes=8,
        wire_bytes=4,
        inside_bytes=3,
        phase=Phase.TARGET,
        stage_us={"prune": 12.345, INSIDE_TIER: 2.5},
    )
    b = of(r, waits={"optimizer": 0.1}, loss=0.1)
    assert "\n" not in b.line()
    assert IterationBreakdown(**json.loads(b.line())) == b
    line = bucket_line(r, 9, origin_s=5.0)
    assert "\n" not in line
    assert json.loads(line) == {
        "iteration": 9,
        "bucket": 'odd "name"\n\\',
        "step": 3,
        "scheme": "agsparse",
        "phase": "target",
        "straggler": None,
        "planned_density": 0.01,
        "density": 0.01,
        "numel": 1000,
        "nnz": 10,
        "dense_bytes": 8,
        "wire_bytes": 4,
        "inside_bytes": 3,
        "inside_us": 2.5,
        "predicted_us": None,
        "measured_us": 12.3,
        "exposed_us": 0.0,
        "host_cpu_us": 0.0,
        "host_wall_us": 0.0,
        "launched_us": 250_000.0,
        "finished_us": 500_000.0,
        # rounded to a tenth of a microsecond: the clock is no better
        "stage_us": dict.fromkeys(BUCKET_STAGES, 0.0) | {"prune": 12.3},
    }
    assert json.loads(bucket_line(record(numel=0, nnz=0, density=1), 9, 0.0))["density"] is None


def test_the_hosts_time_is_that_of_the_progress_thread():
    """As `Pending` has measured it, in seconds; added up over the buckets of an iteration."""
    records = [record(), record()]
    for one, cpu_s in zip(records, (0.002, 0.0035), strict=True):
        one.end(finished_s=7.0, host_cpu_s=cpu_s, host_wall_s=2 * cpu_s)
        assert one.finished_s == 7.0
    line = json.loads(bucket_line(records[0], 1, 0.0))
    assert (line["host_cpu_us"], line["host_wall_us"]) == (2000.0, 4000.0)
    assert of(*records).host_cpu_ms == pytest.approx(5.5)


def test_predicted_times_stand_beside_measured_ones():
    planned = [record(predicted_us=us, stage_us={"prune": 500.0}) for us in (1000.0, 2000.0)]
    line = json.loads(bucket_line(planned[0], 1, 0.0))
    assert (line["predicted_us"], line["measured_us"]) == (1000.0, 500.0)
    b = of(*planned)
    assert b.predicted_ms == 3.0
    assert b.scalars()["planner/predicted_ms"] == 3.0
    assert b.scalars()["planner/measured_ms"] == 1.0
    # A sum of some of them would be compared with all of them.
    mixed = of(*planned, record())
    assert mixed.predicted_ms is None
    assert "planner/measured_ms" not in mixed.scalars()
