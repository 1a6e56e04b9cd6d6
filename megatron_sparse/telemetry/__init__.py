"""Where measurements go: breakdown, JSON lines, TensorBoard, W&B, the final table.

The reducer never imports this package; it is handed a `RunTelemetry` as its `RecordSink`.
"""

from megatron_sparse.telemetry.breakdown import IterationBreakdown, iteration_breakdown
from megatron_sparse.telemetry.console import load_summary, print_summary
from megatron_sparse.telemetry.run import RunTelemetry
from megatron_sparse.telemetry.sinks import ScalarSink, TensorBoardSink, WandbSink

__all__ = [
    "IterationBreakdown",
    "RunTelemetry",
    "ScalarSink",
    "TensorBoardSink",
    "WandbSink",
    "iteration_breakdown",
    "load_summary",
    "print_summary",
]
