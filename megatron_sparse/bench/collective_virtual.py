"""Collectives on the virtual cluster: real selection, messages and sums, a modelled network."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_sparse.bench.collective_row import Row
from megatron_sparse.bench.collective_sweep import Case, Sweep
from megatron_sparse.bucket import Bucket, Form
from megatron_sparse.collectives import SCHEMES, Input, SchemeOptions
from megatron_sparse.compression.residual import Outcome, ResidualStore
from megatron_sparse.compression.selection import Selector
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.planner import FixedPlanner, Plan
from megatron_sparse.recording import Stopwatch
from megatron_sparse.transport import Topology, VirtualCluster
from megatron_sparse.transport.virtual_rank import VirtualTransport


@dataclass
class _Outcome:
    """What a rank ends with: its part of the result, and what it contributed."""

    result: torch.Tensor
    selected_N: torch.Tensor
    nnz: int
    wire_bytes: int
    stage_us: dict[str, float]


def rows(sweep: Sweep, topology: Topology) -> Iterator[Row]:
    """Every case. Times are modelled; the codec's are this machine's, one rank at a time."""
    n = topology.world_size
    for case in sweep.cases(n):
        config = case.config(sweep.message_format)
        planner = FixedPlanner(config.compression, config.scheme)
        plan = planner.plan_for(case.bucket(torch.empty(case.numel), n), 0)
        cluster = VirtualCluster(n, topology)
        outcomes = cluster.run(lambda t, case=case, plan=plan: _rank(case, plan, sweep, t))
        selected = torch.stack([outcome.selected_N for outcome in outcomes]).sum(0)
        wrong = sum(
            int((outcome.result.double() != selected[_own(case, n, rank)]).sum())
            for rank, outcome in enumerate(outcomes)
        )
        dense = VirtualCluster(n, topology)
        dense.run(lambda t, case=case: _dense(case, t))
        stages = {
            stage: sum(o.stage_us[stage] for o in outcomes) / n for stage in outcomes[0].stage_us
        }
        yield Row.of(
            case, carried_by=plan.scheme, wrong=wrong, world_size=n, transport="virtual",
            modelled=True, wire_bytes=max(o.wire_bytes for o in outcomes),
            sent_density=sum(o.nnz for o in outcomes) / n / case.numel,
            time_us=None if wrong else cluster.modelled_s * 1e6, dense_us=dense.modelled_s * 1e6,
            host_us=None, **{f"{stage}_us": time for stage, time in stages.items()}
            | {"network_us": cluster.modelled_s * 1e6},
        )  # fmt: skip


def _rank(
    case: Case, plan: Plan, sweep: Sweep, transport: VirtualTransport
) -> Generator[Any, None, _Outcome]:
    bucket = case.bucket(case.small_integers(transport.rank), transport.world_size)
    config, watch, buffers = case.config(sweep.message_format), Stopwatch(), MessageBuffers()
    options, scheme = SchemeOptions.of(config.scheme), SCHEMES[plan.scheme]
    residuals = ResidualStore(torch.float32, undo=False, outcome=Outcome.ASSUMED)
    selected_N = bucket.grad_N.double()
    if scheme.takes is Input.DENSE:
        nnz = case.numel
        sent = yield from scheme.run(bucket, bucket.grad_N, 0, transport, buffers, watch)
    else:
        selector = Selector(config.compression, residuals, transport.rank, buffers)
        message = selector.select(
            bucket, plan.density, plan.wire_dtype, form=options.message_format(plan.scheme),
            block_size=options.block_size, sharded=plan.sharded, step=0, watch=watch,
        )  # fmt: skip
        nnz = message.nnz
        selected_N -= residuals.begin(bucket).double()
        sent = yield from scheme.exchange(bucket, message, transport, buffers, watch, options)
    own = _own(case, transport.world_size, transport.rank)
    return _Outcome(bucket.grad_N[own], selected_N, nnz, sent, watch.times_us())


def _dense(case: Case, transport: VirtualTransport) -> Generator[Any, None, int]:
    bucket = case.bucket(case.small_integers(transport.rank), transport.world_size)
    run = SCHEMES["dense"].run
    return (yield from run(bucket, bucket.grad_N, 0, transport, MessageBuffers(), Stopwatch()))


def _own(case: Case, n: int, rank: int) -> slice:
    if case.form is Form.ALL_REDUCE:
        return slice(None)
    return Bucket("shape", torch.empty(case.numel), [], case.form, n).shard(rank)
