"""`bench planner`: the planner's choice beside the best of all candidates, all of them run.

The planner gets the same inputs as in training: a profile that the ranks sampled
(`sparsity.sampling`) and its cost models. The table's last lines judge its choices and the cost
models' predictions: an error is predicted / taken - 1.

On virtual clusters the times are MODELLED: `truth` runs real messages on the cluster's alpha-beta
clock, codec work charged call by call by prices that the cost models do not know. A bucket of some
hundred thousand elements stands for one of `bucket_bytes`.

Between real ranks each rank selects from its gradient of a kind at that kind's density, by
`GradientReducer`; the candidates take turns. The cluster is measured in the same launch unless a
file is given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any, Self

import torch

from megatron_sparse.bench.exchange import planner_cases as cases
from megatron_sparse.bench.exchange import truth
from megatron_sparse.bench.exchange.case import BucketCase
from megatron_sparse.bench.exchange.frame import Bench, show_rows
from megatron_sparse.bench.exchange.frame import run as run_bench
from megatron_sparse.bench.exchange.options import CLUSTERS, CollectiveSweep, Place, PlannerOptions
from megatron_sparse.bench.exchange.path import BucketPath
from megatron_sparse.bench.exchange.planner_cases import PlannerWorkload
from megatron_sparse.bench.rank_group import Turn
from megatron_sparse.bench.row import CellRow, cell
from megatron_sparse.bench.table import torch_threads
from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.calibration.measure import QUICK, calibrate
from megatron_sparse.collectives.registry import check_names, check_op
from megatron_sparse.config.sparse import CompressionConfig, PlannerConfig, SchemeConfig
from megatron_sparse.extras import require_fits
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.planner.fingerprint import fingerprint
from megatron_sparse.planner.link_timing import complete
from megatron_sparse.planner.prices import (
    DENSE,
    candidates,
    least,
    prices_us,
    runnable,
    takes_dense,
)
from megatron_sparse.pricing.cluster import ClusterModel, find
from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.pricing.shape import BucketShape
from megatron_sparse.recording import StageTimer
from megatron_sparse.reduction.reducer import Groups
from megatron_sparse.run import local_ranks
from megatron_sparse.simulate.cluster_models import MACHINES
from megatron_sparse.simulate.pricing import make_message
from megatron_sparse.sparsity.sampling import sample_profile
from megatron_sparse.transport import Transport, VirtualCluster

NEAR = 0.05
"""Regret up to which a choice counts as the best one."""
ENOUGH = 0.95
"""Fraction of the cases that must be near the best."""
WORST_OVER_DENSE = 1.05
SCHEME_OPTIONS = SchemeConfig(capacity=None)


def run(sweep: PlannerOptions, json_path: Path | None = None) -> int:
    """Tries the planner; returns the exit code, 1 where it is worse than it claims.

    Raises:
        ConfigError: an option does not fit.
        MegatronSparseError: the error of a collective.
    """
    named = PlannerConfig(schemes=None if sweep.schemes is None else list(sweep.schemes))
    check_names(SchemeConfig(), named)
    check_op(SchemeConfig(), named, CollectiveOp(sweep.op))
    if sweep.netbed or local_ranks.started_ranks() is not None:
        _workloads(sweep, is_real=True)  # refuses unknown kinds before ranks start
        ranks = (sweep.ranks or (4,))[0] if sweep.netbed else None
        place, of_rank = Place(ranks=ranks, netbed=sweep.netbed), replace(sweep, netbed=False)
        return run_bench(PlannerBench, replace(of_rank, ranks=None), place, json_path)
    where = f"MODELLED times of virtual clusters; buckets of {sweep.bucket_bytes} bytes"
    with torch_threads(1):
        found = virtual_rows(sweep, _workloads(sweep, is_real=False))
        rows = show_rows(PlannerBench, sweep, where, found, json_path)
    return 0 if PlannerBench.right(rows) else 1


def _workloads(options: PlannerOptions, is_real: bool) -> list[PlannerWorkload]:
    if options.recording is not None:
        return cases.recorded(options.recording)
    usual = options.kinds or (cases.QUICK_KINDS if options.quick else tuple(cases.KINDS))
    if cases.FITTED.intersection(usual):
        require_fits()
    simulated_bytes = options.simulated_bytes or (2**19 if options.quick else 2**21)
    return cases.synthetic(usual, (options.bucket_bytes if is_real else simulated_bytes) // 4)


@dataclass(frozen=True)
class PlannerRow(CellRow):
    """One case. Times are microseconds."""

    case: str = cell("kind of gradients", "<14")
    world_size: int = cell("ranks", ">5 ranks")
    cluster: str = cell("its name", "<17")
    numel: int = cell("elements of the bucket")
    density: float = cell("of a rank's gradient, as it was sampled")
    chosen: str = cell("the planner's scheme", "<14")
    chosen_us: float = cell("its time", ">11.1f chosen(us)")
    predicted_us: float = cell("its predicted time", ">11.1f predicted")
    best: str = cell("the fastest scheme", "<14")
    best_us: float = cell("its time", ">11.1f best(us)")
    dense_us: float = cell("the time of `dense`", ">11.1f dense(us) | regret >7.1%")
    modelled: bool = cell("whether the times are those of a virtual cluster")
    taken_us: dict[str, float] = cell("each candidate's time")  # noqa: RUF009 - a field
    predictions_us: dict[str, float] = cell(  # noqa: RUF009 - a field
        "each candidate's predicted time"
    )

    @classmethod
    def of(
        cls, predictions_us: Mapping[str, float], taken_us: Mapping[str, float], **case: Any
    ) -> Self:
        """Chooses by the predictions and looks up the real times.

        Args:
            predictions_us: by scheme; `dense` is one of them.
            taken_us: of the same schemes.
            case: the other attributes: what the case is.
        """
        chosen = least(dict(predictions_us), list(predictions_us))
        best = least(dict(taken_us), list(taken_us))
        return cls(
            chosen=chosen,
            chosen_us=taken_us[chosen],
            predicted_us=predictions_us[chosen],
            best=best,
            best_us=taken_us[best],
            dense_us=taken_us[DENSE],
            taken_us=dict(taken_us),
            predictions_us=dict(predictions_us),
            **case,
        )

    @property
    def regret(self) -> float:
        """The chosen scheme's extra time, as a fraction of the best scheme's time."""
        return self.chosen_us / self.best_us - 1

    @property
    def over_dense(self) -> float:
        """The chosen scheme's time over that of dense."""
        return self.chosen_us / self.dense_us

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return super().to_dict() | {"regret": self.regret}


