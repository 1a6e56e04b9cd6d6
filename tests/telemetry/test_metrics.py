"""Metric names: all listed, with units; the values of buckets' metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from megatron_sparse.config.tracking import TrackingConfig
from megatron_sparse.recording import BUCKET_STAGES, STAGES, ReadinessRecord
from megatron_sparse.telemetry import RunTelemetry
from megatron_sparse.telemetry.metrics import (
    METRICS,
    PLAN_COLUMNS,
    bucket_scalars,
    known,
    plan_table,
    thresholds,
)
from tests.records import Sink, bucket_record

GUIDE = Path(__file__).parents[2] / "docs" / "tracking.md"
UNITS = {"ms": "_ms", "B": "_bytes"}


def record(name="group0.0", **fields):
    stage_us = {"network": 2000.0, "prune": 500.0}
    return bucket_record(name, stage_us=stage_us, **({"density": 0.02, "nnz": 30} | fields))


def test_units_are_suffixes():
    for metric in METRICS:
        suffix = UNITS.get(metric.unit)
        assert suffix is None or metric.name.endswith(suffix), metric.name
        assert metric.meaning
        # And the other way round.
        for unit, ending in UNITS.items():
            assert not metric.name.endswith(ending) or metric.unit == unit, metric.name


def test_every_stage_is_known_and_other_names_are_not():
    assert all(known(f"breakdown/{stage}_ms") for stage in (*STAGES, "other"))
    assert known("bucket/chunk1.group0.0/threshold")
    for name in ("bucket/group0.0/thresholds", "comm/exposed", "xcomm/exposed_ms", "threshold"):
        assert not known(name), name


def test_bucket_scalars():
    made = record(
        predicted_us=4000.0,
        launched_s=1.0,
        finished_s=1.5,
        dense_bytes=4000,
        wire_bytes=240,
        straggler=2,
        host_cpu_us=1500.0,
        exposed_s=0.125,
    )
    late = ReadinessRecord("group0.0", 1, (0.25, 0.0, 0.0))
    assert bucket_scalars([made], {"group0.0": 0.125}, [late]) == {
        "bucket/group0.0/exposed_ms": 125.0,
        "bucket/group0.0/network_ms": 2.0,
        "bucket/group0.0/sync_ms": 500.0,
        "bucket/group0.0/measured_ms": 2.5,
        "bucket/group0.0/predicted_ms": 4.0,
        "bucket/group0.0/host_cpu_ms": 1.5,
        "bucket/group0.0/dense_bytes": 4000.0,
        "bucket/group0.0/wire_bytes": 240.0,
        "bucket/group0.0/density": 0.03,
        "bucket/group0.0/target_density": 0.02,
        "bucket/group0.0/threshold": 0.125,
        "bucket/group0.0/straggler": 2.0,
        # Two ranks were ready at the same time and waited only for each other: a delay of 0.
        "bucket/group0.0/delay_ms": pytest.approx(0.0),
    }
    # Unknown values are left out, not 0.
    left = bucket_scalars([record(numel=0, nnz=0)], {}, [])
    for name in ("predicted_ms", "threshold", "straggler", "density"):
        assert f"bucket/group0.0/{name}" not in left


def test_thresholds_are_medians_over_pruned_ranges():
    held = {
        "pruned": torch.tensor([0.5, -1.0, 2.0, 1.0]),
        "kept": torch.tensor([-1.0, -1.0]),
        "nan": torch.tensor([0.5, float("nan"), float("inf")]),
        "one": torch.tensor([3.0]),
    }
    records = [record(name, thresholds_R=values) for name, values in held.items()]
    found = thresholds([*records, record("dense", thresholds_R=None)])
    assert found == {"pruned": 1.0, "one": 3.0}
    assert thresholds([record("dense", thresholds_R=None)]) == {}


class Untouchable:
    """Thresholds on a device: reading them waits for the device."""

    def __getattr__(self, name):
        raise AssertionError(f"read by {name} in an iteration that is not sampled")


def test_buckets_thresholds_and_plan_are_read_every_few_iterations(tmp_path):
    """And the plan is shown again only when a bucket has another scheme."""
    sink, scheme = Sink(), "dense"
    telemetry = RunTelemetry(
        tmp_path,
        TrackingConfig(console="off", sample_every=2),
        is_writer=True,
        sinks=[sink],
        plan_rows=lambda: [
            {
                "bucket": "b",
                "numel": 8,
                "density": 0.5,
                "chosen": scheme,
                "reason": "why",
                "predicted_us": {"direct": 1500.0},
            }
        ],
    )
    for iteration in range(1, 9):
        scheme = "dense" if iteration < 5 else "direct"
        pruned = torch.tensor([0.5]) if scheme == "direct" else None
        if iteration % 2:
            pruned = Untouchable()
        telemetry.record_bucket(record("b", scheme=scheme, thresholds_R=pruned))
        telemetry.end_iteration(iteration, iteration_s=0.1)
    telemetry.close()
    sampled = [step for step, row in sink.rows.items() if "bucket/b/network_ms" in row]
    assert sampled == [2, 4, 6, 8]
    assert [step for step, row in sink.rows.items() if "bucket/b/threshold" in row] == [6, 8]
    assert all(known(name) for row in sink.rows.values() for name in row)
    assert [step for step, _ in sink.plans] == [2, 6]
    assert sink.plans[1][1] == [["b", 8, 0.5, "direct", 1.5, "why"]]
    lines = [json.loads(line) for line in (tmp_path / "buckets.jsonl").read_text().splitlines()]
    assert [line["threshold"] for line in lines] == [None] * 5 + [0.5, None, 0.5]


def test_sampling_can_be_off_and_is_the_writers(tmp_path):
    for tracking, writer in (
        (TrackingConfig(console="off", sample_every=0), True),
        (TrackingConfig(console="off", sample_every=1), False),
    ):
        telemetry = RunTelemetry(tmp_path, tracking, is_writer=writer)
        assert not any(telemetry.samples(iteration) for iteration in range(1, 30))


def test_plan_rows_without_a_cost_model_have_no_prediction():
    row = {"bucket": "b", "numel": 8, "density": 1.0, "chosen": "dense", "reason": "scheme=dense"}
    (line,) = plan_table([row])
    assert dict(zip(PLAN_COLUMNS, line, strict=True))["predicted_ms"] is None


def test_the_guide_lists_every_metric_with_its_unit():
    table = re.findall(r"^\| `([a-z_]+/[^`]+)` \| ([^|]*) \| ([^|]*) \|", GUIDE.read_text(), re.M)
    assert [(name, unit.strip(), meaning.strip()) for name, unit, meaning in table] == [
        (m.name, m.unit, m.meaning + (" (sampled)" if m.sampled else "")) for m in METRICS
    ]
    assert set(STAGES) >= set(BUCKET_STAGES)
