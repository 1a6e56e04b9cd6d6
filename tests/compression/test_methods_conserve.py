"""Every method on virtual ranks: collectives sum exactly what each of them has selected."""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives import SCHEMES, Exchange
from megatron_sparse.compression.methods import method_of
from megatron_sparse.compression.residual import Outcome, ResidualStore
from megatron_sparse.compression.selection import MessageSpec, Selector
from megatron_sparse.config.compression import METHODS, CompressionConfig
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.planner import FixedPlanner
from megatron_sparse.recording import StageTimer
from megatron_sparse.transport import VirtualCluster
from tests.collectives.cases import parameters

STEPS = 5
NUMEL = 2400


class Rank:
    """One rank's state between steps."""

    def __init__(self, rank, method, scheme):
        self.rank, self.scheme = rank, scheme
        self.config = CompressionConfig(
            method=method,
            density=0.1,
            momentum=0.5,
            samples=300,
            warmup_iters=0,
            ramp_iters=0,
            keep_below_numel=0,
        )
        self.store = ResidualStore(torch.float32, undo=False, outcome=Outcome.ASSUMED)
        self.selector = Selector(method_of(self.config, self.store), rank, MessageBuffers())
        self.left = {"residual": torch.zeros(NUMEL), "momentum": torch.zeros(NUMEL)}

    def step(self, transport, step, op):
        """The result of one step and the sent values; step 2 is dense."""
        options, timer = SchemeConfig(name=self.scheme), StageTimer()
        draw = torch.Generator().manual_seed(10 * step + self.rank)
        gradient = torch.randint(-64, 65, (NUMEL,), generator=draw).float()
        bucket = Bucket("b", gradient.clone(), parameters(NUMEL), op, transport.world_size)
        planner = FixedPlanner(self.config, SchemeConfig(name=self.scheme))
        planner.enabled = step != 2
        plan, scheme = planner.plan_for(bucket, step), SCHEMES[self.scheme]
        exchange = Exchange(bucket, transport, self.selector.buffers, timer, options)
        if step == 2:
            values_N = self.selector.take_whole(bucket, None, step=step, timer=timer)
            yield from SCHEMES["dense_ring"].run(exchange, values_N, step)
        else:
            message = self.selector.select(
                bucket,
                MessageSpec(
                    plan.density,
                    format=scheme.message_format(options),
                    sharded=plan.sharded,
                    extra_cuts=scheme.extra_cuts(bucket),
                ),
                step=step,
                timer=timer,
            )
            yield from scheme.run(exchange, message)
        own = slice(None) if op is CollectiveOp.ALL_REDUCE else bucket.shard(self.rank)
        return bucket.grad_N[own].clone(), self._sent(gradient)

    def _sent(self, gradient):
        """Everything there was to send, less the residual."""
        velocity = gradient
        if self.config.method == "dgc":
            velocity = 0.5 * self.left["momentum"] + gradient
        held = self.selector.method.stores
        before, self.left = self.left, {name: store["b"].clone() for name, store in held.items()}
        return velocity + before["residual"] - self.left["residual"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("scheme", "op"),
    [
        ("agsparse", CollectiveOp.ALL_REDUCE),
        ("direct", CollectiveOp.REDUCE_SCATTER),
        ("zen", CollectiveOp.ALL_REDUCE),
    ],
)
def test_ranks_hold_the_exact_sum_of_what_they_selected(method, scheme, op):
    ranks = [Rank(rank, method, scheme) for rank in range(3)]
    for step in range(STEPS):
        outcomes = VirtualCluster(3).run(lambda t, step=step: ranks[t.rank].step(t, step, op))
        # Multiples of 1/16 under 2^12: exact in fp32 in any order.
        total = sum(sent for _, sent in outcomes)
        results = [result for result, _ in outcomes]
        if op is CollectiveOp.ALL_REDUCE:
            assert all(torch.equal(result, total) for result in results), step
        else:
            assert torch.equal(torch.cat(results), total), step
        assert all(bool(rank.left["residual"].any()) == (step != 2) for rank in ranks)
