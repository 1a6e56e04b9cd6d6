"""One iteration in numbers: where its time went and what it sent.

Everything here is a pure function of the reducer's records. Do not add up the two kinds of time:
*step stages* are disjoint parts of the training thread's iteration; *bucket stages* are summed over
buckets and may run in parallel with the thread and with each other. Communication for which the
thread waits is *exposed*; what runs beside its computation is *overlapped*.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_sparse.recording import (
    BUCKET_STAGES,
    STAGES,
    STEP_STAGES,
    WAITS,
    BucketRecord,
    GatherRecord,
)
from megatron_sparse.telemetry.metrics import METRICS
from megatron_sparse.telemetry.quantities import REST, exposed_share, ratio, thread_parts

SUMMED = ("dense_bytes", "wire_bytes", "inside_bytes", "message_bytes", "nnz", "numel")
"""Attributes of a bucket's record that an iteration adds up."""
OF_RUN = ("learning_rate", "tokens_per_s", "model_tflop_per_s")
"""Numbers of the training loop that have a field of their own."""

# allow_nan=False: `NaN` is not JSON, and many readers reject the whole file because of it.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@dataclass
class IterationBreakdown:
    """What one iteration cost and sent, on one rank.

    Attributes:
        iteration: number of the iteration, as the training loop counts.
        phase: `trial`, `off`, `warmup`, `ramp` or `target`; `off` when no bucket was synchronised.
        iteration_ms: wall-clock milliseconds.
        stage_ms: milliseconds of every stage in `recording.STAGES`; stages of buckets are summed
            over the buckets.
        overlapped_ms: milliseconds for which a bucket was in flight and the thread did not wait.
        dense_bytes: bytes that a dense ring would have sent, summed over buckets.
        wire_bytes: bytes that this rank sent, summed over buckets.
        inside_bytes: those of `wire_bytes` that stayed inside the node or instance, at
            `compression.level=node` or `instance`; the rest crossed between them.
        inside_ms: milliseconds of the stage `network` that they took, summed over buckets.
        message_bytes: bytes of this rank's own messages, summed over buckets.
        nnz: elements sent, summed over buckets.
        numel: elements in the buckets.
        density: nnz / numel; None when there was no bucket.
        schemes: number of buckets by scheme.
        predicted_ms: the cost model's prediction for the buckets' stages, summed; None unless the
            planner chose every bucket's scheme by it.
        loss: loss of the iteration; None if it was not logged or not finite.
        grad_norm: norm of the gradient; None like `loss`.
        learning_rate: None if the caller gave none.
        skipped: the optimizer refused the step.
        extra: further numbers of the caller; a value that is not finite is None.
        planned_density: the target density, weighted by elements; None like `density`.
        host_cpu_ms: CPU milliseconds that the progress thread spent on the buckets, summed.
        tokens_per_s: tokens that all ranks trained on, by the wall clock; None if unknown.
        model_tflop_per_s: TFLOP/s of one GPU, of the model's own operations; None without a GPU.
        param_dense_bytes: bytes that a ring all-gather of the raw parameters would have sent,
            summed over the gathers that ended in the iteration; 0 without a sharded optimizer.
        param_wire_bytes: bytes that this rank sent in them.
        param_gathers: number of buckets' gathers by method: `raw`, `exact`, `lossy`.
    """

    iteration: int
    phase: str
    iteration_ms: float
    stage_ms: dict[str, float]
    overlapped_ms: float
    dense_bytes: int
    wire_bytes: int
    nnz: int
    numel: int
    density: float | None
    schemes: dict[str, int]
    predicted_ms: float | None
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    skipped: bool
    extra: dict[str, float | None]
    planned_density: float | None
    message_bytes: int
    host_cpu_ms: float
    tokens_per_s: float | None
    model_tflop_per_s: float | None
    param_dense_bytes: int
    param_wire_bytes: int
    param_gathers: dict[str, int]
    inside_bytes: int
    inside_ms: float

    @property
    def exposed_ms(self) -> float:
        """Milliseconds for which the training thread waited, for gradients and parameters."""
        return self.grad_exposed_ms + self.param_exposed_ms

    @property
    def grad_exposed_ms(self) -> float:
        """Those of `exposed_ms` that were for gradients."""
        return self.stage_ms["host_wait"]

    @property
    def param_exposed_ms(self) -> float:
        """Those of `exposed_ms` that were for gathered parameters."""
        return self.stage_ms["param_wait"]

    @property
    def exposed_share(self) -> float | None:
        """`quantities.exposed_share` of the iteration; None for one without duration."""
        return exposed_share(self.stage_ms, self.iteration_ms)

    @property
    def other_ms(self) -> float:
        """Milliseconds of the iteration that belong to no stage of the training thread."""
        return thread_parts(self.stage_ms, self.iteration_ms)[REST]

    @property
    def wire_ratio(self) -> float | None:
        """wire_bytes / dense_bytes; None where dense would send nothing (a single rank)."""
        return ratio(self.wire_bytes, self.dense_bytes)

    @property
    def total_wire_ratio(self) -> float | None:
        """`wire_ratio` of gradients and parameters together."""
        dense_bytes = self.dense_bytes + self.param_dense_bytes
        return ratio(self.wire_bytes + self.param_wire_bytes, dense_bytes)

    @property
    def bits_per_element(self) -> float | None:
        """Bits of this rank's own messages for each element; None without a bucket."""
        return ratio(8 * self.message_bytes, self.numel)

    @property
    def measured_ms(self) -> float | None:
        """The measured counterpart of `predicted_ms`."""
        if self.predicted_ms is None:
            return None
        return sum(self.stage_ms[stage] for stage in BUCKET_STAGES)

    def scalars(self) -> dict[str, float]:
        """Returns the breakdown as dashboard metrics (`metrics.METRICS`): name -> value.

        Leaves out values that are None, and the gathers' metrics if no parameters were gathered.
        """
        named: dict[str, float | None] = {}
        for metric in METRICS:
            applies = bool(self.param_gathers) or not metric.of_gathers
            if metric.attribute and applies:
                named[metric.name] = getattr(self, metric.attribute)
        named |= {f"planner/buckets/{scheme}": count for scheme, count in self.schemes.items()}
        # The waits have names elsewhere: `comm/grad_exposed_ms` and `params/exposed_ms`.
        busy = [stage for stage in STAGES if stage not in WAITS]
        named |= {f"breakdown/{stage}_ms": self.stage_ms[stage] for stage in busy}
        for name, value in self.extra.items():
            has_group = "/" in name  # a metric's full name
            named[name if has_group else f"extra/{name}"] = value
        return {name: float(value) for name, value in named.items() if value is not None}

    def line(self) -> str:
        """Returns the line of `breakdown.jsonl`, read by `IterationBreakdown(**json.loads(line))`.

        Raises:
            ValueError: a time is not finite, which JSON cannot express.
        """
        return _encode(self.__dict__)


