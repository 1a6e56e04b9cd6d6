"""The command `megatron-sparse bench stragglers`, which `cli` registers beside `bench_cli`'s."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_sparse.cli.bench import JsonFile, parse_densities, parse_size
from megatron_sparse.errors import ConfigError

AUTO = "auto"


def stragglers(
    min_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Such as 64K, 1M.")] = "64M",
    max_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Such as 64M, 1G.")] = "64M",
    delay_ms: Annotated[
        str, typer.Option(metavar="MS,...", help="How late; auto: 1.5 reduce-scatters.")
    ] = "0,auto",
    straggler: Annotated[int | None, typer.Option(help="The late rank; the last by default.")] = (
        None
    ),
    rule: Annotated[
        bool, typer.Option("--rule/--no-rule", help="Measure also what the rule takes.")
    ] = True,
    density: Annotated[str, typer.Option(metavar="D,...", help="Fractions selected.")] = "0.01",
    dtype: Annotated[str, typer.Option(metavar="TYPE,...", help="fp32 | bf16 | fp16")] = "fp32",
    scheme: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Of docs/collectives.md.")
    ] = None,
    op: Annotated[
        str, typer.Option(metavar="OP,...", help="all_reduce | reduce_scatter")
    ] = "all_reduce",
    ranks: Annotated[
        int | None, typer.Option(min=2, help="4, or as many as a launcher has started.")
    ] = None,
    netbed: Annotated[bool, typer.Option("--netbed", help="On the test bed; needs root.")] = False,
    mbit: Annotated[
        int | None, typer.Option(min=1, help="Rate of each link, in Mbit/s; else measured.")
    ] = None,
    virtual: Annotated[bool, typer.Option("--virtual", help="On virtual ranks: a model.")] = False,
    gbit: Annotated[float, typer.Option(min=1e-6, help="Virtual links.")] = 25,
    alpha_us: Annotated[float, typer.Option(min=0, help="Virtual latency of a message.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds that are not timed.")] = 2,
    iters: Annotated[int, typer.Option(min=1, help="Rounds that are timed.")] = 7,
    timeout: Annotated[float, typer.Option(help="Seconds that an operation may take.")] = 120,
    figure: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw the rows as StragglAR's figure 5.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Sizes are swept by fours; exits with 1 when a row is wrong. See docs/stragglers.md."""
    from megatron_sparse.bench.collectives.sweep import Sweep
    from megatron_sparse.bench.stragglers import command as runner
    from megatron_sparse.bench.stragglers.sweep import DEFAULT_SCHEMES, StragglerSweep
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
        schemes=DEFAULT_SCHEMES if scheme is None else scheme.split(","),
        ops=op.split(","),
        warmup=warmup,
        iters=iters,
        mbit=mbit or netbed_mbit(),
        timeout_s=timeout,
    )
    bench = StragglerSweep(sweep, parse_delays(delay_ms), rule, straggler)
    ranks = ranks or started or 4
    # What does not fit is said before anything starts.
    bench.late_rank(ranks)
    bench.groups(ranks)
    if not started:
        write_rows(json, [])
    if virtual:
        link = Link(alpha_us * 1e-6, 8e-9 / gbit)
        rows = runner.run_virtual(bench, Topology((ranks,), link, link), json, figure)
    elif started:
        rows = runner.run_rank(bench, json, figure)
    else:
        values = {
            "min-bytes": min_bytes,
            "max-bytes": max_bytes,
            "delay-ms": delay_ms,
            "straggler": straggler,
            "density": density,
            "dtype": dtype,
            "scheme": scheme,
            "op": op,
            "mbit": mbit,
            "warmup": warmup,
            "iters": iters,
            "timeout": timeout,
            "figure": figure,
            "json": json,
        }
        arguments = [f"--{key}={value}" for key, value in values.items() if value is not None]
        arguments.append("--rule" if rule else "--no-rule")
        command = local_ranks.command_line(["bench", "stragglers", *arguments])
        if netbed:
            code = local_ranks.run_netbed(command, ranks, mbit or 0, ranks)
        else:
            code = local_ranks.run_loopback(command, ranks)
        raise typer.Exit(code)
    raise typer.Exit(1 if any(row["wrong"] for row in rows) else 0)


def parse_delays(text: str) -> list[float | None]:
    """Milliseconds separated by commas; `auto` becomes None.

    Raises:
        ConfigError: one of them is neither.

    Example:
        >>> parse_delays("0,auto")
        [0.0, None]
    """
    try:
        return [None if part == AUTO else float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            "--delay-ms is not a list of delays",
            expected="milliseconds with commas between them, or auto, such as 0,50,auto",
            got=repr(text),
        ) from None
