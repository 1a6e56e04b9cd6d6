"""StragglAR's figure 5 from rows of `bench stragglers`, drawn as `simulate.stragglar` draws it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_sparse.errors import ConfigError
from megatron_sparse.simulate.figures import MODEL, Figure, Row
from megatron_sparse.simulate.machines import MIB
from megatron_sparse.simulate.stragglar import NAMES, draw_5


def draw(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Writes the figure's CSV and PNG.

    Args:
        rows: of one run, JSON objects of `StragglerRow`.
        folder: made if missing.

    Raises:
        ConfigError: no row was timed.
        DependencyError: matplotlib is missing.
    """
    timed = [row for row in rows if row["time_us"]]
    if not timed:
        raise ConfigError(
            "there is nothing to draw",
            expected="a row that was timed",
            got="none",
            remedy="look at #wrong",
        )
    first = timed[0]
    rate = "" if first["mbit"] is None else f" at {first['mbit']} Mbit/s"
    place = f"{first['world_size']} {first['transport']} ranks{rate}"
    figure = Figure(
        "stragglar",
        5,
        f"As StragglAR's figure 5: {first['op']} of {place}",
        "Times from the last rank's arrival",
        lambda _: panels(timed, place),
        draw_5,
        3.8,
        MODEL if first["modelled"] else "measured",
    )
    return figure.make(folder, fast=False)


def panels(timed: Sequence[dict[str, Any]], place: str) -> list[Row]:
    """Rows of the figure: the longest and the shortest delay over sizes, the largest size over all.

    Args:
        timed: rows of one form.
        place: title of the panels.
    """
    first = timed[0]
    chosen = [row for row in timed if (row["op"], row["dtype"]) == (first["op"], first["dtype"])]
    largest = max(row["bytes"] for row in chosen)
    found = []
    for panel, pick in (("longest delay", max), ("shortest delay", min)):
        for row in chosen:
            delays = {other["delay_us"] for other in chosen if other["bytes"] == row["bytes"]}
            # One delay has one panel.
            if row["delay_us"] == pick(delays) and (pick is max or len(delays) > 1):
                found.append(_row(panel, row, place))
    return found + [_row("delays", row, place) for row in chosen if row["bytes"] == largest]


def _row(panel: str, row: dict[str, Any], place: str) -> Row:
    scheme: str = row["scheme"]
    name = NAMES.get(scheme, scheme)
    if row["density"] < 1:
        name += f", {row['density']:g}"
    return {
        "series": name,
        "panel": panel,
        "machine": place,
        "ranks": row["world_size"],
        "size_mib": row["bytes"] / MIB,
        "delay_ms": row["delay_us"] / 1e3,
        "time_ms": row["time_us"] / 1e3,
        "total_ms": row["total_us"] / 1e3,
        "algbw_gbs": row["bytes"] / row["time_us"] / 1e3,
    }
