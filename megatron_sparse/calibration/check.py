"""How well the codec's rates predict calls that they were not fitted to.

Densities between the measured ones, and a number of elements between, on all ranks at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from megatron_sparse.calibration.codec import CodecSweep, codec_calls, seconds_of
from megatron_sparse.planner.link_timing import Clock, Measuring, gather_rows
from megatron_sparse.pricing.cluster import ClusterModel
from megatron_sparse.transport import Transport

DENSITIES = (0.02, 0.2)


@dataclass(frozen=True)
class HeldOut:
    """One call, measured and predicted.

    Attributes:
        op: as in `CodecRate`.
        format: as in `CodecRate`.
        density: as in `CodecRate`.
        measured_s: the median over ranks.
        predicted_s: by the rates.
    """

    op: str
    format: str
    density: float
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """The prediction's relative error; negative if the prediction is too fast."""
        return self.predicted_s / self.measured_s - 1


def held_out(
    transport: Transport, cluster: ClusterModel, sweep: CodecSweep, clock: Clock
) -> Measuring[list[HeldOut]]:
    """Measures every call at the held-out densities; the same on all ranks.

    The number of elements is the middle, in powers of two, of the two largest in `sweep`.
    """
    numel = math.isqrt(sweep.numels[-1] * sweep.numels[-2])
    yield from gather_rows([0.0], transport)
    calls, times_s = [], []
    for call in codec_calls(numel, DENSITIES, transport.device):
        calls.append(call)
        times_s.append(seconds_of(call, sweep, clock))
    rows = yield from gather_rows(times_s, transport)
    return [
        HeldOut(
            call.op,
            call.format,
            call.density,
            measured_s,
            cluster.codec_s(call.op, call.format, numel, call.density),
        )
        for call, measured_s in zip(calls, rows.median(0).values.tolist(), strict=True)
    ]


def describe(found: Sequence[HeldOut]) -> str:
    """One line: the median error and the worst call."""
    worst = max(found, key=lambda call: abs(call.error))
    middle = median(abs(call.error) for call in found)
    return (
        f"codec, {len(found)} calls that the rates were not fitted to: median error {middle:.0%}, "
        f"worst {worst.error:+.0%} ({worst.op} {worst.format} at {worst.density:.0%})"
    )
