"""`bench gather` on the virtual cluster: real records and bits, a modelled network.

`time_us` and `raw_us` are the alpha-beta clock's, in which local work takes no time. `encode_us`
and `decode_us` are this machine's, measured.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_sparse.bench.gather.case import (
    GatherCase,
    GatherRow,
    Outcome,
    RankGather,
    States,
    cases_of,
    measured,
    row_of,
)
from megatron_sparse.bench.gather.sweep import GatherSweep
from megatron_sparse.bench.table import Progress
from megatron_sparse.reduction.held import HeldProgress
from megatron_sparse.transport import Topology, VirtualCluster

TRANSPORT = "virtual"


def rows(sweep: GatherSweep, topology: Topology, progress: Progress) -> Iterator[GatherRow]:
    """Every case."""
    cases = cases_of(sweep, topology.nodes)
    for number, case in enumerate(cases):
        progress(number, len(cases), case.title)
        yield _row(sweep, case, topology)


def _row(sweep: GatherSweep, case: GatherCase, topology: Topology) -> GatherRow:
    n = topology.world_size
    states = States(sweep, case.rate, n)
    held = [HeldProgress() for _ in range(n)]
    cluster = VirtualCluster(n, topology)
    ranks = [
        RankGather(case, states, transport, held[transport.rank])
        for transport in cluster.transports
    ]
    spent_us = []
    for number in range(2):
        began_s = cluster.modelled_s
        pending = []
        for rank in ranks:
            rank.move(number)
            pending.append(rank.gather.start(number))
        cluster.run(lambda transport: held[transport.rank].steps())
        for each in pending:
            each.wait()
        spent_us.append((cluster.modelled_s - began_s) * 1e6)
    figures = torch.tensor([measured(rank.sink.record) for rank in ranks], dtype=torch.float64)
    # The first gather is raw.
    raw_us, time_us = spent_us
    return row_of(
        sweep,
        case,
        topology.nodes,
        figures,
        Outcome(
            transport=TRANSPORT,
            modelled=True,
            time_us=time_us,
            raw_us=raw_us,
            wrong=sum(states.wrong(rank.values_N, 1) for rank in ranks),
        ),
    )
