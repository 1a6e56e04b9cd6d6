"""Every metric of the dashboards, with name, unit and meaning; and how a bucket's are computed.

The part of a name before the first slash is its group. `<stage>`, `<scheme>` and `<bucket>` stand
for names of stages, schemes and buckets. Tests check the docs and the dashboard against this list.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_sparse.recording import BUCKET_STAGES, BucketRecord, ReadinessRecord
from megatron_sparse.straggler.detector import delay_s

STEP = "iteration"
"""The x axis of every curve."""


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of metrics.

    Attributes:
        name: the name in the dashboards.
        unit: the unit of its values; empty if they have none.
        meaning: a short description.
        sampled: whether it is logged only every `tracking.sample_every` iterations.
        of: the attribute of `IterationBreakdown` with its value. None for values from elsewhere;
            by default (empty) the name's last part, after `param_` in the group `params`.
    """

    name: str
    unit: str
    meaning: str
    sampled: bool = False
    of: str | None = ""

    @property
    def group(self) -> str:
        """The part of the name before the first slash."""
        return self.name.partition("/")[0]

    @property
    def attribute(self) -> str | None:
        """The attribute of `IterationBreakdown` with the metric's value; None if there is none."""
        if self.sampled or "<" in self.name:  # not in the breakdown, or a family of metrics
            return None
        prefix = "param_" if self.group == "params" else ""
        by_default = prefix + self.name.rpartition("/")[2]
        return by_default if self.of == "" else self.of

    @property
    def of_gathers(self) -> bool:
        """Whether it is known only where parameters are gathered."""
        return self.group == "params" or self.name == "comm/total_wire_ratio"

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric or belongs to this family."""
        return re.match(pattern_of(self.name), name) is not None


METRICS = (
    Metric("train/loss", "", "loss of the iteration"),
    Metric("train/grad_norm", "", "norm of the synchronised gradient, before clipping"),
    Metric("train/learning_rate", "", "learning rate of the first parameter group"),
    Metric("train/skipped", "", "1 if the optimizer refused the step"),
    Metric("train/tokens_per_s", "tokens/s", "tokens of all ranks over the iteration's time"),
    Metric("train/model_tflop_per_s", "TFLOP/s", "the model's own operations, of each GPU"),
    Metric("breakdown/iteration_ms", "ms", "the whole iteration, wall clock"),
    Metric("breakdown/<stage>_ms", "ms", "one stage; stages of buckets are summed over buckets"),
    Metric("breakdown/other_ms", "ms", "the rest of the iteration: in no stage of the thread"),
    Metric("comm/exposed_ms", "ms", "the training thread waited, for gradients and parameters"),
    Metric("comm/grad_exposed_ms", "ms", "the part of it for gradients"),
    Metric("comm/exposed_share", "", "exposed time over the iteration's time"),
    Metric("comm/overlapped_ms", "ms", "a bucket was in flight and the thread did not wait"),
    Metric("comm/dense_bytes", "B", "bytes that this rank would have sent in a dense ring"),
    Metric("comm/wire_bytes", "B", "bytes that this rank sent"),
    Metric("comm/inside_bytes", "B", "those of them that stayed inside the node or instance"),
    Metric("comm/inside_ms", "ms", "network time that they took, over all buckets"),
    Metric("comm/wire_ratio", "", "wire bytes over dense bytes, gradients only"),
    Metric("comm/bits_per_element", "", "bits of this rank's own messages for each element"),
    Metric("comm/total_wire_ratio", "", "wire bytes over dense bytes, gradients and parameters"),
    Metric("params/exposed_ms", "ms", "the part of `comm/exposed_ms` for gathered parameters"),
    Metric("params/dense_bytes", "B", "bytes of parameters in a raw all-gather on a ring"),
    Metric("params/wire_bytes", "B", "bytes of parameters that this rank sent"),
    Metric("compression/density", "", "elements sent over elements in the buckets"),
    Metric(
        "compression/target_density",
        "",
        "target density, weighted by elements",
        of="planned_density",
    ),
    Metric("compression/residual_norm", "", "2-norm of this rank's residual", sampled=True),
    Metric("compression/residual_ratio", "", "residual norm over gradient norm", sampled=True),
    Metric("planner/predicted_ms", "ms", "predicted time of all buckets' stages"),
    Metric("planner/measured_ms", "ms", "measured time of all buckets' stages"),
    Metric("planner/buckets/<scheme>", "buckets", "buckets that a scheme carried"),
    Metric("straggler/delay_ms", "ms", "delays of the last rank, summed over buckets", of=None),
    Metric("straggler/rank", "", "the rank with the longest delay", of=None),
    Metric("straggler/buckets_without", "buckets", "buckets that skipped a rank", of=None),
    Metric("bucket/<bucket>/exposed_ms", "ms", "the training thread waited for it", sampled=True),
    Metric("bucket/<bucket>/network_ms", "ms", "transfers and waits for peers", sampled=True),
    Metric("bucket/<bucket>/measured_ms", "ms", "measured time of all stages", sampled=True),
    Metric("bucket/<bucket>/predicted_ms", "ms", "predicted time of all stages", sampled=True),
    Metric("bucket/<bucket>/wire_bytes", "B", "bytes that this rank sent", sampled=True),
    Metric("bucket/<bucket>/delay_ms", "ms", "delay of its last rank", sampled=True),
    Metric("extra/<name>", "", "a number that your own training loop adds"),
)

GROUPS = tuple(dict.fromkeys(metric.group for metric in METRICS))


def pattern_of(name: str) -> str:
    """A regular expression for a metric's name, or for all names of a family."""
    return "^" + ".+".join(re.escape(part) for part in re.split(r"<\w+>", name)) + "$"


def known(name: str) -> bool:
    """Whether `name` is in `METRICS`."""
    return any(metric.matches(name) for metric in METRICS)


def bucket_scalars(
    records: Sequence[BucketRecord], readiness: Sequence[ReadinessRecord]
) -> dict[str, float]:
    """Computes the metrics of each bucket of one iteration.

    Args:
        records: the buckets' records.
        readiness: for each bucket, when the ranks were ready two steps earlier (the newest known).

    Returns:
        Full metric name, `bucket/<bucket>/...` -> value; without unknown values.
    """
    named: dict[str, float | None] = {}
    for record in records:
        stage_us = record.timer.times_us()
        predicted_us = record.predicted_us
        values = {
            "exposed_ms": record.exposed_s * 1e3,
            "network_ms": stage_us["network"] / 1e3,
            "measured_ms": sum(stage_us[stage] for stage in BUCKET_STAGES) / 1e3,
            "predicted_ms": None if predicted_us is None else predicted_us / 1e3,
            "wire_bytes": record.wire_bytes,
        }
        named |= {f"bucket/{record.bucket}/{name}": value for name, value in values.items()}
    for late in readiness:
        named[f"bucket/{late.bucket}/delay_ms"] = delay_s(late.ready_s) * 1e3
    return {name: float(value) for name, value in named.items() if value is not None}
