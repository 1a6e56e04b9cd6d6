"""A row declared by its cells: columns in the order of the fields, ratios among them, and JSON."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sparse.run.rows import CellRow, cell


@dataclass
class Pace(CellRow):
    """Two columns of its own, one before and one behind."""

    op: str = cell("not shown")
    count: int = cell("elements", "half >5 half | count >5")
    time_us: float | None = cell(
        "of a call", ">8.1f time(us) | time_us/count >5.1f each", default=None
    )

    @property
    def half(self) -> int:
        """For the first column."""
        return self.count // 2


def test_columns_follow_the_fields():
    assert Pace.COLUMNS.header.split() == ["#half", "count", "time(us)", "each"]
    assert Pace("add", 4, 6.0).line().split() == ["2", "4", "6.0", "1.5"]
    assert Pace("add", 4).line().split() == ["2", "4", "-", "-"]
    assert Pace("add", 4).to_dict() == {"op": "add", "count": 4, "time_us": None}
