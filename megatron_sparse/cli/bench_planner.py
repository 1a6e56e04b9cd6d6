"""The command `megatron-sparse bench planner`, which `cli` registers beside `bench_cli`'s."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_sparse.bench.options import parse_counts, parse_size
from megatron_sparse.cli.bench import JsonFile
from megatron_sparse.errors import ConfigError


def planner(
    kinds: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Of gradients; all by default.")
    ] = None,
    recording: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Recorded gradients instead.")
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(metavar="N,...", help="2 to 64 by default; 4 on the test bed.")
    ] = None,
    clusters: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Shipped models; all by default.")
    ] = None,
    schemes: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="The candidates; all by default.")
    ] = None,
    bucket_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Of the fp32 bucket.")] = "64M",
    simulated_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of the virtual one for it; 2M, with --quick 512K."),
    ] = None,
    op: Annotated[str, typer.Option(help="all_reduce | reduce_scatter")] = "all_reduce",
    quick: Annotated[bool, typer.Option("--quick", help="Five kinds, 2 to 8 ranks.")] = False,
    netbed: Annotated[
        bool, typer.Option("--netbed", help="Real time, on the test bed; needs root.")
    ] = False,
    mbit: Annotated[int | None, typer.Option(min=1, help="Rate of the test bed's links.")] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="FILE", help="Of the test bed; else it is measured.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Real rounds that are not timed.")] = 2,
    iters: Annotated[int, typer.Option(min=1, help="Real rounds that are timed.")] = 9,
    timeout: Annotated[float, typer.Option(help="Seconds that an operation may take.")] = 120,
    json: JsonFile = None,
) -> None:
    """Exits with 1 when the planner is worse than it claims. See docs/planner.md."""
    from megatron_sparse.bench.planner import cases as cases
    from megatron_sparse.bench.planner import command as runner
    from megatron_sparse.bench.planner import ranks as planner_ranks
    from megatron_sparse.bucket import CollectiveOp
    from megatron_sparse.config.checks import one_of
    from megatron_sparse.config.sparse import PlannerConfig
    from megatron_sparse.pricing.cluster import find
    from megatron_sparse.run import local_ranks

    one_of("--op", op, tuple(CollectiveOp))
    where = clusters.split(",") if clusters else cases.CLUSTERS
    for name in where:
        one_of("--clusters", name, cases.CLUSTERS)
    candidates = PlannerConfig(schemes=None if schemes is None else schemes.split(",")).schemes
    started = local_ranks.started_ranks()
    is_real = netbed or started is not None
    local_ranks.check_place(netbed=netbed, virtual=False, mbit=mbit, ranks=None, started=started)
    full_numel = parse_size("--bucket-bytes", bucket_bytes) // 4
    if simulated_bytes is None:
        simulated_bytes = "512K" if quick else "2M"
    numel = full_numel if is_real else parse_size("--simulated-bytes", simulated_bytes) // 4
    if recording is not None and kinds is not None:
        raise ConfigError(
            "bench planner: both kinds and a recording are given",
            expected="--kinds or --recording",
            got="both",
        )
    if recording is not None:
        workloads = cases.recorded(recording)
    else:
        usual = cases.QUICK_KINDS if quick else tuple(cases.KINDS)
        workloads = cases.synthetic(kinds.split(",") if kinds else usual, numel)
    if not is_real:
        usual_sizes = cases.QUICK_WORLD_SIZES if quick else cases.WORLD_SIZES
        sizes = usual_sizes if ranks is None else parse_counts("--ranks", ranks, 2)
        trial = runner.Trial(workloads, sizes, where, candidates, full_numel, CollectiveOp(op))
        raise typer.Exit(0 if runner.run(trial, json).holds else 1)
    real = planner_ranks.RealTrial(
        workloads,
        candidates,
        CollectiveOp(op),
        None if cluster is None else find(cluster),
        warmup,
        iters,
        timeout,
    )
    if started is not None:
        raise typer.Exit(0 if planner_ranks.run_rank(real, json).holds else 1)
    values = {
        "kinds": kinds,
        "recording": recording,
        "schemes": schemes,
        "bucket-bytes": bucket_bytes,
        "op": op,
        "cluster": cluster,
        "warmup": warmup,
        "iters": iters,
        "timeout": timeout,
        "json": json,
    }
    arguments = [f"--{key}={value}" for key, value in values.items() if value is not None]
    arguments += ["--quick"] if quick else []
    count = parse_counts("--ranks", ranks or "4", 2)[0]
    command = local_ranks.command_line(["bench", "planner", *arguments])
    raise typer.Exit(local_ranks.run_netbed(command, count, mbit or 0, count))