def in_flight_s(records: Sequence[BucketRecord]) -> float:
    """Returns the seconds in which at least one bucket was between its launch and its end.

    Example:
        Two buckets in flight from 1.0 to 3.0 s and from 2.0 to 4.0 s give 3.0, not 4.0.
    """
    total_s, counted_until_s = 0.0, -math.inf
    for begin_s, end_s in sorted((record.launched_s, record.finished_s) for record in records):
        total_s += max(0.0, end_s - max(begin_s, counted_until_s))
        counted_until_s = max(counted_until_s, end_s)
    return total_s


def finite(value: float | None) -> float | None:
    """Returns `value` as a Python float; None if it is NaN or infinite, which JSON cannot express.

    Pass no CUDA tensor: reading it would wait for the GPU.
    """
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def iteration_breakdown(
    iteration: int,
    records: Sequence[BucketRecord],
    step_s: Mapping[str, float],
    *,
    iteration_s: float,
    loss: float | None = None,
    grad_norm: float | None = None,
    skipped: bool = False,
    extra: Mapping[str, float] | None = None,
    gathers: Sequence[GatherRecord] = (),
) -> IterationBreakdown:
    """Makes the breakdown of an iteration: adds up its buckets and gathers, computes its times.

    Args:
        iteration: number of the iteration.
        records: one record for each bucket of the iteration, in any order.
        step_s: host seconds of each of `STEP_STAGES`; a missing one counts as 0.
        iteration_s: wall-clock seconds of the whole iteration.
        loss: a number on the host; None if unknown.
        grad_norm: a number on the host; None if unknown.
        skipped: the optimizer refused the step.
        extra: further numbers by name; `learning_rate`, `tokens_per_s` and `model_tflop_per_s`
            become the breakdown's fields of these names.
        gathers: one record for each gather of a bucket's parameters.

    Returns:
        The breakdown. Its phase is the one that most elements were in. On CUDA this waits for the
        stages' events: call it at the end of an iteration, never inside it.
    """
    stage_us: dict[str, float] = dict.fromkeys(BUCKET_STAGES, 0.0)
    schemes = Counter(record.scheme for record in records)
    numel_by_phase: Counter[str] = Counter()
    for record in records:
        for stage, time_us in record.timer.times_us().items():
            stage_us[stage] += time_us
        # str(): a plain string instead of a member of a StrEnum, as it reads back from JSON.
        numel_by_phase[str(record.phase)] += record.numel
    sums = {name: sum(getattr(record, name) for record in records) for name in SUMMED}
    planned_nnz = sum(record.density * record.numel for record in records)
    exposed_ms = step_s.get("host_wait", 0.0) * 1e3
    further = {name: finite(value) for name, value in (extra or {}).items()}
    # `pop`: numbers that are fields of the breakdown are not also in its `extra`.
    fields: dict[str, Any] = {name: further.pop(name, None) for name in OF_RUN}
    return IterationBreakdown(
        iteration=iteration,
        phase=max(numel_by_phase, key=numel_by_phase.__getitem__) if records else "off",
        iteration_ms=iteration_s * 1e3,
        stage_ms={stage: step_s.get(stage, 0.0) * 1e3 for stage in STEP_STAGES}
        | {stage: time_us / 1e3 for stage, time_us in stage_us.items()},
        overlapped_ms=max(0.0, in_flight_s(records) * 1e3 - exposed_ms),
        **sums,
        density=ratio(sums["nnz"], sums["numel"]),
        schemes=dict(schemes),
        predicted_ms=_sum_ms([record.predicted_us for record in records]),
        loss=finite(loss),
        grad_norm=finite(grad_norm),
        skipped=bool(skipped),
        extra=further,
        **fields,
        planned_density=ratio(planned_nnz, sums["numel"]),
        host_cpu_ms=sum(record.host_cpu_us for record in records) / 1e3,
        param_dense_bytes=sum(gather.dense_bytes for gather in gathers),
        param_wire_bytes=sum(gather.wire_bytes for gather in gathers),
        param_gathers=dict(Counter(gather.method for gather in gathers)),
        inside_ms=sum(record.timer.inside_us() for record in records) / 1e3,
    )


