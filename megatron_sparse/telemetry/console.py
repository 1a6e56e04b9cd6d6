"""Prints the tables at the end of a run, or for the `summary.json` of a finished run."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_sparse.config.presets import LOSS_POINTS
from megatron_sparse.errors import ConfigError
from megatron_sparse.recording import BUCKET_STAGES
from megatron_sparse.telemetry.quantities import (
    ITERATION,
    PHASE_COLUMNS,
    QUANTITIES,
    REST,
    STAGE_MEANINGS,
    at_target,
    ms,
    of_all,
    percent,
    phase_rows,
    rate,
    scope,
    size,
    thread_parts,
)

SUMMARY_FILE = "summary.json"
BITS = {"quantised": 4.25, "safe": 1.73, "balanced": 0.60, "extreme": 0.16}
"""Of a rank's own message, for each element (docs/choosing-density.md); `lossless` sends dense."""
HIDDEN_ALL, BACKWARD = 0.02, 2 / 3
"""Up to this share of an iteration exposed, everything is hidden; the backward pass's share of both
passes, which is what buckets can hide behind."""
AS_FAST, WORTH = 0.02, 0.05
"""Shares of an iteration: a preset as fast as the run's, and a gain worth more loss."""


def load_summary(run_dir: Path) -> dict[str, Any]:
    """Reads `summary.json` of a finished run.

    Raises:
        ConfigError: the file cannot be read, or holds no JSON object.
    """
    path = run_dir / SUMMARY_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
        return found
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is no summary of a run",
            expected="a JSON object",
            got=error,
            remedy="resume the run",
        ) from None


def print_summary(summary: dict[str, Any]) -> None:
    """Prints the summary of a run as tables, as wide as the terminal, or 80 columns without one.

    Without a terminal the text is plain: no colour, no control characters.

    Args:
        summary: what `RunTelemetry.close` returned or `load_summary` read.
    """
    console = Console(highlight=False)
    skipped = f", {summary['skipped']} skipped" if summary["skipped"] else ""
    name = "run" if summary["name"] is None else f"run {summary['name']}"
    ranks = "1 rank" if summary["world_size"] == 1 else f"{summary['world_size']} ranks"
    head = f"{name}: {summary['iterations']} iterations{skipped}, {ranks}, {summary['device']}"
    # markup=False: a run's name may hold brackets.
    console.print(head, style="bold", markup=False)
    cells = {name: quantity.cell(summary) for name, quantity in QUANTITIES.items()}
    if summary["loss_first"] is not None:
        console.print(f"loss {cells['loss_first']} -> {cells['loss_last']}")
    target = cells["target_density"]
    begins = f" from iteration {cells['target_begins']} on" if summary["target_begins"] else ""
    aim = "no target" if target == "-" else f"target {target}{begins}"
    console.print(f"density: {aim}, sent {cells['density']}")
    console.print()
    console.print(_traffic_table(summary))
    console.print()
    # Times are those of the phase `target`, or of the dense phase, else of the whole run.
    steady, gathers = at_target(summary), bool(summary["param_dense_bytes"])

    # Arguments `parts_of` of `_stage_table`: for the thread's table, and for the buckets'.
    def thread_ms(stage_ms: dict[str, Any], whole_ms: Any) -> dict[str, Any]:
        return thread_parts(stage_ms, whole_ms, gathers=gathers) | {ITERATION: whole_ms}

    def bucket_ms(stage_ms: dict[str, Any], _: Any) -> dict[str, Any]:
        return {stage: stage_ms[stage] for stage in BUCKET_STAGES}

    title = f"an iteration of the training thread: {scope(summary)}"
    console.print(_stage_table(title, steady, thread_ms))
    console.print()
    title = "its buckets, summed; beside the thread's stages or inside them"
    console.print(_stage_table(title, steady, bucket_ms))
    console.print()
    console.print(
        f"exposed: {cells['exposed_share']}, {of_all(steady)}; "
        f"{cells['overlapped_ms']} ms overlapped with compute"
    )
    if gathers:
        console.print(
            "all bytes, gradients' and parameters', wire/dense: "
            f"{percent(summary['total_wire_ratio'])}"
        )
    if speed := rate(summary["tokens_per_s"], summary["model_tflop_per_s"]):
        console.print(f"throughput: {speed}")
    if trials := summary.get("trials"):
        times_ms = trials["times_ms"].items()
        took = ", ".join(f"{preset} {ms(time_ms)}" for preset, time_ms in times_ms)
        how = f"by trials; ms of an iteration: {took}" if took else "untried"
        console.print(f"preset {trials['chosen']}, {how}")
    elif advised := advice(summary):
        console.print(advised)
    if stragglers := summary.get("stragglers"):
        console.print(
            f"stragglers: the last rank was late by {ms(stragglers['median_ms'])} ms (median), "
            f"{ms(stragglers['max_ms'])} ms at most; rank {stragglers['rank']} in "
            f"{stragglers['share']:.0%}"
        )
    if memory := summary.get("memory_bytes"):
        parts_text = ", ".join(f"{purpose} {size(held)}" for purpose, held in memory.items())
        console.print(f"memory of this rank: {parts_text}")