class Verdict:
    """The verdict on all rows, of which there is at least one.

    Attributes:
        cases: how many there are.
        near: fraction of them whose choice is within `NEAR` of the best.
        worst_over_dense: the largest time of a choice over that of dense.
    """

    def __init__(self, rows: Sequence[PlannerRow]) -> None:
        self.cases = len(rows)
        self.near = sum(row.regret <= NEAR for row in rows) / len(rows)
        self.worst_over_dense = max(row.over_dense for row in rows)

    @property
    def holds(self) -> bool:
        """Whether the planner is as good as it claims to be."""
        return self.near >= ENOUGH and self.worst_over_dense <= WORST_OVER_DENSE

    def line(self) -> str:
        """In words."""
        return (
            f"# {self.near:.1%} of {self.cases} cases within {NEAR:.0%} of the best (at least "
            f"{ENOUGH:.0%} are claimed); worst {self.worst_over_dense:.2f} times dense (at most "
            f"{WORST_OVER_DENSE:.2f}): {'holds' if self.holds else 'FAILS'}"
        )


def errors_of(rows: Sequence[PlannerRow]) -> dict[str, list[float]]:
    """The errors of each scheme's predictions over all cases; positive where they are too long."""
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for scheme, predicted_us in row.predictions_us.items():
            errors[scheme].append(predicted_us / row.taken_us[scheme] - 1)
    return errors


def virtual_rows(
    options: PlannerOptions, workloads: Sequence[PlannerWorkload]
) -> Iterator[PlannerRow]:
    """Every case on virtual clusters; workloads outermost, clusters innermost."""
    usual = cases.QUICK_WORLD_SIZES if options.quick else cases.WORLD_SIZES
    for workload in workloads:
        for n in options.ranks or usual:
            # A recording has gradients for a few ranks only.
            if n <= workload.most_ranks:
                gradients = workload.gradients(n)
                profile = sampled_profile(gradients)
                for name in options.clusters or CLUSTERS:
                    yield _virtual_row(options, workload.kind, gradients, profile, find(name))


def _virtual_row(
    options: PlannerOptions,
    kind: str,
    gradients: Sequence[torch.Tensor],
    profile: SparsityProfile,
    cluster: ClusterModel,
) -> PlannerRow:
    n, numel = len(gradients), options.bucket_bytes // 4
    setting = _setting(cluster.name, n, CollectiveOp(options.op), numel)

    def take(schemes: Sequence[str]) -> dict[str, float]:
        return {name: truth.run(name, gradients, setting).total_s * 1e6 for name in schemes}

    return _row(options, kind, cluster, n, replace(profile, numel=numel), take)


