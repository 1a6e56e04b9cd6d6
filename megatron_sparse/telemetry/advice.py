"""What a run would have gained with another preset: one line at its end.

A MODEL, from the run's own figures. Buckets are in flight for F = hidden + exposed milliseconds of
an iteration, of which N are the network's: the least that an iteration's buckets took, since in
others ranks wait for each other as well. A preset that sends k times the bytes has them in flight
for F + (k - 1) N, of which the backward pass hides as much as it hid; where it hid all, two thirds
of the passes. Codecs count as those of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_sparse.config.presets import LOSS_POINTS
from megatron_sparse.telemetry.quantities import at_target

BITS = {"quantised": 4.25, "safe": 1.73, "balanced": 0.60, "extreme": 0.16}
"""Of a rank's own message, for each element (docs/choosing-density.md); `lossless` sends dense."""
HIDDEN_ALL, BACKWARD = 0.02, 2 / 3
"""Up to this share of an iteration exposed, everything is hidden; the backward pass's share of both
passes, which is what buckets can hide behind."""
AS_FAST, WORTH = 0.02, 0.05
"""Shares of an iteration: a preset as fast as the run's, and a gain worth more loss."""


def advice(summary: Mapping[str, Any]) -> str | None:
    """The line; None for a run of one rank, or without a bucket.

    Args:
        summary: of the run, as in `summary.json`.
    """
    figures = at_target(summary)
    whole_ms, stage_ms = figures["iteration_ms_mean"], figures["stage_ms_mean"]
    bits = figures.get("bits_per_element")
    if summary["world_size"] == 1 or not whole_ms or not figures["wire_bytes"] or not bits:
        return None
    exposed_ms, hidden_ms = stage_ms["host_wait"], figures["overlapped_ms"]
    network_ms = min(figures["network_ms_least"], hidden_ms + exposed_ms)
    window_ms = hidden_ms
    if exposed_ms <= HIDDEN_ALL * whole_ms and hidden_ms:
        window_ms = max(hidden_ms, BACKWARD * stage_ms["forward_backward"])

    def saved_ms(ratio: float) -> float:
        in_flight_ms = hidden_ms + exposed_ms + (ratio - 1) * network_ms
        return exposed_ms - max(0.0, in_flight_ms - window_ms)

    sent = figures["wire_bytes"]
    ratios = {"lossless": figures["dense_bytes"] / sent} | {
        name: found / bits for name, found in BITS.items()
    }
    rate = 8 * sent / figures["iterations"] / network_ms / 1e6 if network_ms else 0.0
    seen = f"links of {rate:.3g} Gbit/s, {exposed_ms / whole_ms:.0%} of an iteration exposed"
    for name, ratio in ratios.items():
        # What sends a little more is the preset that has run.
        if ratio > 1.3 and saved_ms(ratio) >= -AS_FAST * whole_ms:
            return f"{seen}: by a model, preset={name} would do"
    for name, ratio in ratios.items():
        if ratio < 0.7 and (gain_ms := saved_ms(ratio)) >= WORTH * whole_ms:
            gain = f"would save {gain_ms / 1e3:.2g} s an iteration"
            cost = f"it costs {LOSS_POINTS[name]:g} % of the loss"
            return f"{seen}: by a model, preset={name} {gain}; {cost}"
    return f"{seen}: by a model, no other preset would be faster"
