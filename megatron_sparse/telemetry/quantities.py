"""The quantities of a run: how each is computed, named and written, in every table and report.

`QUANTITIES` is the one list of what a summary shows; the final table and `report` take
their labels, values and units from it. Curves over the iterations are in `metrics`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_sparse.recording import STEP_STAGES, WAITS

ITERATION, REST = "iteration", "other"
"""The whole iteration, and the part of it that no stage of the training thread accounts for."""
STAGE_MEANINGS = {
    "forward_backward": "passes, launches",
    "optimizer": "clipping and step",
    "host_wait": "exposed: gradients",
    "param_wait": "exposed: parameters",
    REST: "zeroing, loss's sum",
    ITERATION: "the whole",
    "threshold": "sample and threshold",
    "prune": "residual, selection",
    "encode": "sums, dense values",
    "network": "transfers and waits",
    "decode": "adding what came",
    "profile": "sampling the sparsity",
}
"""Short enough for the last column of a table of 80 columns."""


def exposed_share(stage_ms: Mapping[str, Any], iteration_ms: float | None) -> float | None:
    """Returns the share of exposed communication: the thread's waits over the iteration's time.

    Every report uses this definition: waits for gradients and for parameters together. For several
    iterations pass sums or means (not medians): the result is then all waits over all times.

    Args:
        stage_ms: milliseconds by stage.
        iteration_ms: milliseconds of the whole iteration; None or 0 if unknown: returns None.

    Example:
        >>> exposed_share({"host_wait": 10.0, "param_wait": 5.0, "optimizer": 20.0}, 100.0)
        0.15
    """
    if not iteration_ms:
        return None
    return sum(stage_ms[stage] for stage in WAITS) / iteration_ms


def ratio(above: float | None, below: float | None) -> float | None:
    """`above / below`; None where either is missing or `below` is 0."""
    return None if above is None or not below else above / below


def ms(time_ms: float | None) -> str:
    """Formats milliseconds with two decimals, from 10 s on with none; `-` for None.

    Example:
        >>> ms(12.345), ms(16250.17)
        ('12.35', '16250')
    """
    if time_ms is None:
        return "-"
    # The bound takes rounding into account, so that ten characters always suffice.
    return f"{time_ms:.2f}" if time_ms < 9999.995 else f"{time_ms:.0f}"


def percent(ratio: float | None) -> str:
    """Formats a ratio as a percentage: two decimals, below 0.1 % two digits; `-` for None.

    Example:
        >>> percent(0.0123), percent(0.0000456)
        ('1.23%', '0.0046%')
    """
    if ratio is None:
        return "-"
    return f"{ratio:.2%}" if ratio == 0 or ratio >= 0.001 else f"{100 * ratio:.2g}%"


def size(count: float) -> str:
    """Formats a number of bytes in binary units.

    Example:
        >>> size(3 * 2**20)
        '3.00 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def rate(tokens_per_s: float | None, model_tflop_per_s: float | None) -> str:
    """Formats tokens and operations per second; empty if both are unknown.

    Example:
        >>> rate(12345.6, 71.25), rate(980.4, None), rate(None, None)
        ('12,346 tokens/s, 71.2 TFLOP/s a GPU', '980 tokens/s', '')
    """
    tokens = [] if tokens_per_s is None else [f"{tokens_per_s:,.0f} tokens/s"]
    operations = [] if model_tflop_per_s is None else [f"{model_tflop_per_s:.1f} TFLOP/s a GPU"]
    return ", ".join(tokens + operations)


def thread_parts(
    stage_ms: Mapping[str, Any], iteration_ms: float | None, *, gathers: bool = True
) -> dict[str, Any]:
    """Splits an iteration into the training thread's stages and `REST`, the time in no stage.

    Args:
        stage_ms: milliseconds by stage: of an iteration, or means or medians; None if unknown.
        iteration_ms: milliseconds of the whole iteration; None (no iterations) omits `REST`.
        gathers: whether parameters are gathered; otherwise the wait for them is left out.

    Example:
        >>> stage_ms = {"forward_backward": 6.0, "optimizer": 1.0, "host_wait": 2.0}
        >>> thread_parts(stage_ms, 10.0, gathers=False)["other"]
        1.0
    """
    stages = [stage for stage in STEP_STAGES if gathers or stage != "param_wait"]
    parts = {stage: stage_ms[stage] for stage in stages}
    if iteration_ms is None:
        return parts
    # Medians of parts need not add up to the median of the whole; never go below 0.
    return parts | {REST: max(0.0, iteration_ms - sum(parts.values()))}


