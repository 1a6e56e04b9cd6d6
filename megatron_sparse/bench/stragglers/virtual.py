"""Runs collectives on the virtual cluster, one rank late: real messages and sums, a modelled clock.

All times are the alpha-beta clock's, in which local work takes no time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_sparse.bench.collectives.case import CHECK_STEPS, Case
from megatron_sparse.bench.collectives.virtual import TRANSPORT, VirtualRanks, check_memory
from megatron_sparse.bench.stragglers.groups import (
    AUTO_FACTOR,
    RULE,
    Group,
    groups_of,
    reduce_scatter_of,
    taken_by_the_rule,
)
from megatron_sparse.bench.stragglers.row import StragglerRow, compare
from megatron_sparse.bench.stragglers.sweep import StragglerSweep
from megatron_sparse.bench.table import Progress
from megatron_sparse.transport import Link, Topology


def rows(bench: StragglerSweep, topology: Topology, progress: Progress) -> Iterator[StragglerRow]:
    """Every group with every delay.

    Raises:
        ConfigError: the ranks do not fit into this machine's memory; there is no such straggler.
        MegatronSparseError: a collective refuses a case.
    """
    n, straggler = topology.world_size, bench.late_rank(topology.world_size)
    groups = groups_of(bench, n)
    check_memory([case for group in groups for case in group], n)
    for group in groups:
        for delay_ms in bench.delays_ms:
            if delay_ms is None:
                ranks = VirtualRanks(reduce_scatter_of(group), bench, topology)
                scatter_s, _ = ranks.run(_given(group[0], n), 0)
                delay_s = AUTO_FACTOR * scatter_s
            else:
                delay_s = delay_ms * 1e-3
            yield from _rows(bench, group, topology, straggler, delay_s, progress)


def _given(case: Case, n: int) -> list[torch.Tensor]:
    return [case.normal_values(rank) for rank in range(n)]


def _rows(
    bench: StragglerSweep,
    group: Group,
    topology: Topology,
    straggler: int,
    delay_s: float,
    progress: Progress,
) -> list[StragglerRow]:
    link = topology.intra if len(topology.node_sizes) == 1 else topology.inter
    cases = [(case.scheme, case) for case in group]
    if bench.rule:
        cases.append((RULE, taken_by_the_rule(group[0], topology.world_size, delay_s, link)))
    rows = []
    for number, (name, case) in enumerate(cases):
        progress(number, len(cases), case.title)
        rows.append(_row(name, case, bench, topology, straggler, delay_s, link))
    compare(group, rows)
    return rows


def _row(
    name: str,
    case: Case,
    bench: StragglerSweep,
    topology: Topology,
    straggler: int,
    delay_s: float,
    link: Link,
) -> StragglerRow:
    n = topology.world_size
    ranks = VirtualRanks(case, bench, topology, straggler, delay_s)
    wrong = sum(ranks.count_wrong(step) for step in range(CHECK_STEPS))
    row = StragglerRow.of(
        case,
        ranks.carried_by,
        n,
        wrong,
        scheme=name,
        straggler=straggler,
        delay_us=delay_s * 1e6,
        alpha_us=link.alpha_s * 1e6,
        transport=TRANSPORT,
        modelled=True,
    )
    if wrong:
        return row
    ranks = VirtualRanks(case, bench, topology, straggler, delay_s)
    _, outcomes = ranks.run(_given(case, n), 0)
    figures = [
        [[delay_s if rank == straggler else 0.0, ranks.clock_s[rank], r.wire_bytes, r.nnz]]
        for rank, r in enumerate(outcome.record for outcome in outcomes)
    ]
    return row.measured(torch.tensor(figures, dtype=torch.float64), link)
