"""The timeline: a row for each bucket, and one for the gathers of its parameters."""

from __future__ import annotations

from megatron_sparse.recording import GatherRecord
from megatron_sparse.telemetry.trace import Timeline


def test_a_gather_has_a_row_with_its_stages():
    gather = GatherRecord("dense0.0", 3, "exact", 10, 40, wire_bytes=8, launched_s=1.0)
    gather.finished_s = 1.5
    gather.timer.spans.append(("decode", 1.25, 1.375))
    timeline = Timeline(0)
    timeline.add(7, [("optimizer", 0.5, 1.0)], [], [gather])
    events = timeline.events(timeline.begin_us)
    rows = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    whole, stage = spans["dense0.0 parameters"], spans["decode"]
    assert rows[whole["tid"]] == "dense0.0 parameters"
    assert stage["tid"] == whole["tid"] != spans["optimizer"]["tid"]
    assert (whole["ts"], whole["dur"]) == (0.5e6, 0.5e6)
    assert (stage["ts"], stage["dur"]) == (0.75e6, 0.125e6)
    assert whole["args"] == {"iteration": 7, "method": "exact", "numel": 10, "wire_bytes": 8}
