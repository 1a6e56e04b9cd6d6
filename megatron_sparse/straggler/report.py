"""A schedule as a table, a picture and JSON, and its cost beside other all-reduces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from megatron_sparse.straggler import cost
from megatron_sparse.straggler.generate import make_schedule
from megatron_sparse.straggler.schedule import Schedule, verify
from megatron_sparse.transport import Link

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_RANKS_PRINTED = 32
NAMES = {
    "straggler": "straggler-aware",
    "dense_ring": "ring",
    "dense_allpairs": "all-pairs",
    "dense_rhd": "recursive halving/doubling",
    "dense_broadcast": "broadcast",
}
"""The names of the schemes in the cost table."""


def run(
    ranks: int,
    straggler: int | None,
    buffer_bytes: int,
    link: Link,
    picture: Path | None,
    json_path: Path | None,
) -> None:
    """Makes a schedule, proves it and shows it.

    Args:
        ranks: of the group.
        straggler: its rank, or None for the last one.
        buffer_bytes: of the cost table.
        link: of the cost table.
        picture: where to draw it.
        json_path: where to write `ranks, straggler, rounds, n_rounds, verified`.

    Raises:
        ConfigError: there is no such rank.
        ScheduleError: the schedule is wrong; nothing is written.
    """
    schedule = make_schedule(ranks, straggler)
    verify(schedule)
    console = Console()
    if ranks <= MOST_RANKS_PRINTED:
        console.print(rounds_table(schedule))
    console.print(
        f"{ranks} ranks, straggler {schedule.straggler}: {len(schedule.rounds)} rounds of one of "
        f"{schedule.chunks} chunks; verified"
    )
    console.print(cost_table(schedule, buffer_bytes, link))
    delay_s = cost.critical_delay_s(ranks, len(schedule.rounds), buffer_bytes, link)
    console.print(f"pays against the ring from a delay of {delay_s * 1e3:.3f} ms on (model)")
    if picture is not None:
        draw(schedule, picture)
        console.print(f"drawn: {picture}")
    if json_path is not None:
        line = {
            "ranks": ranks,
            "straggler": schedule.straggler,
            "rounds": schedule.rounds,
            "n_rounds": len(schedule.rounds),
            "verified": True,
        }
        json_path.write_text(json.dumps(line) + "\n")


def rounds_table(schedule: Schedule) -> Table:
    """A row for each round; `a <2-5> b` means that a gives chunk 2 and b gives chunk 5."""
    table = Table(box=None, title="exchanges", title_justify="left")
    table.add_column("round", justify="right")
    table.add_column("with the straggler")
    table.add_column("others")
    for number, transfers in enumerate(schedule.rounds):
        gives = {(t.sender, t.receiver): t.chunk for t in transfers}
        pairs = sorted({(min(pair), max(pair)) for pair in gives})
        cells = {True: [], False: []}
        for a, b in pairs:
            there, back = (str(gives.get(pair, "")) for pair in ((a, b), (b, a)))
            cells[schedule.straggler in (a, b)].append(f"{a} <{there}-{back}> {b}")
        table.add_row(str(number), "  ".join(cells[True]), "  ".join(cells[False]))
    return table


def cost_table(schedule: Schedule, buffer_bytes: int, link: Link) -> Table:
    """Times after the straggler's arrival in the alpha-beta model."""
    n, rounds = schedule.world_size, len(schedule.rounds)
    table = Table(box=None, title="alpha-beta model, ms after its arrival", title_justify="left")
    for header in ("all-reduce", "rounds", "buffers", "late enough", "not late at all"):
        table.add_column(header, justify="left" if header == "all-reduce" else "right")
    for scheme, (best, worst) in cost.all_reduce_costs(n, rounds).items():
        times = [f"{case.time_s(buffer_bytes, link) * 1e3:.3f}" for case in (best, worst)]
        table.add_row(NAMES[scheme], f"{best.rounds:g}", f"{best.buffers:.3f}", *times)
    return table


def draw(schedule: Schedule, path: Path) -> None:
    """Draws the pairs of each round (left) and the arrival of each chunk at each rank (right)."""
    import matplotlib.pyplot as plt

    rounds, n = len(schedule.rounds), schedule.world_size
    width, height = min(4 + 0.5 * rounds, 40), min(2 + 0.3 * n, 30)
    figure, (left, right) = plt.subplots(1, 2, figsize=(2 * width, height), layout="constrained")
    _draw_exchanges(left, schedule)
    _draw_arrivals(right, schedule)
    for axes in (left, right):
        axes.set_xlabel("round after the straggler's arrival")
        axes.set_ylabel("rank")
        axes.set_xlim(-0.7, rounds - 0.3)
        axes.set_ylim(n - 0.3, -0.7)
    figure.suptitle(f"{n} ranks, straggler {schedule.straggler}: {rounds} rounds")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_exchanges(axes: Axes, schedule: Schedule) -> None:
    axes.set_title("exchanges (red: with the straggler)")
    for number, transfers in enumerate(schedule.rounds):
        pairs = sorted({(min(t.sender, t.receiver), max(t.sender, t.receiver)) for t in transfers})
        for index, pair in enumerate(pairs):
            # Side by side within the round, so that lines do not hide one another.
            x = number + 0.7 * (index / max(len(pairs) - 1, 1) - 0.5)
            colour = "tab:red" if schedule.straggler in pair else "tab:blue"
            axes.plot([x, x], pair, color=colour, marker="o", markersize=3, linewidth=1)


def _draw_arrivals(axes: Axes, schedule: Schedule) -> None:
    axes.set_title("chunk that arrives complete")
    for number, transfers in enumerate(schedule.rounds):
        for t in transfers:
            late = schedule.straggler in (t.sender, t.receiver)
            axes.text(
                number,
                t.receiver,
                str(t.chunk),
                ha="center",
                va="center",
                fontsize=7,
                color="tab:red" if late else "black",
            )