def at_target(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a summary at the target density, or dense; the whole if there is neither."""
    phases = summary["phases"]
    return phases.get("target") or phases.get("off") or summary


def scope(summary: Mapping[str, Any]) -> str:
    """Says in words how many iterations `at_target` covers.

    Example:
        >>> scope({"phases": {"target": {"iterations": 70, "density": 0.1}}})
        '70 iterations at the target density'
    """
    figures = at_target(summary)
    reached = "target" in summary["phases"] and figures["density"] != 1.0
    where = " at the target density" if reached else ""
    return f"{figures['iterations']} iterations{where}"


def target_density(configured: float | str | None, summary: Mapping[str, Any]) -> float | None:
    """Returns the density that a run was to reach; None for a run that sent all elements (dense).

    Args:
        configured: `compression.density`, which dense runs have too. For `auto` the density that
            was sent is returned.
        summary: of the run's iterations, with `phases`.
    """
    phases = summary["phases"]
    steady = phases.get("target") or phases.get("off")
    if steady and steady["density"] in (1.0, None):  # dense, or nothing was synchronised
        return None
    if isinstance(configured, str):  # auto
        return steady["density"] if steady else None
    return configured


def of_all(figures: Mapping[str, Any]) -> str:
    """Formats the waits as `30.00 of 250.00 ms`; with waits for parameters, adds both parts.

    Returns `-` if the waits are unknown. Of `figures` it reads the means of stages and iteration.
    """
    grad_ms, param_ms = (figures["stage_ms_mean"][stage] for stage in WAITS)
    if grad_ms is None:
        return "-"
    parts = f" (gradients {ms(grad_ms)}, parameters {ms(param_ms)})" if param_ms else ""
    return f"{ms(grad_ms + param_ms)} of {ms(figures['iteration_ms_mean'])} ms{parts}"


@dataclass(frozen=True)
class Quantity:
    """A number that a summary gives of a run.

    Attributes:
        name: its field in `summary.json`.
        label: its name in tables, with the unit.
        text: formats a value.
        steady: taken from the iterations at the target density, see `at_target`.
    """

    name: str
    label: str
    text: Callable[[Any], str]
    steady: bool = True

    def of(self, summary: Mapping[str, Any]) -> Any:
        """Its value; None where the summary has none."""
        return (at_target(summary) if self.steady else summary).get(self.name)

    def cell(self, summary: Mapping[str, Any]) -> str:
        """Its value as text, `-` for None."""
        value = self.of(summary)
        return "-" if value is None else self.text(value)


QUANTITIES = {
    quantity.name: quantity
    for quantity in (
        Quantity("loss_first", "first loss", "{:.4f}".format, steady=False),
        Quantity("loss_last", "last loss", "{:.4f}".format, steady=False),
        Quantity("target_density", "target density", percent, steady=False),
        Quantity("target_begins", "reached in iteration", str, steady=False),
        Quantity("density", "density sent", percent),
        Quantity("wire_ratio", "bytes sent / dense", percent),
        Quantity("total_wire_ratio", "with parameters / dense", percent),
        Quantity("iteration_ms", "iteration, median ms", ms),
        Quantity("iteration_ms_p95", "iteration, p95 ms", ms),
        Quantity("exposed_share", "exposed / iteration", percent),
        Quantity("overlapped_ms", "overlapped, mean ms", ms),
    )
}
"""Of a summary, by name."""
PHASE_COLUMNS = {
    "iterations": ("iters", str),
    "dense_bytes": ("dense", size),
    "wire_bytes": ("wire", size),
    "wire_ratio": ("/dense", percent),
    "density": ("density", percent),
    "iteration_ms": ("median ms", ms),
    "exposed_share": ("exposed", percent),
}
"""Of a phase: field, header, and how a value is written."""


def phase_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """Makes the rows of the table of bytes: phases, all together, inside nodes, parameters.

    A row is its name and a cell for each of `PHASE_COLUMNS`.
    """

    def row(name: str, figures: Mapping[str, Any]) -> list[str]:
        """Makes a row; a cell is empty where the figures lack its column."""
        cells = []
        for field, (_, text) in PHASE_COLUMNS.items():
            cells.append(text(figures[field]) if field in figures else "")
        return [name, *cells]

    rows = [row(phase, figures) for phase, figures in summary["phases"].items()]
    if len(rows) != 1:  # one phase needs no total
        rows.append(row("all", summary))
    if inside_bytes := summary["inside_bytes"]:
        share = inside_bytes / summary["dense_bytes"]
        rows.append(row("in nodes", {"wire_bytes": inside_bytes, "wire_ratio": share}))
    if raw_bytes := summary["param_dense_bytes"]:
        sent_bytes = summary["param_wire_bytes"]
        gathered = {"dense_bytes": raw_bytes, "wire_bytes": sent_bytes}
        rows.append(row("params", gathered | {"wire_ratio": sent_bytes / raw_bytes}))
    return rows