def _sum_ms(times_us: Sequence[float | None]) -> float | None:
    known_us = [time_us for time_us in times_us if time_us is not None]
    return sum(known_us) / 1e3 if known_us and len(known_us) == len(times_us) else None


def bucket_line(record: BucketRecord, iteration: int, origin_s: float) -> str:
    """Returns the line of `buckets.jsonl` for one bucket.

    Formatted by hand: the general encoder takes three times as long, and an iteration of a large
    model has hundreds of buckets. The tests read every line back.

    Args:
        record: the bucket's record.
        iteration: number of the iteration.
        origin_s: `time.perf_counter` seconds at which `launched_us` and `finished_us` are 0.

    Returns:
        JSON. `density` is the fraction sent (nnz / numel), `planned_density` the target;
        `measured_us`, the sum of all stages, compares with `predicted_us`; `exposed_us` is the
        training thread's wait; `host_cpu_us` and `host_wall_us` are the progress thread's.
    """
    density = repr(record.nnz / record.numel) if record.numel else "null"
    stage_us = record.timer.times_us()
    stages = ",".join([f'"{stage}":{us:.1f}' for stage, us in stage_us.items()])
    predicted = "null" if record.predicted_us is None else f"{record.predicted_us:.1f}"
    return (
        f'{{"iteration":{iteration},"bucket":{_quoted(record.bucket)},"step":{record.step},'
        f'"scheme":{_quoted(record.scheme)},"phase":{_quoted(record.phase)},'
        f'"straggler":{"null" if record.straggler is None else record.straggler},'
        f'"planned_density":{float(record.density)!r},"density":{density},'
        f'"numel":{record.numel},"nnz":{record.nnz},'
        f'"dense_bytes":{record.dense_bytes},"wire_bytes":{record.wire_bytes},'
        f'"inside_bytes":{record.inside_bytes},"inside_us":{record.timer.inside_us():.1f},'
        f'"predicted_us":{predicted},"measured_us":{sum(stage_us.values()):.1f},'
        f'"exposed_us":{record.exposed_s * 1e6:.1f},'
        f'"host_cpu_us":{record.host_cpu_us:.1f},"host_wall_us":{record.host_wall_us:.1f},'
        f'"launched_us":{(record.launched_s - origin_s) * 1e6:.1f},'
        f'"finished_us":{(record.finished_s - origin_s) * 1e6:.1f},"stage_us":{{{stages}}}}}'
    )


@lru_cache(maxsize=4096)
def _quoted(text: str) -> str:
    return json.dumps(str(text))
