"""A case of `bench planner`: the chosen scheme, the best scheme, and the verdict on all cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from megatron_sparse.bench.table import Columns, TableRow
from megatron_sparse.planner.prices import DENSE, least

NEAR = 0.05
"""Regret up to which a choice counts as the best one."""
ENOUGH = 0.95
"""Fraction of the cases that must be near the best."""
WORST_OVER_DENSE = 1.05


@dataclass(frozen=True)
class PlannerRow(TableRow):
    """One case. Times are microseconds.

    Attributes:
        case: kind of gradients.
        world_size: ranks.
        cluster: name of the cluster.
        numel: elements of the bucket.
        density: of a rank's gradient, as it was sampled.
        chosen: the planner's scheme.
        chosen_us: its time.
        predicted_us: its predicted time.
        best: the fastest scheme.
        best_us: its time.
        dense_us: the time of `dense`.
        modelled: whether the times are those of a virtual cluster.
        taken_us: each candidate's time.
        predictions_us: each candidate's predicted time.
    """

    COLUMNS = Columns(
        "case <14 | world_size >5 ranks | cluster <17 | chosen <14 | chosen_us >11.1f chosen(us) | "
        "predicted_us >11.1f predicted | best <14 | best_us >11.1f best(us) | "
        "dense_us >11.1f dense(us) | regret >7.1%"
    )

    case: str
    world_size: int
    cluster: str
    numel: int
    density: float
    chosen: str
    chosen_us: float
    predicted_us: float
    best: str
    best_us: float
    dense_us: float
    modelled: bool
    taken_us: dict[str, float]
    predictions_us: dict[str, float]

    @classmethod
    def of(
        cls, predictions_us: Mapping[str, float], taken_us: Mapping[str, float], **case: Any
    ) -> Self:
        """Chooses by the predictions and looks up the real times.

        Args:
            predictions_us: by scheme; `dense` is one of them.
            taken_us: of the same schemes.
            case: the other attributes: what the case is.
        """
        chosen = least(dict(predictions_us), list(predictions_us))
        best = least(dict(taken_us), list(taken_us))
        return cls(
            chosen=chosen,
            chosen_us=taken_us[chosen],
            predicted_us=predictions_us[chosen],
            best=best,
            best_us=taken_us[best],
            dense_us=taken_us[DENSE],
            taken_us=dict(taken_us),
            predictions_us=dict(predictions_us),
            **case,
        )

    @property
    def regret(self) -> float:
        """The chosen scheme's extra time, as a fraction of the best scheme's time."""
        return self.chosen_us / self.best_us - 1

    @property
    def over_dense(self) -> float:
        """The chosen scheme's time over that of dense."""
        return self.chosen_us / self.dense_us

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return super().to_dict() | {"regret": self.regret}


@dataclass(frozen=True)
class Verdict:
    """The verdict on all rows.

    Attributes:
        cases: how many there are.
        near: fraction of them whose choice is within `NEAR` of the best.
        worst_over_dense: the largest time of a choice over that of dense.
    """

    cases: int
    near: float
    worst_over_dense: float

    @classmethod
    def of(cls, rows: Sequence[PlannerRow]) -> Verdict:
        """Of at least one row."""
        return cls(
            len(rows),
            sum(row.regret <= NEAR for row in rows) / len(rows),
            max(row.over_dense for row in rows),
        )

    @property
    def holds(self) -> bool:
        """Whether the planner is as good as it claims to be."""
        return self.near >= ENOUGH and self.worst_over_dense <= WORST_OVER_DENSE

    def line(self) -> str:
        """In words."""
        return (
            f"# {self.near:.1%} of {self.cases} cases within {NEAR:.0%} of the best (at least "
            f"{ENOUGH:.0%} are claimed); worst {self.worst_over_dense:.2f} times dense (at most "
            f"{WORST_OVER_DENSE:.2f}): {'holds' if self.holds else 'FAILS'}"
        )