def _row(
    options: PlannerOptions,
    kind: str,
    cluster: ClusterModel,
    n: int,
    profile: SparsityProfile,
    take: Callable[[Sequence[str]], dict[str, float]],
    device: str | None = None,
) -> PlannerRow:
    """Prices the candidates and takes all of them; `device` is that of real ranks."""
    names = candidates(None if options.schemes is None else list(options.schemes), None)
    predictions_us = prices_us(
        BucketShape(profile.numel, 0, 4, CollectiveOp(options.op), n),
        profile,
        cluster=cluster,
        options=SCHEME_OPTIONS,
        names=names if device is None else runnable(names, SCHEME_OPTIONS, device),
    )
    return PlannerRow.of(
        predictions_us,
        take(list(predictions_us)),
        case=kind,
        world_size=n,
        cluster=cluster.name,
        numel=profile.numel,
        density=profile.density,
        modelled=device is None,
    )


@cache
def _setting(name: str, n: int, op: CollectiveOp, numel: int) -> truth.TruthSetting:
    """One for all kinds: dense schemes run once in each."""
    rate = MACHINES[name][0].codec_rate
    return truth.TruthSetting(find(name), n, rate, op, numel)


def sampled_profile(gradients: Sequence[torch.Tensor]) -> SparsityProfile:
    """The profile that the ranks measure with the sampler that training uses."""
    cluster = VirtualCluster(len(gradients))
    return cluster.run(lambda transport: _sample(gradients[transport.rank], transport))[0]


def _sample(grad_N: torch.Tensor, transport: Transport) -> Generator[Any, None, SparsityProfile]:
    whole = [ParameterSlice("w", 0, grad_N.numel())]
    op, n = CollectiveOp.ALL_REDUCE, transport.world_size
    bucket = Bucket("bench", grad_N.clone(), whole, op, n)  # sampling overwrites the gradient
    buffers, timer = MessageBuffers(), StageTimer(grad_N.device)
    message = make_message(bucket, False, "auto", buffers, timer)
    return sample_profile(bucket, message, transport, buffers, timer, seed=CompressionConfig().seed)


class PlannerBench(Bench[PlannerOptions]):
    """See the module's docstring.

    Raises:
        ConfigError: the cluster file was measured on another cluster.
    """

    @classmethod
    def right(cls, rows: Sequence[PlannerRow]) -> bool:
        """See `Bench`."""
        return Verdict(rows).holds

    @classmethod
    def show(cls, cases: PlannerOptions, rows: Sequence[PlannerRow]) -> None:
        """Prints how good the predictions and the choices are."""
        for scheme, errors in errors_of(rows).items():
            worst, magnitude = max(errors, key=abs), mean(map(abs, errors))
            print(f"# {scheme:<18} predictions' mean error {magnitude:>6.1%}, worst {worst:>+7.1%}")
        print(Verdict(rows).line(), flush=True)

    def rows(self) -> Iterator[CellRow]:
        """See `Bench`."""
        cluster, n = self._cluster(), self.world_size
        for workload in _workloads(self._cases, is_real=True):
            grad_N = workload.source(self.rank).to(self._device)
            profile = complete(_sample(grad_N, self._transport))
            take = partial(self._race, grad_N, profile.density)
            yield _row(self._cases, workload.kind, cluster, n, profile, take, self._device.type)

    def _cluster(self) -> ClusterModel:
        if self._cases.cluster is None:
            return calibrate(self._transport, self._progress, QUICK, "measured", self._tell)
        cluster = find(self._cases.cluster)
        cluster.check_fingerprint(fingerprint(self._transport))
        return cluster

    def _race(
        self, grad_N: torch.Tensor, density: float, schemes: Sequence[str]
    ) -> dict[str, float]:
        """Microseconds of each scheme: of the slowest rank, medians over the rounds."""
        turns = [self._turn(scheme, grad_N, density) for scheme in schemes]
        figures, _ = self._in_turn(turns, self._cases.warmup, self._cases.iters)
        medians_us = [float(times_nR1.amax(0).median()) for times_nR1 in figures]
        return dict(zip(schemes, medians_us, strict=True))

    def _turn(self, scheme: str, grad_N: torch.Tensor, density: float) -> Turn:
        density = 1.0 if takes_dense(scheme) else density
        case = BucketCase(CollectiveOp(self._cases.op), scheme, "fp32", density, grad_N.numel())
        settings = CollectiveSweep(timeout_s=self._cases.timeout_s)
        path = BucketPath(case, settings, Groups(self._transport), self._progress)
        bucket = case.bucket(grad_N.clone(), self.world_size)

        def turn(step: int) -> list[float]:
            bucket.grad_N.copy_(grad_N)
            return [self._timed(lambda: path.run(bucket, step))]

        return turn
