"""The commands `megatron-sparse bench ...`, and what they share: sizes and densities as text.

Like `cli`, which lists them, they import what they need when they run.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_sparse.errors import ConfigError

bench = typer.Typer(help="Measures one part on this machine.", no_args_is_help=True)

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write one JSON object a line.")
]


@bench.command(help="Selection from a gradient: threshold, error feedback, pruning, encoding.")
def prune(
    min_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Such as 64K, 1M.")] = "1M",
    max_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Such as 64M, 1G.")] = "256M",
    density: Annotated[str, typer.Option(metavar="D,...", help="Fractions kept.")] = "0.001,0.01",
    dtype: Annotated[str, typer.Option(help="fp32 | bf16 | fp16")] = "fp32",
    residual_dtype: Annotated[str, typer.Option(help="fp32 | bf16")] = "fp32",
    warmup: Annotated[int, typer.Option(min=0, help="Runs that are not timed.")] = 3,
    iters: Annotated[int, typer.Option(min=1, help="Runs that are timed.")] = 20,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all by default.")] = None,
    json: JsonFile = None,
) -> None:
    """Exits with 1 when a row is wrong."""
    from importlib import import_module

    first, last = parse_size("--min-bytes", min_bytes), parse_size("--max-bytes", max_bytes)
    if first > last:
        raise ConfigError(
            "the sizes are the wrong way round",
            expected="--min-bytes <= --max-bytes",
            got=f"{min_bytes} > {max_bytes}",
        )
    runner = import_module("megatron_sparse.bench.prune")
    rows = runner.run(
        min_bytes=first,
        max_bytes=last,
        densities=parse_densities(density),
        dtype=dtype,
        residual_dtype=residual_dtype,
        warmup=warmup,
        iters=iters,
        json_path=json,
        threads=threads,
    )
    raise typer.Exit(1 if any(row["wrong"] for row in rows) else 0)


@bench.command(help="The plugin's own cost: dense through it against Megatron alone, in pairs.")
def overhead(
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 2,
    warmup: Annotated[int, typer.Option(min=0, help="Pairs that are not timed.")] = 3,
    iters: Annotated[int, typer.Option(min=2, help="Pairs that are timed.")] = 20,
    json: JsonFile = None,
) -> None:
    """Exits with the launch's code."""
    import subprocess

    # gloo on loopback, one thread a rank, no compilation: what `train` sets for a local run too.
    local = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "megatron_sparse.megatron.overhead",
        "--warmup",
        str(warmup),
        "--iters",
        str(iters),
        *(["--json", str(json)] if json else []),
    ]
    raise typer.Exit(subprocess.run(command, env=local | os.environ, check=False).returncode)


@bench.command(help="What a bucket costs the host with NCCL, posts that go nowhere; no GPU needed.")
def host(
    ranks: Annotated[
        str, typer.Option(metavar="N,...", help="Sizes of the group; this process is rank 0.")
    ] = "2,8,16",
    scheme: Annotated[
        str, typer.Option(metavar="NAME,...", help="With messages of fixed size, or all of them.")
    ] = "dense,agsparse,direct",
    capacity: Annotated[float, typer.Option(help="scheme.capacity")] = 1.25,
    warmup: Annotated[int, typer.Option(min=0, help="Buckets that are not timed.")] = 30,
    iters: Annotated[int, typer.Option(min=1, help="Buckets that are timed.")] = 200,
    nccl_engine: Annotated[
        bool, typer.Option(help="With scheme.nccl_engine too, where a scheme has it.")
    ] = True,
    json: JsonFile = None,
) -> None:
    """See docs/reading-the-breakdown.md."""
    from megatron_sparse.bench import host as runner

    schemes = runner.SCHEMES if scheme == "all" else scheme.split(",")
    sweep = runner.HostSweep(parse_ranks(ranks), schemes, capacity, warmup, iters, nccl_engine)
    runner.run(sweep, json)


