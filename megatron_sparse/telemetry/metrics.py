"""Every number that the dashboards get: its name, its unit, what it says; and those of the buckets.

Names are grouped before the first slash. `<stage>`, `<scheme>` and `<bucket>` stand for names of
stages, schemes and buckets. Docs and dashboard are checked against this list by tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_sparse.recording import BUCKET_STAGES, BucketRecord, ReadinessRecord
from megatron_sparse.straggler.detector import delay_s

STEP = "iteration"
"""What every curve is drawn over."""
PLAN = "planner/plan"
"""The table of the plan: not a number."""


@dataclass(frozen=True)
class Metric:
    """One name, or a family of them.

    Attributes:
        name: as the dashboards show it.
        unit: of its values; empty for numbers without one.
        meaning: in a few words.
        sampled: only every `tracking.sample_every` iterations.
    """

    name: str
    unit: str
    meaning: str
    sampled: bool = False

    @property
    def group(self) -> str:
        """What is before the first slash."""
        return self.name.partition("/")[0]

    def matches(self, name: str) -> bool:
        """Whether a run's `name` is this one, or one of this family."""
        pattern = re.sub(r"<\w+>", ".+", re.sub(r"([.+*()\[\]])", r"\\\1", self.name))
        return re.fullmatch(pattern, name) is not None


METRICS = (
    Metric("train/loss", "", "loss of the iteration"),
    Metric("train/grad_norm", "", "norm of the synchronised gradient, before clipping"),
    Metric("train/learning_rate", "", "of the first parameter group"),
    Metric("train/skipped", "", "1 where the optimizer refused the step"),
    Metric("breakdown/iteration_ms", "ms", "the whole iteration, wall clock"),
    Metric("breakdown/<stage>_ms", "ms", "one stage; stages of buckets are summed over buckets"),
    Metric("comm/exposed_ms", "ms", "the training thread waited for synchronisation"),
    Metric("comm/overlapped_ms", "ms", "a bucket was in flight and the thread did not wait"),
    Metric("comm/host_cpu_ms", "ms", "the progress thread's processor time, over all buckets"),
    Metric("comm/dense_bytes", "B", "what a dense ring would have sent from this rank"),
    Metric("comm/wire_bytes", "B", "what this rank sent"),
    Metric("comm/wire_ratio", "", "wire bytes over dense bytes"),
    Metric("compression/density", "", "elements sent over elements in the buckets"),
    Metric("compression/target_density", "", "what was asked for, weighted by elements"),
    Metric("compression/residual_norm", "", "2-norm of this rank's residual", sampled=True),
    Metric("compression/residual_ratio", "", "that over the gradient's norm", sampled=True),
    Metric("planner/predicted_ms", "ms", "what the cost model expected of all buckets' stages"),
    Metric("planner/measured_ms", "ms", "what they took"),
    Metric("planner/buckets/<scheme>", "buckets", "how many a scheme carried"),
    Metric("straggler/delay_ms", "ms", "delays of the last rank, summed over buckets"),
    Metric("straggler/rank", "", "the rank that made the longest of them"),
    Metric("straggler/buckets_without", "buckets", "how many went on without a rank"),
    Metric("bucket/<bucket>/network_ms", "ms", "bytes under way, peers waited for", sampled=True),
    Metric("bucket/<bucket>/sync_ms", "ms", "from its launch to its end", sampled=True),
    Metric("bucket/<bucket>/measured_ms", "ms", "all its stages", sampled=True),
    Metric("bucket/<bucket>/predicted_ms", "ms", "what the cost model expected", sampled=True),
    Metric("bucket/<bucket>/host_cpu_ms", "ms", "processor time of its steps", sampled=True),
    Metric("bucket/<bucket>/dense_bytes", "B", "as above, of this bucket", sampled=True),
    Metric("bucket/<bucket>/wire_bytes", "B", "as above, of this bucket", sampled=True),
    Metric("bucket/<bucket>/density", "", "sent", sampled=True),
    Metric("bucket/<bucket>/target_density", "", "asked for", sampled=True),
    Metric("bucket/<bucket>/threshold", "", "median over its parameters", sampled=True),
    Metric("bucket/<bucket>/delay_ms", "ms", "how late its last rank was", sampled=True),
    Metric("bucket/<bucket>/straggler", "", "the rank that it went on without", sampled=True),
    Metric("extra/<name>", "", "what a training loop of your own adds"),
)

GROUPS = tuple(dict.fromkeys(metric.group for metric in METRICS))


def known(name: str) -> bool:
    """Whether `name` is in `METRICS`."""
    return any(metric.matches(name) for metric in METRICS)


def thresholds(records: Sequence[BucketRecord]) -> dict[str, float]:
    """The median threshold of each bucket that was selected from, by its name.

    One copy to the host for all of them. On CUDA it waits for the current stream, so it belongs
    after the end of an iteration, when the loss has been read and nothing is left to wait for.
    Ranges that are sent whole have none; a bucket of nothing else is left out.
    """
    held = [(r.bucket, r.thresholds_R) for r in records if r.thresholds_R is not None]
    if not held:
        return {}
    parts = torch.cat([thresholds_R.float() for _, thresholds_R in held]).cpu()
    found = {}
    for (name, _), part in zip(held, parts.split([t.numel() for _, t in held]), strict=True):
        pruned = part[part >= 0]
        if pruned.numel() and bool(pruned.isfinite().all()):
            found[name] = float(pruned.median())
    return found


def bucket_scalars(
    records: Sequence[BucketRecord],
    threshold: Mapping[str, float],
    readiness: Sequence[ReadinessRecord],
) -> dict[str, float]:
    """The metrics of each bucket of one iteration; what is not known is left out.

    Args:
        records: of the buckets.
        threshold: from `thresholds`.
        readiness: of the step before the last.
    """
    named: dict[str, float | None] = {}
    for record in records:
        stage_us = record.stage_us()
        predicted_us = record.predicted_us
        values = {
            "network_ms": stage_us["network"] / 1e3,
            "sync_ms": (record.finished_s - record.launched_s) * 1e3,
            "measured_ms": sum(stage_us[stage] for stage in BUCKET_STAGES) / 1e3,
            "predicted_ms": None if predicted_us is None else predicted_us / 1e3,
            "host_cpu_ms": record.host_cpu_us / 1e3,
            "dense_bytes": record.dense_bytes,
            "wire_bytes": record.wire_bytes,
            "density": record.nnz / record.numel if record.numel else None,
            "target_density": record.density,
            "threshold": threshold.get(record.bucket),
            "straggler": record.straggler,
        }
        named |= {f"bucket/{record.bucket}/{name}": value for name, value in values.items()}
    for late in readiness:
        named[f"bucket/{late.bucket}/delay_ms"] = delay_s(late.ready_s) * 1e3
    return {name: float(value) for name, value in named.items() if value is not None}


PLAN_COLUMNS = ("bucket", "elements", "density", "scheme", "predicted_ms", "reason")


def plan_table(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """The rows of `plan.json` as lines of a table with `PLAN_COLUMNS`."""
    lines = []
    for row in rows:
        predicted_us = row.get("predicted_us", {}).get(row["chosen"])
        predicted_ms = None if predicted_us is None else predicted_us / 1e3
        lines.append(
            [
                row["bucket"],
                row["numel"],
                row["density"],
                row["chosen"],
                predicted_ms,
                row["reason"],
            ]
        )
    return lines