def _traffic_table(summary: dict[str, Any]) -> Table:
    """Makes the table of bytes and densities: a row for each phase, for all, and for parameters."""
    parameters = ", and parameters" if summary["param_dense_bytes"] else ""
    title = f"bytes sent by this rank: gradients by phase{parameters}"
    table = plain_table(title, "phase", *(header for header, _ in PHASE_COLUMNS.values()))
    for row in phase_rows(summary):
        table.add_row(*row, style="bold" if row[0] == "all" else None)
    return table


def _stage_table(
    title: str, figures: Mapping[str, Any], parts_of: Callable[[Any, Any], dict[str, Any]]
) -> Table:
    """Makes a table with a row for each stage: mean, share of the iteration's mean, median, p95.

    `figures`: of a run or of a phase, as in `summary.json`. `parts_of`: (milliseconds by stage, the
    whole iteration's) -> milliseconds by row.
    """
    mean_ms = parts_of(figures["stage_ms_mean"], figures["iteration_ms_mean"])
    median_ms = parts_of(figures["stage_ms"], figures["iteration_ms"])
    p95_ms = parts_of(figures["stage_ms_p95"], figures["iteration_ms_p95"])
    whole_ms = figures["iteration_ms_mean"]
    table = plain_table(title, "stage", "mean ms", "share", "median", "p95")
    # Minimum widths align the training thread's table with that of its buckets.
    table.columns[0].min_width = max(map(len, STAGE_MEANINGS))
    for column in table.columns[1:]:
        column.min_width = 8
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for stage, time_ms in mean_ms.items():
        share = time_ms / whole_ms if whole_ms and time_ms is not None else None
        middle, high = ms(median_ms.get(stage)), ms(p95_ms.get(stage))
        if stage == REST:
            middle = high = ""  # the difference of medians is not the median of the rest
        cells = (ms(time_ms), percent(share), middle, high)
        table.add_row(stage, *cells, STAGE_MEANINGS[stage])
    return table


def advice(summary: Mapping[str, Any]) -> str | None:
    """Recommends a preset by what this run would have gained with it, in one sentence.

    None without a bucket, for one rank, before the target density, or on a GPU.

    A MODEL, from the run's own figures. Buckets are in flight for F milliseconds of an iteration:
    *hidden* beside the backward pass, or *exposed*. N of them are the network's: the least of all
    iterations, since in others ranks wait for each other as well. With a preset that sends k times
    the bytes, buckets are in flight for F + (k - 1) N. The backward pass can hide as much as it hid
    in the run; if that was nearly all, it can hide up to two thirds of forward and backward.
    The codec takes as long as in the run.
    """
    figures = at_target(summary)
    # Before the target density a run tells nothing of presets. On a GPU streams wait unmeasured.
    if figures is summary or summary["device"] != "cpu":
        return None
    whole_ms, stage_ms = figures["iteration_ms_mean"], figures["stage_ms_mean"]
    bits = figures.get("bits_per_element")
    if summary["world_size"] == 1 or not whole_ms or not figures["wire_bytes"] or not bits:
        return None
    sent_bytes = figures["wire_bytes"]
    exposed_ms, hidden_ms = stage_ms["host_wait"], figures["overlapped_ms"]
    flight_ms = hidden_ms + exposed_ms  # F
    network_ms = min(figures["network_ms_least"], flight_ms)  # N
    window_ms = hidden_ms  # the most that the backward pass can hide
    if exposed_ms <= HIDDEN_ALL * whole_ms and hidden_ms:
        window_ms = max(hidden_ms, BACKWARD * stage_ms["forward_backward"])

    def saved_ms(factor: float) -> float:
        """Returns the milliseconds that `factor` times the bytes would save; negative: cost."""
        new_flight_ms = flight_ms + (factor - 1) * network_ms
        return exposed_ms - max(0.0, new_flight_ms - window_ms)

    factors = {"lossless": figures["dense_bytes"] / sent_bytes}
    # With any preset some parameters are sent whole, in 16 bits. They raise the run's density
    # above the target, which gives their share.
    whole_bits, aim = 0.0, summary["target_density"]
    if aim is not None and aim < 1:
        whole_bits = 16 * max(0.0, (figures["density"] - aim) / (1 - aim))
    factors |= {preset: (preset_bits + whole_bits) / bits for preset, preset_bits in BITS.items()}
    bits_per_ms = 8 * sent_bytes / figures["iterations"] / network_ms if network_ms else 0.0
    exposed = f"gradients expose {exposed_ms / whole_ms:.0%} of an iteration"
    seen = f"links of {bits_per_ms / 1e6:.3g} Gbit/s, {exposed}"
    # In descending order of bytes. A factor near 1 is skipped: that is the run's own preset.
    for preset, factor in factors.items():
        if factor > 1.3 and saved_ms(factor) >= -AS_FAST * whole_ms:
            return f"{seen}: by a model, preset={preset} would do"
    for preset, factor in factors.items():
        if factor < 0.7 and (gain_ms := saved_ms(factor)) >= WORTH * whole_ms:
            gain = f"would save {gain_ms / 1e3:.2g} s an iteration"
            cost = f"it costs {LOSS_POINTS[preset]:g} % of the loss"
            return f"{seen}: by a model, preset={preset} {gain}; {cost}"
    return f"{seen}: by a model, no other preset would be faster"


def plain_table(title: str, name: str, *numbers: str) -> Table:
    """Makes an empty table without rules: a column of names, and right-aligned ones of numbers."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column(name)
    for header in numbers:
        table.add_column(header, justify="right")
    return table
