"""Starts `bench planner`: on virtual clusters, as one real rank, or on the test bed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_sparse.bench.planner import cases, command, ranks
from megatron_sparse.bench.planner.options import PlannerOptions
from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives.registry import check_names, check_op
from megatron_sparse.config.checks import one_of
from megatron_sparse.config.sparse import PlannerConfig, SchemeConfig
from megatron_sparse.extras import require_fits
from megatron_sparse.pricing.cluster import find
from megatron_sparse.run import local_ranks


def run(options: PlannerOptions, json_path: Path | None) -> int:
    """Tries the planner; returns the exit code, 1 where it is worse than it claims.

    Raises:
        ConfigError: an option does not fit.
        MegatronSparseError: the error of a collective.
    """
    one_of("--op", options.op, tuple(CollectiveOp))
    clusters, op = options.clusters or cases.CLUSTERS, CollectiveOp(options.op)
    for name in clusters:
        one_of("--clusters", name, cases.CLUSTERS)
    schemes = None if options.schemes is None else list(options.schemes)
    planner = PlannerConfig(schemes=schemes)
    check_names(SchemeConfig(), planner)
    check_op(SchemeConfig(), planner, op)
    started = local_ranks.started_ranks()
    local_ranks.check_place(
        netbed=options.netbed, virtual=False, mbit=options.mbit, ranks=None, started=started
    )
    is_real = options.netbed or started is not None
    full_numel = options.bucket_bytes // 4
    simulated_bytes = options.simulated_bytes or (2**19 if options.quick else 2**21)
    if options.recording is not None:
        workloads = cases.recorded(options.recording)
    else:
        usual = options.kinds or (cases.QUICK_KINDS if options.quick else tuple(cases.KINDS))
        if cases.FITTED.intersection(usual):
            require_fits()
        numel = full_numel if is_real else simulated_bytes // 4
        workloads = cases.synthetic(usual, numel)
    if not is_real:
        sizes = cases.QUICK_WORLD_SIZES if options.quick else cases.WORLD_SIZES
        trial = command.Trial(
            workloads, options.ranks or sizes, clusters, planner.schemes, full_numel, op
        )
        return 0 if command.run(trial, json_path).holds else 1
    cluster = None if options.cluster is None else find(options.cluster)
    rounds = (options.warmup, options.iters, options.timeout_s)
    real = ranks.RealTrial(workloads, planner.schemes, op, cluster, *rounds)
    if started is not None:
        return 0 if ranks.run_rank(real, json_path).holds else 1
    of_rank = replace(options, netbed=False, mbit=None, ranks=None)
    output = [] if json_path is None else [f"--json={json_path}"]
    program = local_ranks.command_line(["bench", "planner", *of_rank.arguments(), *output])
    count = (options.ranks or (4,))[0]
    return local_ranks.run_netbed(program, count, options.mbit or 0, count)
