"""What `bench stragglers` measures: groups of collectives on a gradient, and how late one rank is.

The cases are those of `bench collectives`. Those on gradients of the same size, dtype and form make
a group: in each round they take turns, so that what slows the machine down slows all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_sparse.bench.collectives.sweep import Case, Sweep
from megatron_sparse.bench.table import check_arguments
from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES, Input, skips_straggler
from megatron_sparse.errors import ConfigError
from megatron_sparse.straggler.critical import dense_split
from megatron_sparse.transport import Link

RULE = "rule"
"""A row that is left to the rule of `straggler.critical`: `straggler` where it pays, else dense."""
DEFAULT_SCHEMES = (
    "dense",
    "dense_ring",
    "dense_rhd",
    "dense_allpairs",
    "dense_broadcast",
    "straggler",
    "agsparse",
    "direct",
    "straggler_direct",
)
AUTO_FACTOR = 1.5
"""An automatic delay, in reduce-scatters: long enough to hide what the early ranks do meanwhile."""

Group = list[Case]


@dataclass(frozen=True)
class StragglerSweep:
    """All groups, and how late the straggler is in each.

    Attributes:
        sweep: sizes, densities, dtypes, schemes and rounds.
        delays_ms: how much later than the others the straggler begins; None is `AUTO_FACTOR` times
            the reduce-scatter of `dense_ring` on the same gradient, measured (or modelled) before.
        rule: measure also what the rule takes.
        straggler: its rank; None is the last one.
    """

    sweep: Sweep
    delays_ms: Sequence[float | None]
    rule: bool = True
    straggler: int | None = None

    def __post_init__(self) -> None:
        longest_ms = self.sweep.timeout_s * 1e3
        check_arguments(
            "bench stragglers",
            [
                (
                    "delay-ms",
                    delay,
                    delay is None or 0 <= delay < longest_ms,
                    f"0 to less than --timeout ({longest_ms:g} ms), or auto",
                )
                for delay in self.delays_ms
            ],
        )

    def late_rank(self, world_size: int) -> int:
        """The straggler's rank.

        Raises:
            ConfigError: the group has no such rank, or nobody who could wait for it.
        """
        rank = world_size - 1 if self.straggler is None else self.straggler
        if world_size < 2 or not 0 <= rank < world_size:
            raise ConfigError(
                "bench stragglers: there is no such straggler",
                expected=f"--straggler 0 to {world_size - 1} of at least 2 ranks",
                got=f"rank {rank} of {world_size}",
            )
        return rank

    def groups(self, world_size: int) -> list[Group]:
        """Cases that are compared with one another, in the order in which they are printed.

        Raises:
            ConfigError: a gradient has fewer elements than there are ranks.
        """
        found: dict[tuple[CollectiveOp, str, int], Group] = {}
        for case in self.sweep.cases(world_size):
            found.setdefault((case.op, case.dtype, case.numel), []).append(case)
        return list(found.values())


def reduce_scatter_of(group: Group) -> Case:
    """The dense reduce-scatter that an automatic delay is measured by."""
    case = group[0]
    return Case(CollectiveOp.REDUCE_SCATTER, "dense_ring", case.dtype, 1.0, case.numel)


def taken_by_the_rule(like: Case, n: int, delay_s: float, link: Link) -> Case:
    """What the rule takes for a dense gradient when the last rank is expected so late."""
    gains = dense_split(n, like.nbytes, link, like.op).gain_s(delay_s) > 0
    return Case(like.op, "straggler" if gains else "dense", like.dtype, 1.0, like.numel)


def is_dense_baseline(case: Case) -> bool:
    """Whether a case is one that the straggler-aware dense form has to beat."""
    return SCHEMES[case.scheme].takes is Input.DENSE and not skips_straggler(case.scheme)


def is_sparse_baseline(case: Case) -> bool:
    """Whether a case is one that the straggler-aware sparse form has to beat."""
    return SCHEMES[case.scheme].takes is Input.SPARSE and not skips_straggler(case.scheme)
