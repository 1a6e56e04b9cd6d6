"""Where measurements go: breakdown, JSON lines, TensorBoard, W&B, the final table.

The reducer never imports this package; it is handed a `RunTelemetry` as its `RecordSink`.
"""

from megatron_sparse.telemetry.console import load_summary
from megatron_sparse.telemetry.run import RunTelemetry
from megatron_sparse.telemetry.sinks import ScalarSink, TensorBoardSink, WandbSink

__all__ = [
    "RunTelemetry",
    "ScalarSink",
    "TensorBoardSink",
    "WandbSink",
    "load_summary",
]
