"""The table at the end of a run, and the summary of a finished one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from megatron_sparse.errors import ConfigError
from megatron_sparse.recording import BUCKET_STAGES
from megatron_sparse.telemetry.quantities import (
    REST,
    against_dense,
    ms,
    percent,
    rate,
    size,
    thread_parts,
    traffic_rows,
)

_SUMMARY_FILE = "summary.json"

# Short enough for the last column of a table of 80 columns.
_MEANING = {
    "forward_backward": "passes, bucket launches included",
    "optimizer": "clipping and step",
    "host_wait": "exposed: waits for gradients",
    "param_wait": "exposed: waits for parameters",
    REST: "data, logging, checkpoints",
    "threshold": "sample and threshold",
    "prune": "error feedback, selection, message",
    "encode": "sums anew; dense values narrowed",
    "network": "transfers and waits for peers",
    "decode": "adding received messages",
    "profile": "sampling the sparsity at times",
}


def load_summary(run_dir: Path) -> dict[str, Any]:
    """Reads `summary.json` of a finished run.

    Raises:
        ConfigError: the file is missing, or holds no JSON object.
    """
    path = Path(run_dir) / _SUMMARY_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
        return found
    except OSError as error:
        raise ConfigError(
            f"{run_dir} holds no summary of a run",
            expected=f"a run's folder with {_SUMMARY_FILE}",
            got=error.strerror,
            remedy="name the folder of a run that has ended; resume a run that was killed",
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{path} is damaged", expected="a JSON object", got=error, remedy="resume the run"
        ) from None


def print_summary(
    summary: dict[str, Any], file: IO[str] | None = None, *, width: int | None = None
) -> None:
    """Prints the summary of a run as tables.

    Args:
        summary: what `RunTelemetry.close` returned or `load_summary` read.
        file: output file; None takes standard output. Without a terminal the text is plain: no
            colour, no control characters.
        width: columns; None takes the terminal's, or 80 without one. No line is longer.
    """
    console = Console(file=file, width=width, highlight=False)
    skipped = f", {summary['skipped']} skipped" if summary["skipped"] else ""
    name = "run" if summary["name"] is None else f"run {summary['name']}"
    ranks = "1 rank" if summary["world_size"] == 1 else f"{summary['world_size']} ranks"
    head = f"{name}: {summary['iterations']} iterations{skipped}, {ranks}, {summary['device']}"
    # markup=False: a run's name may hold brackets.
    console.print(head, style="bold", markup=False)
    if summary["loss_first"] is not None:
        console.print(f"loss {summary['loss_first']:.4f} -> {summary['loss_last']:.4f}")
    console.print(
        f"density: target {percent(summary['target_density'])}, "
        f"sent {percent(_reached_density(summary))}"
    )
    console.print()
    console.print(_traffic_table(summary))
    console.print()
    iteration_ms, gathers = summary["iteration_ms"], bool(summary["param_dense_bytes"])
    title = f"an iteration of the training thread: {ms(iteration_ms)} ms (median)"
    parts = thread_parts(summary["stage_ms"], iteration_ms, gathers=gathers)
    console.print(_stage_table(title, parts, iteration_ms))
    console.print()
    title = "its buckets, summed; beside the thread's stages or inside them"
    parts = {stage: summary["stage_ms"][stage] for stage in BUCKET_STAGES}
    console.print(_stage_table(title, parts, iteration_ms))
    console.print()
    console.print(
        f"synchronisation: {ms(summary['stage_ms']['host_wait'])} ms exposed "
        f"({percent(summary['exposed_share'])}), "
        f"{ms(summary['overlapped_ms'])} ms overlapped with compute"
    )
    if gathers:
        console.print(
            f"parameters: {ms(summary['stage_ms']['param_wait'])} ms exposed; all bytes, "
            f"gradients' and parameters', wire/dense {percent(summary['total_wire_ratio'])}"
        )
    if speed := rate(summary["tokens_per_s"], summary["model_tflop_per_s"]):
        console.print(f"throughput: {speed}")
    if summary["world_size"] != 1:
        cluster = summary["planner_cluster"]
        # markup=False: a path may hold brackets.
        console.print(against_dense(summary["against_dense"], cluster), markup=False)
    if stragglers := summary.get("stragglers"):
        console.print(
            f"stragglers: the last rank was late by {ms(stragglers['median_ms'])} ms (median), "
            f"{ms(stragglers['max_ms'])} ms at most; rank {stragglers['rank']} in "
            f"{stragglers['share']:.0%}"
        )
    if memory := summary.get("memory_bytes"):
        parts_text = ", ".join(f"{purpose} {size(held)}" for purpose, held in memory.items())
        console.print(f"memory of this rank: {parts_text}")


def _reached_density(summary: dict[str, Any]) -> float | None:
    """The density sent at the target: the ramp's densities would distort the comparison."""
    return summary["phases"].get("target", summary)["density"]


def _traffic_table(summary: dict[str, Any]) -> Table:
    table = _table("gradient bytes sent by this rank")
    table.add_column("phase")
    for header in ("iterations", "dense", "wire", "wire/dense", "density", "ms/iter"):
        table.add_column(header, justify="right")
    for row in traffic_rows(summary):
        # One phase needs no total.
        if row[0] != "all" or len(summary["phases"]) != 1:
            table.add_row(*row, style="bold" if row[0] == "all" else None)
    if summary["param_dense_bytes"]:
        table.title = "bytes sent by this rank: gradients by phase, and parameters"
        dense_bytes, wire_bytes = summary["param_dense_bytes"], summary["param_wire_bytes"]
        ratio = percent(wire_bytes / dense_bytes)
        table.add_row("parameters", "", size(dense_bytes), size(wire_bytes), ratio, "", "")
    return table


def _stage_table(
    title: str, stage_ms: dict[str, float | None], iteration_ms: float | None
) -> Table:
    table = _table(title)
    # The same widths in both tables align their columns.
    table.add_column("stage", min_width=max(map(len, _MEANING)))
    table.add_column("ms", justify="right", min_width=10)
    table.add_column("share", justify="right", min_width=7)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for stage, time_ms in stage_ms.items():
        share = time_ms / iteration_ms if iteration_ms and time_ms is not None else None
        table.add_row(stage, ms(time_ms), percent(share), _MEANING[stage])
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False)