@bench.command(help="The message codec: selection with encoding, encoding, adding up.")
def codecs(
    min_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Such as 64K, 1M.")] = "1M",
    max_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Such as 64M, 1G.")] = "64M",
    density: Annotated[
        str, typer.Option(metavar="D,...", help="Fractions sent.")
    ] = "0.001,0.01,0.05,0.1,0.5,1",
    dtype: Annotated[str, typer.Option(metavar="TYPE,...", help="fp32 | bf16 | fp16")] = "fp32",
    format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT,...",
            help="auto | coo | pici | pici_paper | blocks | hash_bitmap | pairs | row_sparse",
        ),
    ] = "auto,coo,pici,pici_paper,blocks",
    op: Annotated[
        str,
        typer.Option(
            metavar="OP,...",
            help="prune_encode | encode | decode_add | hash_partition (pairs) | row_union | "
            "row_match | row_expand (row_sparse)",
        ),
    ] = "prune_encode,encode,decode_add,hash_partition,row_union,row_match,row_expand",
    warmup: Annotated[int, typer.Option(min=0, help="Runs that are not timed.")] = 3,
    iters: Annotated[int, typer.Option(min=1, help="Runs that are timed.")] = 20,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all by default.")] = None,
    peers: Annotated[bool, typer.Option(help="Time torch, numpy and scipy too.")] = True,
    device: Annotated[str, typer.Option(help="cpu | cuda")] = "cpu",
    check: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Fail where slower than this baseline.")
    ] = None,
    margin: Annotated[
        float, typer.Option(min=0, help="Times its noise that --check allows.")
    ] = 1.0,
    save_baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure three times and write a baseline.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Sizes are swept by fours from `min_bytes` to `max_bytes`."""
    from megatron_sparse.bench.codecs import command as runner

    sweep = runner.Sweep(
        min_bytes=parse_size("--min-bytes", min_bytes),
        max_bytes=parse_size("--max-bytes", max_bytes),
        densities=parse_densities(density),
        dtypes=dtype.split(","),
        forms=format.split(","),
        ops=op.split(","),
        warmup=warmup,
        iters=iters,
        threads=threads,
        peers=peers,
        device=device,
    )
    runner.run(sweep, json, check, margin, save_baseline)


@bench.command(help="Collectives, dense gradient to dense sum, beside the backend's dense one.")
def collectives(
    min_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Such as 64K, 1M.")] = "64M",
    max_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Such as 64M, 1G.")] = "64M",
    density: Annotated[
        str, typer.Option(metavar="D,...", help="Fractions selected.")
    ] = "0.001,0.01,0.05",
    dtype: Annotated[str, typer.Option(metavar="TYPE,...", help="fp32 | bf16 | fp16")] = "fp32",
    scheme: Annotated[
        str, typer.Option(metavar="NAME,...", help="Of docs/collectives.md, auto, or all.")
    ] = "all",
    op: Annotated[
        str, typer.Option(metavar="OP,...", help="all_reduce | reduce_scatter")
    ] = "all_reduce",
    format: Annotated[str, typer.Option(help="scheme.format")] = "auto",
    capacity: Annotated[
        float | None, typer.Option(help="scheme.capacity of the schemes that take it.")
    ] = None,
    nccl_engine: Annotated[
        bool, typer.Option("--nccl-engine", help="scheme.nccl_engine; on GPUs, with a capacity.")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune/--no-prune", help="Time selection with the collective.")
    ] = True,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="4, or as many as a launcher has started.")
    ] = None,
    netbed: Annotated[bool, typer.Option("--netbed", help="On the test bed; needs root.")] = False,
    mbit: Annotated[
        int | None, typer.Option(min=1, help="Rate of each link, in Mbit/s; else measured.")
    ] = None,
    virtual: Annotated[bool, typer.Option("--virtual", help="On virtual ranks: a model.")] = False,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="1 on the test bed; virtually all on one node.")
    ] = None,
    intra_gbit: Annotated[float, typer.Option(min=1e-6, help="Virtual links in a node.")] = 1600,
    inter_gbit: Annotated[float, typer.Option(min=1e-6, help="Virtual links between.")] = 25,
    alpha_us: Annotated[float, typer.Option(min=0, help="Virtual latency of a message.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds that are not timed.")] = 2,
    iters: Annotated[int, typer.Option(min=1, help="Rounds that are timed.")] = 7,
    timeout: Annotated[float, typer.Option(help="Seconds that an operation may take.")] = 120,
    json: JsonFile = None,
) -> None:
    """Sizes are swept by fours; exits with 1 when a row is wrong. See docs/testbed.md."""
    from megatron_sparse.bench.collectives import command as runner
    from megatron_sparse.bench.collectives.sweep import Sweep
    from megatron_sparse.collectives import over_groups
    from megatron_sparse.run import local_ranks
    from megatron_sparse.run.json_lines import write_rows
    from megatron_sparse.transport import Link, Topology
    from megatron_sparse.transport.netbed import netbed_mbit

    started = local_ranks.started_ranks()
    local_ranks.check_place(netbed=netbed, virtual=virtual, mbit=mbit, ranks=ranks, started=started)
    sweep = Sweep(
        min_bytes=parse_size("--min-bytes", min_bytes),
        max_bytes=parse_size("--max-bytes", max_bytes),
        densities=parse_densities(density),
        dtypes=dtype.split(","),
        schemes=["auto", *over_groups()] if scheme == "all" else scheme.split(","),
        ops=op.split(","),
        message_format=format,
        capacity=capacity,
        warmup=warmup,
        iters=iters,
        prune=prune,
        mbit=mbit or netbed_mbit(),
        timeout_s=timeout,
        nccl_engine=nccl_engine,
    )
    ranks = ranks or started or 4
    # What does not fit is said before anything starts.
    sweep.cases(ranks)
    if not started:
        write_rows(json, [])
    if virtual:
        intra = Link(alpha_us * 1e-6, 8e-9 / intra_gbit)
        inter = Link(alpha_us * 1e-6, 8e-9 / inter_gbit)
        topology = Topology.even(ranks, ranks_per_node or ranks, intra, inter)
        rows = runner.run_virtual(sweep, topology, json)
    elif started:
        rows = runner.run_rank(sweep, json)
    else:
        values = {
            "min-bytes": min_bytes,
            "max-bytes": max_bytes,
            "density": density,
            "dtype": dtype,
            "scheme": scheme,
            "op": op,
            "format": format,
            "capacity": capacity,
            "warmup": warmup,
            "iters": iters,
            "mbit": mbit,
            "timeout": timeout,
            "json": json,
        }
        arguments = [f"--{key}={value}" for key, value in values.items() if value is not None]
        arguments.append("--prune" if prune else "--no-prune")
        arguments += ["--nccl-engine"] if nccl_engine else []
        command = local_ranks.command_line(["bench", "collectives", *arguments])
        if netbed:
            code = local_ranks.run_netbed(
                command, ranks, mbit or 0, -(-ranks // (ranks_per_node or 1))
            )
        else:
            code = local_ranks.run_loopback(command, ranks)
        raise typer.Exit(code)
    raise typer.Exit(1 if any(row["wrong"] for row in rows) else 0)


@bench.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    help="Iterations of a small Megatron GPT: plain Megatron beside compressed gradients.",
)
def training(
    context: typer.Context,
    scheme: Annotated[
        str, typer.Option(metavar="NAME,...", help="plain: Megatron without the plugin.")
    ] = "plain,direct",
    density: Annotated[str, typer.Option(metavar="D,...", help="Fractions sent.")] = "0.01",
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 2,
    netbed: Annotated[bool, typer.Option("--netbed", help="On the test bed; needs root.")] = False,
    mbit: Annotated[int | None, typer.Option(min=1, help="Rate of the test bed's links.")] = None,
    iters: Annotated[int, typer.Option(min=1, help="Iterations that are timed.")] = 12,
    warmup: Annotated[int, typer.Option(min=0, help="Iterations that are not.")] = 3,
    slow_rank: Annotated[
        int | None, typer.Option(min=0, help="Sleeps in every backward pass.")
    ] = None,
    slow_ms: Annotated[float, typer.Option(min=0, help="For so long.")] = 300.0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="For the runs' folders.")] = Path(
        "runs/bench_training"
    ),
    json: JsonFile = None,
) -> None:
    """More arguments are overrides of `train`. See docs/testbed.md."""
    from megatron_sparse.bench import training as runner
    from megatron_sparse.run import local_ranks

    local_ranks.check_place(netbed=netbed, virtual=False, mbit=mbit, ranks=None, started=None)
    setting = runner.Setting(
        schemes=scheme.split(","),
        densities=parse_densities(density),
        ranks=ranks,
        mbit=mbit if netbed else None,
        warmup=warmup,
        iters=iters,
        overrides=context.args,
        slow_rank=slow_rank,
        slow_ms=slow_ms,
    )
    runner.run(setting, out, json)


@bench.command("cost-models", help="What the cost models predict, beside what collectives take.")
def cost_models(
    scheme: Annotated[str, typer.Option(metavar="NAME,...", help="Of docs, or all.")] = "all",
    kind: Annotated[
        str, typer.Option(metavar="KIND,...", help="Gradients: of docs/cost-models.md.")
    ] = "uniform,skewed,overlapping,disjoint,embedding",
    density: Annotated[
        str, typer.Option(metavar="D,...", help="Fractions of a rank's gradient.")
    ] = "0.001,0.01,0.1,0.5",
    ranks: Annotated[str, typer.Option(metavar="N,...", help="Virtual ranks.")] = "2,4,8,16,32,64",
    cluster: Annotated[
        str, typer.Option(metavar="NAME,...", help="Model clusters; with --measured a file.")
    ] = "ethernet_25gbit,ethernet_100gbit,perlmutter",
    op: Annotated[str, typer.Option(help="all_reduce | reduce_scatter")] = "all_reduce",
    size: Annotated[str, typer.Option(metavar="SIZE", help="Of the fp32 bucket.")] = "64M",
    measured: Annotated[
        Path | None,
        typer.Option(metavar="ROWS", help="Compare with these rows of `bench collectives`."),
    ] = None,
    json: JsonFile = None,
) -> None:
    """See docs/cost-models.md."""
    from megatron_sparse.bench.cost_models import command as runner
    from megatron_sparse.bucket import CollectiveOp
    from megatron_sparse.collectives import over_groups
    from megatron_sparse.config.checks import one_of
    from megatron_sparse.pricing.cluster import find

    one_of("--op", op, tuple(map(str, CollectiveOp)))
    if measured is not None:
        runner.report(runner.measured_rows(measured, find(cluster)), json)
        return
    sweep = runner.CostSweep(
        schemes=list(over_groups()) if scheme == "all" else scheme.split(","),
        kinds=kind.split(","),
        densities=parse_densities(density),
        world_sizes=parse_ranks(ranks),
        clusters=cluster.split(","),
        op=CollectiveOp(op),
        full_numel=parse_size("--size", size) // 4,
    )
    runner.report(sweep.rows(), json)


def parse_size(option: str, text: str) -> int:
    """Bytes of `64K`, `1M`, `1G` or a plain number; the units are powers of two.

    Raises:
        ConfigError: it is none of these.
    """
    found = re.fullmatch(r"(\d+)([KMG]?)B?", text.upper())
    if found is None or not int(found[1]):
        raise ConfigError(
            f"{option} is not a size", expected="a number, or one with K, M or G", got=repr(text)
        )
    return int(found[1]) * _UNITS[found[2]]


def parse_densities(text: str) -> list[float]:
    """Fractions in (0, 1], separated by commas.

    Raises:
        ConfigError: one of them is not.
    """
    try:
        densities = [float(part) for part in text.split(",")]
    except ValueError:
        densities = []
    if not densities or not all(0 < density <= 1 for density in densities):
        raise ConfigError(
            "--density is not a list of fractions",
            expected="numbers in (0, 1] with commas between them, such as 0.001,0.01",
            got=repr(text),
        )
    return densities


def parse_ranks(text: str) -> list[int]:
    """Numbers of ranks, separated by commas.

    Raises:
        ConfigError: one of them is no number above 0.
    """
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(
            "--ranks is not a list of numbers", expected="such as 2,4,8", got=repr(text)
        )
    return [int(part) for part in parts]
