"""Groups of collectives that `bench stragglers` compares, and the baseline of each row.

Cases on gradients of the same size, dtype and operation make a group: in each round they take
turns, so that a slowdown of the machine affects all of them.
"""

from __future__ import annotations

from megatron_sparse.bench.collectives.case import Case, cases_of
from megatron_sparse.bench.stragglers.sweep import StragglerSweep
from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES, Input, skips_straggler
from megatron_sparse.straggler.critical import dense_split
from megatron_sparse.transport import Link

RULE = "rule"
"""A row that is left to the rule of `straggler.critical`: `straggler` where it pays, else dense."""
AUTO_FACTOR = 1.5
"""An automatic delay, in reduce-scatters: long enough to hide the early ranks' work."""

Group = list[Case]


def groups_of(sweep: StragglerSweep, world_size: int) -> list[Group]:
    """Cases that are compared with one another, in the order in which they are printed.

    Raises:
        ConfigError: a gradient has fewer elements than there are ranks.
    """
    found: dict[tuple[CollectiveOp, str, int], Group] = {}
    for case in cases_of(sweep, world_size):
        found.setdefault((case.op, case.dtype, case.numel), []).append(case)
    return list(found.values())


def reduce_scatter_of(group: Group) -> Case:
    """The dense reduce-scatter that an automatic delay is measured by."""
    case = group[0]
    return Case(CollectiveOp.REDUCE_SCATTER, "dense_ring", case.dtype, 1.0, case.numel)


def taken_by_the_rule(like: Case, n: int, delay_s: float, link: Link) -> Case:
    """The case that the rule chooses for a dense gradient if the last rank has this delay."""
    gains = dense_split(n, like.nbytes, link, like.op).gain_s(delay_s) > 0
    return Case(like.op, "straggler" if gains else "dense", like.dtype, 1.0, like.numel)


def is_dense_baseline(case: Case) -> bool:
    """Whether a case is one that the straggler-aware dense form has to beat."""
    return SCHEMES[case.scheme].takes is Input.DENSE and not skips_straggler(case.scheme)


def is_sparse_baseline(case: Case) -> bool:
    """Whether a case is one that the straggler-aware sparse form has to beat."""
    return SCHEMES[case.scheme].takes is Input.SPARSE and not skips_straggler(case.scheme)
