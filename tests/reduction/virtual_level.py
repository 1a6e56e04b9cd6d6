"""Reducers of a virtual cluster at any level, driven step by step."""

from dataclasses import dataclass
from typing import Any

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice, Reduction
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.config.level import INSTANCE
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.recording import BucketRecord
from megatron_sparse.reduction.level_choice import choose_level, virtual_groups
from megatron_sparse.reduction.level_parts import in_whole_bucket
from megatron_sparse.transport import Topology, VirtualCluster
from megatron_sparse.transport.topology import NO_TIME
from tests.reduction.reducers import at_target, integers, reducer_of, residual_of

LENGTHS = (0.45, 0.02, 0.3, 0.05, 0.15)
"""Parameters as parts of the bucket; what is left is padding."""


OPTIONS: list[dict[str, Any]] = [
    {"scheme": "agsparse"},
    {"scheme": "auto", "density": 0.02},
    {"scheme": "sparse_ring"},
    {"scheme": "dense_q"},
    {"capacity": 1.25},
    {"warmup_iters": 2},
    {"undo": "always"},
]
"""Settings that each level is tested with."""


def settings(**overrides):
    """A configuration whose every step prunes."""
    few_samples = {"level": "node", "density": 0.05, "value_bits": "auto", "samples": 200}
    return at_target(**few_samples | {"scheme": "direct"} | overrides)


def numel_of(op, sizes):
    """Of an all-reduce no multiple of the ranks of a node."""
    n = sum(sizes)
    return 12 * 101 * n if op is CollectiveOp.REDUCE_SCATTER else 12 * 101 * n + 1


def gradients(ranks, step, dtype=torch.float32):
    """Small integers, different on each rank, zero in the padding."""
    numel = ranks.buckets[0].numel
    return [
        integers(parameters(numel), numel, 1000 * step + rank, dtype) for rank in range(ranks.n)
    ]


def parameters(numel: int) -> list[ParameterSlice]:
    """Pruned parameters, a kept and a small one, with padding between some of them."""
    pieces, start = [], 0
    for index, length in enumerate(LENGTHS):
        stop = min(start + max(int(length * numel), 1), numel)
        pieces.append(ParameterSlice(f"w{index}", start, stop, keep=index == 1))
        start = min(stop + index % 2, numel)
    return [piece for piece in pieces if piece.stop > piece.start]


@dataclass
class Outcomes:
    """What one step left on every rank: the bucket's gradient, the record, and what was `sent`.

    That is the gradient of its node in its part, and residual before less after.
    """

    results: list[torch.Tensor]
    sent: list[torch.Tensor]
    records: list[BucketRecord]


class VirtualRanks:
    """All ranks of a cluster; each has one bucket. `sizes`: ranks on each node."""

    def __init__(
        self,
        config: SparseConfig,
        sizes: tuple[int, ...],
        op: CollectiveOp,
        numel: int | None = None,
        dtype: torch.dtype = torch.float32,
        reduction: Reduction = Reduction.SUM,
        instances: int = 1,
    ) -> None:
        topology = Topology(sizes, NO_TIME, NO_TIME)
        numel = numel or numel_of(op, sizes)
        self.n = topology.world_size
        self.cluster = VirtualCluster(self.n, topology)
        self.each = self.n // instances
        self.choice = choose_level(config, topology.nodes[: self.each], instances)
        groups = virtual_groups(self.cluster, self.choice, instances)
        self.reducers = [reducer_of(config, own) for own in groups]
        shape = parameters(numel), op, self.each, reduction, instances
        self.buckets = [Bucket("0", torch.zeros(numel, dtype=dtype), *shape) for _ in range(self.n)]

    def store(self, rank: int) -> ResidualStore:
        return self.reducers[rank].selector.residuals

    def residual(self, rank: int) -> torch.Tensor:
        """A rank's residual of its part, fp32; zeros if it keeps none."""
        return residual_of(self.reducers[rank], self.buckets[rank])

    def whole(self, rank: int, part_M: torch.Tensor) -> torch.Tensor:
        """Values of the parameters of a rank's part, at their places in the whole bucket."""
        whole = self.buckets[rank]
        return in_whole_bucket(part_M, self.reducers[rank].part(whole), whole)

    def bytes_between_nodes(self) -> list[int]:
        nodes = self.cluster.topology.nodes
        sent = [0] * (max(nodes) + 1)
        for (source, target), nbytes in self.cluster.link_bytes.items():
            if nodes[source] != nodes[target]:
                sent[nodes[source]] += nbytes
        return sent

    def step(
        self,
        gradients: list[torch.Tensor],
        step: int,
        *,
        accepted: bool = True,
    ) -> Outcomes:
        """Synchronises a gradient of each rank; then the optimizer takes the step, or skips it."""
        before = [self.residual(rank) for rank in range(self.n)]
        for bucket, gradient in zip(self.buckets, gradients, strict=True):
            bucket.grad_N.copy_(gradient)
        launched = zip(self.reducers, self.buckets, strict=True)
        pending = [reducer.start(bucket, step) for reducer, bucket in launched]
        self.cluster.run(lambda transport: pending[transport.rank].run_alone())
        for store in map(self.store, range(self.n)):
            store.commit() if accepted else store.rollback()
        sent = []
        for rank in range(self.n):
            node_N = sum(gradients[each].float() for each in self._summed_first(rank))
            carried_N = self.whole(rank, before[rank] - self.residual(rank))
            own_N = self.whole(rank, torch.ones(before[rank].numel())) * node_N
            sent.append(own_N + carried_N)
        results = [bucket.grad_N.clone() for bucket in self.buckets]
        return Outcomes(results, sent, [each.record for each in pending])

    def _summed_first(self, rank: int) -> list[int]:
        """The ranks whose gradients are added up before the rank selects."""
        own, first = rank % self.each, rank - rank % self.each
        if self.choice.level == INSTANCE:
            return list(range(first, first + self.each))
        if len(self.choice.nodes) > 1:
            return [first + member for member in self.choice.inside(own)]
        return [rank]

    def part_of_result(self, rank: int, result_N: torch.Tensor) -> torch.Tensor:
        """What a rank must know after a step: all, or its shard."""
        bucket = self.buckets[rank]
        if bucket.op is CollectiveOp.ALL_REDUCE:
            return result_N
        return result_N[bucket.shard(rank % self.each)]
