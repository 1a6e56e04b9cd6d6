"""The command line `megatron-sparse`.

Commands import what they need when they run, so that `--help` answers at once. A typed error of any
command ends here: its message on stderr, its exit code, no traceback.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import megatron_sparse
from megatron_sparse.errors import ConfigError, MegatronSparseError

app = typer.Typer(
    help="Gradient compression for Megatron-LM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measures one part on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write one JSON object a line.")
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits with its code.

    Args:
        arguments: without the program's name; None takes those of the process.
    """
    try:
        app(None if arguments is None else list(arguments), prog_name="megatron-sparse")
    except MegatronSparseError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"megatron_sparse {megatron_sparse.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        # Eager: answered before a missing command is complained about.
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    pass


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
    help="Train a model; `train --help` shows groups, options and every key.",
)
def train(context: typer.Context) -> None:
    """Hands everything to Hydra."""
    from megatron_sparse import application

    application.train(context.args)


@app.command(help="Say what this machine has of all that can be used, and what is missing.")
def doctor(json: JsonFile = None) -> None:
    """Exits with 1 when a part is missing that training needs."""
    from megatron_sparse import doctor as report

    raise typer.Exit(report.run(json))


@app.command(help="Make a training corpus from what is installed.")
def corpus(
    kind: Annotated[str, typer.Option(help="code | prose")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="For example data/code.")],
    vocab_size: Annotated[int, typer.Option(help="Token ids, end of document included.")] = 8192,
) -> None:
    """Prints what was made."""
    from megatron_sparse.megatron import corpus as maker

    made = maker.prepare(kind, out, vocab_size)  # type: ignore[arg-type] - checked there
    print(f"{out}: {made.n_documents} documents, {made.n_tokens} tokens of {made.vocab_size}")


@app.command(help="Rebuild the native libraries.")
def build(
    cuda: Annotated[str, typer.Option(help="auto | on | off")] = "auto",
    verbose: Annotated[bool, typer.Option(help="Print every command.")] = False,
) -> None:
    """Exits with the build's code."""
    from importlib import import_module

    builder = import_module("megatron_sparse.cuda_ext.build")
    raise typer.Exit(builder.main(["--cuda", cuda, *(["--verbose"] if verbose else [])]))


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
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(ranks), "-m", "megatron_sparse.megatron.overhead", "--warmup", str(warmup),
        "--iters", str(iters), *(["--json", str(json)] if json else []),
    ]  # fmt: skip
    raise typer.Exit(subprocess.run(command, env=local | os.environ, check=False).returncode)


@bench.command(help="The message codec: selection with encoding, encoding, adding up.")
def codecs(
    min_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Such as 64K, 1M.")] = "1M",
    max_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Such as 64M, 1G.")] = "64M",
    density: Annotated[
        str, typer.Option(metavar="D,...", help="Fractions sent.")
    ] = "0.001,0.01,0.05,0.1,0.5,1",
    dtype: Annotated[str, typer.Option(metavar="TYPE,...", help="fp32 | bf16 | fp16")] = "fp32",
    format: Annotated[
        str, typer.Option(metavar="FORMAT,...", help="auto | coo | pici | pici_paper | blocks")
    ] = "auto,coo,pici,pici_paper,blocks",
    op: Annotated[
        str, typer.Option(metavar="OP,...", help="prune_encode | encode | decode_add")
    ] = "prune_encode,encode,decode_add",
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
    from megatron_sparse.bench import codecs as runner

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
    ] = "auto,agsparse,direct",
    op: Annotated[
        str, typer.Option(metavar="OP,...", help="all_reduce | reduce_scatter")
    ] = "all_reduce",
    format: Annotated[str, typer.Option(help="scheme.format")] = "auto",
    ranks: Annotated[int, typer.Option(min=1, help="Unless a launcher has started them.")] = 4,
    netbed: Annotated[bool, typer.Option(help="On the network test bed; needs root.")] = False,
    mbit: Annotated[float | None, typer.Option(help="Rate of each rank's link.")] = None,
    virtual: Annotated[bool, typer.Option(help="On the virtual cluster: a model.")] = False,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Of the virtual cluster; all by default.")
    ] = None,
    intra_gbit: Annotated[float, typer.Option(min=1e-6, help="Virtual links in a node.")] = 1600,
    inter_gbit: Annotated[float, typer.Option(min=1e-6, help="Virtual links between.")] = 25,
    alpha_us: Annotated[float, typer.Option(min=0, help="Virtual latency of a message.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds that are not timed.")] = 2,
    iters: Annotated[int, typer.Option(min=1, help="Rounds that are timed.")] = 7,
    json: JsonFile = None,
) -> None:
    """Sizes are swept by fours; exits with 1 when a row is wrong."""
    from megatron_sparse.bench import collectives as runner
    from megatron_sparse.bench.collective_sweep import Sweep
    from megatron_sparse.collectives import SCHEMES
    from megatron_sparse.transport import Link, Topology

    if netbed and (virtual or mbit is None):
        raise ConfigError(
            "--netbed does not fit the other flags",
            expected="--netbed --mbit R, without --virtual",
            got="--virtual" if virtual else "no --mbit",
        )
    sweep = Sweep(
        min_bytes=parse_size("--min-bytes", min_bytes),
        max_bytes=parse_size("--max-bytes", max_bytes),
        densities=parse_densities(density),
        dtypes=dtype.split(","),
        schemes=["auto", *SCHEMES] if scheme == "all" else scheme.split(","),
        ops=op.split(","),
        message_format=format,
        warmup=warmup,
        iters=iters,
        mbit=mbit,
    )
    if virtual:
        intra = Link(alpha_us * 1e-6, 8e-9 / intra_gbit)
        inter = Link(alpha_us * 1e-6, 8e-9 / inter_gbit)
        topology = Topology.even(ranks, ranks_per_node or ranks, intra, inter)
        rows = runner.run_virtual(sweep, topology, json)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rows = runner.run_rank(sweep, json)
    else:
        values = {
            "min-bytes": min_bytes, "max-bytes": max_bytes, "density": density, "dtype": dtype,
            "scheme": scheme, "op": op, "format": format, "warmup": warmup, "iters": iters,
            "mbit": mbit, "json": json,
        }  # fmt: skip
        arguments = [f"--{key}={value}" for key, value in values.items() if value is not None]
        runner.launch(arguments, ranks, mbit if netbed else None)
        return
    raise typer.Exit(1 if any(row["wrong"] for row in rows) else 0)


@app.command(help="Make, check and show a straggler-aware all-reduce's schedule.")
def schedule(
    ranks: Annotated[int, typer.Option(help="Of the group; at least 2.")],
    straggler: Annotated[
        int | None, typer.Option(help="Its rank; the last one by default.")
    ] = None,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Buffer of the cost table.")] = "64M",
    alpha_us: Annotated[float, typer.Option(min=0, help="Of a message, for the costs.")] = 10.0,
    gbit: Annotated[float, typer.Option(min=1e-6, help="Of a link, for the costs.")] = 25.0,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the schedule.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """The costs are those of the alpha-beta model, not measured."""
    from megatron_sparse.straggler import report
    from megatron_sparse.transport import Link

    link = Link(alpha_us * 1e-6, 8 / (gbit * 1e9))
    report.run(ranks, straggler, parse_size("--size", size), link, output, json)


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


if __name__ == "__main__":
    main()
