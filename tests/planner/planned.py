"""Planners on virtual ranks, with prices and gradients that the test chooses."""

import torch

from megatron_sparse.bench.exchange.case import RankReducer
from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import SCHEMES, Exchange, Input
from megatron_sparse.config.level import NODE
from megatron_sparse.config.sparse import CompressionConfig, PlannerConfig, SchemeConfig
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.planner.choice import Pace, PricedPlanner
from megatron_sparse.pricing.cluster import find
from megatron_sparse.recording import StageTimer
from megatron_sparse.reduction.level_choice import LevelChoice, virtual_groups
from megatron_sparse.simulate.pricing import ChargingTimer, make_message, memory_bound
from megatron_sparse.transport import VirtualCluster
from megatron_sparse.transport.topology import members_of

NUMEL = 2**14
SPARSE = ("agsparse", "direct", "ssar_rd")


def a_bucket(grad_N=None, world_size=4, name="b", op=CollectiveOp.ALL_REDUCE, *, keep=False):
    """One parameter that is the whole bucket, pruned unless it is kept."""
    grad_N = torch.zeros(NUMEL) if grad_N is None else grad_N
    pieces = [ParameterSlice("w", 0, grad_N.numel(), keep)]
    return Bucket(name, grad_N, pieces, op, world_size)


def a_planner(cluster="ethernet_25gbit", *, compression=None, scheme=None, schemes=None, **pace):
    """A planner whose first step is at the target, unless `compression` says otherwise."""
    schedule = {"warmup_iters": 0, "ramp_iters": 0, "density": 0.01} | (compression or {})
    return PricedPlanner(
        CompressionConfig(**schedule),
        SchemeConfig(**(scheme or {})),
        PlannerConfig(schemes=schemes),
        find(cluster),
        logs=True,
        pace=Pace(**pace),
    )


def ran(case, sweep, cluster, gradients, byte_s=0.0):
    """A virtual cluster that has synchronised these gradients, by the reducer of training.

    At level `node` nodes add up first, dense. Of `cluster` only the links count, not the codec
    table; its host costs nothing, but for `byte_s` for each byte that local work reads or writes.
    The fp32 gradients are not mutated.
    """
    n = len(gradients)
    virtual = VirtualCluster(n, cluster.topology(n))
    members = members_of(virtual.transports[0].nodes) if case.level == NODE else []
    choice = LevelChoice(case.level, "as asked", tuple(map(tuple, members)))
    reducers = [RankReducer(case, sweep, each) for each in virtual_groups(virtual, choice)]

    def start(transport):
        rank_reducer = reducers[transport.rank]
        bucket = case.bucket(gradients[transport.rank].clone(), n)
        if SCHEMES[case.scheme].takes is Input.SPARSE:  # memory taken once is no cost of a step
            rank_reducer.residuals.begin(rank_reducer.reducer.part(bucket))
        return rank_reducer.steps(bucket, 0, ChargingTimer(transport, memory_bound(byte_s)))

    virtual.run(start)
    return virtual


class Ranks:
    """n virtual ranks, each with a planner of its own, that synchronise one bucket."""

    def __init__(self, world_size=4, **settings):
        self.world_size = world_size
        self.planners = [a_planner(**settings) for _ in range(world_size)]

    def step(self, step, gradients=None):
        """Plans a step and lets the planners sample the gradients; returns the scheme."""
        plans = []

        def start(transport):
            rank = transport.rank
            planner = self.planners[rank]
            grad_N = torch.zeros(NUMEL) if gradients is None else gradients[rank].clone()
            bucket = a_bucket(grad_N, self.world_size)
            plan = planner.plan_for(bucket, step)
            plans.append(plan)
            timer, buffers = StageTimer(), MessageBuffers()
            message = None
            if gradients is not None and not plan.scheme.startswith("dense"):
                message = make_message(bucket, plan.sharded, "auto", buffers, timer)
            exchange = Exchange(bucket, transport, buffers, timer, SchemeConfig())
            yield from planner.share(exchange, plan, step, message)
            return 0

        VirtualCluster(self.world_size).run(start)
        (scheme,) = {plan.scheme for plan in plans}
        return scheme
