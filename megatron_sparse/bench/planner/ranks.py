"""`bench planner` between real ranks: every candidate timed as training runs it.

Each rank selects from its gradient of a kind at that kind's density, by `GradientReducer`. A round
runs every candidate once, each after a barrier and on a fresh gradient, beginning with another one
each time, so that a temporary slowdown of the machine affects all of them. The slowest rank counts;
figures are medians over the rounds. The cluster is measured in the same launch unless a file is
given.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_sparse.bench.collectives.case import Case
from megatron_sparse.bench.collectives.ranks import RankBench
from megatron_sparse.bench.collectives.sweep import Sweep
from megatron_sparse.bench.planner.cases import Workload
from megatron_sparse.bench.planner.command import report
from megatron_sparse.bench.planner.row import PlannerRow, Verdict
from megatron_sparse.bench.rank_group import as_rank
from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.calibration.measure import QUICK, calibrate
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.planner.fingerprint import fingerprint
from megatron_sparse.planner.link_timing import complete
from megatron_sparse.planner.prices import candidates, prices_us, runnable, takes_dense
from megatron_sparse.pricing.cluster import ClusterModel
from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.pricing.shape import BucketShape
from megatron_sparse.recording import StageTimer
from megatron_sparse.simulate.pricing import make_message
from megatron_sparse.sparsity.sampling import sample_profile


@dataclass(frozen=True)
class RealTrial:
    """The cases to try between real ranks.

    Attributes:
        workloads: gradients.
        schemes: the candidates; None for all.
        op: all-reduce or reduce-scatter.
        cluster: of a file; None measures it.
        warmup: rounds that do not count.
        iters: rounds that do.
        timeout_s: seconds that an operation may take.
    """

    workloads: Sequence[Workload]
    schemes: Sequence[str] | None
    op: CollectiveOp
    cluster: ClusterModel | None
    warmup: int
    iters: int
    timeout_s: float

    @property
    def sweep(self) -> Sweep:
        """The options in the form of the collective bench."""
        nbytes = 4 * max(workload.numel for workload in self.workloads)
        return Sweep(
            min_bytes=nbytes,
            max_bytes=nbytes,
            schemes=["dense"],
            ops=[str(self.op)],
            warmup=self.warmup,
            iters=self.iters,
            timeout_s=self.timeout_s,
        )


class PlannerRanks(RankBench):
    """One rank's part; see `RankGroup`.

    Args:
        trial: the same on every rank.
        store: where the ranks meet.
        rank: of this process.
        world_size: processes.
    """

    def __init__(self, trial: RealTrial, store: Any, rank: int, world_size: int) -> None:
        self._trial = trial
        super().__init__(trial.sweep, store, rank, world_size)

    def planner_rows(self) -> Iterator[PlannerRow]:
        """One for each workload, the same on every rank.

        Raises:
            ConfigError: the cluster file was measured on another cluster.
            CommunicationError: a rank is gone.
        """
        cluster = self._cluster()
        options = SchemeConfig(capacity=None)
        for workload in self._trial.workloads:
            grad_N = workload.source(self.rank).to(self._device)
            profile = self._profile(grad_N)
            shape = BucketShape(grad_N.numel(), 0, 4, self._trial.op, self.world_size)
            names = runnable(candidates(self._trial.schemes, None), options, self._device.type)
            predictions_us = prices_us(
                shape, profile, cluster=cluster, options=options, names=names
            )
            taken_us = self._race(list(predictions_us), grad_N, profile.density)
            yield PlannerRow.of(
                predictions_us,
                taken_us,
                case=workload.kind,
                world_size=self.world_size,
                cluster=cluster.name,
                numel=grad_N.numel(),
                density=profile.density,
                modelled=False,
            )

    def _cluster(self) -> ClusterModel:
        cluster = self._trial.cluster
        if cluster is None:
            return calibrate(self._transport, self._progress, QUICK, "measured", self._tell)
        cluster.check_fingerprint(fingerprint(self._transport))
        return cluster

    def _tell(self, what: str) -> None:
        if self.rank == 0:
            print(f"# {what}", file=sys.stderr, flush=True)

    def _profile(self, grad_N: torch.Tensor) -> SparsityProfile:
        bucket = self._case("direct", grad_N, 1.0).bucket(grad_N.clone(), self.world_size)
        buffers, timer = MessageBuffers(), StageTimer(self._device)
        message = make_message(bucket, False, "auto", buffers, timer)
        seed = CompressionConfig().seed
        return complete(sample_profile(bucket, message, self._transport, buffers, timer, seed=seed))

    def _race(
        self, schemes: Sequence[str], grad_N: torch.Tensor, density: float
    ) -> dict[str, float]:
        """Microseconds of each scheme."""
        runs = []
        for scheme in schemes:
            case = self._case(scheme, grad_N, density)
            reducer = self._path(case).reducer
            runs.append((reducer, case.bucket(grad_N.clone(), self.world_size)))
        times_us = torch.zeros(self._trial.iters, len(runs), dtype=torch.float64)
        for number in range(self._trial.warmup + self._trial.iters):
            for turn in range(len(runs)):
                index = (number + turn) % len(runs)
                reducer, bucket = runs[index]
                bucket.grad_N.copy_(grad_N)
                took_us = self._timed(lambda: reducer.start(bucket, number).wait())  # noqa: B023
                if number >= self._trial.warmup:
                    times_us[number - self._trial.warmup, index] = took_us
        slowest_us = self._gather(times_us).max(0).values
        return dict(zip(schemes, slowest_us.median(0).values.tolist(), strict=True))

    def _case(self, scheme: str, grad_N: torch.Tensor, density: float) -> Case:
        density = 1.0 if takes_dense(scheme) else density
        return Case(self._trial.op, scheme, "fp32", density, grad_N.numel())


def run_rank(trial: RealTrial, json_path: Path | None) -> Verdict:
    """One rank's part where RANK and WORLD_SIZE are set; rank 0 prints and writes.

    Raises:
        ConfigError: the JSON file cannot be written, or the cluster file is another cluster's.
        CommunicationError: a rank is gone.
        SystemExit: another rank has already reported the error; has that error's exit code.
    """

    def measure(group: PlannerRanks) -> Verdict:
        if group.rank:
            return Verdict.of(list(group.planner_rows()))
        print(
            f"# {group.world_size} ranks, {group.backend}, hosts: {len(group.nodes)}; measured",
            flush=True,
        )
        return report(group.planner_rows(), json_path)

    return as_rank(
        lambda store, rank, world_size: PlannerRanks(trial, store, rank, world_size), measure
    )
