"""`bench planner`: the planner's choice beside the best of all candidates, all of them run: MODELS.

The planner gets the same inputs as in training: a profile that the ranks sampled
(`sparsity.sampling`, here through the virtual cluster) and its cost models. The truth is
`virtual_truth`: real messages on the cluster's alpha-beta clock, codec work charged call by call by
prices that the cost models do not know. A bucket of some hundred thousand elements stands for one
of `Setting.full_numel`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_sparse.bench.cost_models import virtual_truth
from megatron_sparse.bench.cost_models.codec_prices import MemoryBoundPrices
from megatron_sparse.bench.planner.cases import Workload
from megatron_sparse.bench.planner.row import PlannerRow, Verdict
from megatron_sparse.bench.table import print_table, torch_threads
from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.planner.prices import candidates, prices_us
from megatron_sparse.pricing.cluster import find
from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.pricing.shape import BucketShape
from megatron_sparse.recording import StageTimer
from megatron_sparse.simulate.cluster_models import MACHINES
from megatron_sparse.simulate.pricing import make_message
from megatron_sparse.sparsity.sampling import sample_profile
from megatron_sparse.transport import VirtualCluster
from megatron_sparse.transport.virtual_rank import VirtualTransport


@dataclass(frozen=True)
class Trial:
    """The cases to try.

    Attributes:
        workloads: gradients.
        world_sizes: ranks; sizes for which a workload has no gradients are left out.
        clusters: names of shipped model clusters.
        schemes: the candidates; None for all.
        full_numel: elements of the bucket that the small one represents.
        op: all-reduce or reduce-scatter.
    """

    workloads: Sequence[Workload]
    world_sizes: Sequence[int]
    clusters: Sequence[str]
    schemes: Sequence[str] | None
    full_numel: int
    op: CollectiveOp = CollectiveOp.ALL_REDUCE

    def rows(self) -> Iterator[PlannerRow]:
        """Every case; workloads outermost, clusters innermost."""
        options = SchemeConfig(capacity=None)
        for workload in self.workloads:
            for n in self.world_sizes:
                if n <= workload.most_ranks:
                    gradients = workload.gradients(n)
                    profile = sampled_profile(gradients)
                    for name in self.clusters:
                        yield self._row(workload.kind, gradients, profile, name, options)

    def _row(
        self,
        kind: str,
        gradients: Sequence[torch.Tensor],
        profile: SparsityProfile,
        cluster_name: str,
        options: SchemeConfig,
    ) -> PlannerRow:
        cluster, n = find(cluster_name), len(gradients)
        shape = BucketShape(self.full_numel, 0, 4, self.op, n)
        predictions_us = prices_us(
            shape,
            replace(profile, numel=self.full_numel),
            cluster=cluster,
            options=options,
            names=candidates(self.schemes, None),
        )
        prices = MemoryBoundPrices(MACHINES[cluster_name][0].codec_rate)
        setting = virtual_truth.Setting.on(cluster, n, prices, options, self.op, self.full_numel)
        taken_us = {
            scheme: virtual_truth.run(scheme, gradients, setting).total_s * 1e6
            for scheme in predictions_us
        }
        return PlannerRow.of(
            predictions_us,
            taken_us,
            case=kind,
            world_size=n,
            cluster=cluster_name,
            numel=self.full_numel,
            density=profile.density,
            modelled=True,
        )


def sampled_profile(gradients: Sequence[torch.Tensor]) -> SparsityProfile:
    """The profile that the ranks measure with the sampler that training uses."""
    numel, n = gradients[0].numel(), len(gradients)

    def start(transport: VirtualTransport) -> Generator[Any, None, SparsityProfile]:
        # Sampling overwrites the gradient.
        grad_N = gradients[transport.rank].clone()
        bucket = Bucket(
            "bench", grad_N, [ParameterSlice("w", 0, numel)], CollectiveOp.ALL_REDUCE, n
        )
        buffers, timer = MessageBuffers(), StageTimer()
        message = make_message(bucket, False, "auto", buffers, timer)
        return sample_profile(
            bucket, message, transport, buffers, timer, seed=CompressionConfig().seed
        )

    return VirtualCluster(n).run(start)[0]


def run(trial: Trial, json_path: Path | None) -> Verdict:
    """Prints the table and the verdict; writes one JSON object a line.

    Raises:
        ConfigError: the JSON file cannot be written, or a cluster is unknown.
        MegatronSparseError: the error of a collective.
    """
    with torch_threads(1):
        print(
            f"# MODELLED times of virtual clusters; buckets of {trial.full_numel} fp32 elements, "
            f"{trial.op}",
            flush=True,
        )
        return report(trial.rows(), json_path)


def report(rows: Iterable[PlannerRow], json_path: Path | None) -> Verdict:
    """Prints rows as they come, and the verdict on them.

    Raises:
        ConfigError: the JSON file cannot be written.
    """
    done = print_table(PlannerRow.COLUMNS, rows, json_path)
    verdict = Verdict.of(done)
    print(verdict.line(), flush=True)
    return verdict
