"""Folders of runs, as `RunTelemetry` writes them, for the tests of reports."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_sparse.config.tracking import TrackingConfig
from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.recording import BucketRecord, GatherRecord, ReadinessRecord
from megatron_sparse.telemetry import RunTelemetry

PREDICTED_US = 1000.0


def make_run(
    folder: Path,
    name: str,
    *,
    iterations: int = 12,
    buckets: int = 3,
    density: float = 0.01,
    ends: bool = True,
    plan: bool = True,
    delays: bool = True,
    config: Mapping[str, Any] | None = None,
    gathers: bool = False,
) -> Path:
    """Writes the folder of a run of 4 ranks: two dense iterations, then `density`.

    Bucket i takes 2 (i + 1) ms on the network and was predicted 1 ms; rank 1 is always last. The
    training thread waits 10 ms, as long for each bucket. With `gathers` it waits
    4 ms for parameters, of which all of 300,000 bytes are sent, and later a third.
    """
    whole = {"name": name, "compression": {"density": density}, **(config or {})}
    telemetry = RunTelemetry(
        folder, TrackingConfig(console="off"), is_writer=True, resolved_config=whole
    )
    lines = [f"{key}: {json.dumps(value)}" for key, value in whole.items()]
    (folder / "config.yaml").write_text("\n".join(["# megatron-sparse train", *lines]) + "\n")
    for iteration in range(1, iterations + 1):
        dense = iteration <= 2
        for bucket in range(buckets):
            record = BucketRecord(
                f"group{bucket}.0",
                iteration - 1,
                "dense" if dense else "direct",
                "warmup" if dense else "target",
                1.0 if dense else density,
                numel=100_000,
                nnz=100_000 if dense else round(100_000 * density),
                dense_bytes=600_000,
                wire_bytes=600_000 if dense else round(1_200_000 * density),
                predicted_us=None if dense else PREDICTED_US,
                exposed_s=0.01 / buckets,
            )
            record.timer.add("network", 2000.0 * (bucket + 1))
            record.timer.add("prune", 300.0)
            telemetry.record_bucket(record)
            if delays and iteration > 2:
                waited_s = (0.004, 0.0, 0.003, 0.002)
                telemetry.record_readiness(ReadinessRecord(record.bucket, iteration - 3, waited_s))
        if gathers:
            method, sent = ("raw", 300) if dense else ("exact", 100)
            gather = GatherRecord("group0.0", iteration - 1, method, numel=100_000)
            gather.dense_bytes, gather.wire_bytes = 300_000, sent * 1000
            telemetry.record_gather(gather)
            telemetry.record_stage("param_wait", 0.004)
        telemetry.record_stage("forward_backward", 0.06)
        telemetry.record_stage("host_wait", 0.01)
        telemetry.record_stage("optimizer", 0.005)
        telemetry.end_iteration(iteration, iteration_s=0.1, loss=9.0 / iteration)
    if ends:
        telemetry.close({"residual": 400_000})
    telemetry.flush()
    if plan:
        profile = SparsityProfile.uniform(100_000, density, 4).to_dict()
        rows = [
            {
                "bucket": f"group{bucket}.0",
                "numel": 100_000,
                "op": "all_reduce",
                "world_size": 4,
                "density": density,
                "chosen": "direct",
                "profile": profile,
                "kept_numel": 0,
                "element_bytes": 4,
                "partial_bytes": 4,
                "predicted_us": {"dense": 5000.0, "direct": PREDICTED_US},
                "reason": "direct 1000 us, dense 5000 us",
            }
            for bucket in range(buckets)
        ]
        (folder / "plan.json").write_text(json.dumps({"step": iterations, "buckets": rows}))
    return folder
