"""How fast messages are made and added up, next to a plain copy of the same bytes and to others.

Every row is first checked against the oracle; `#wrong` counts bytes that differ, and a row that has
any is not timed. Operation, copy and peers are measured in turn, in the same run, and medians are
reported: what slows the machine down for a while slows all of them. `ratio` is the median of
time / copy over the rounds.

`stream` reads what an encoder reads, or writes what a scatter-add writes; `copy` is that of
`bench/table.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megatron_sparse.bench import table
from megatron_sparse.bench.codecs import baseline, cases, cuda, hash_cases
from megatron_sparse.bench.codecs.cases import DTYPES, Task
from megatron_sparse.bench.table import Action, cell
from megatron_sparse.errors import ConfigError
from megatron_sparse.run.json_lines import write_rows
from megatron_sparse.version import __version__

BUCKET_FORMS = tuple(cases.FORMS)
"""Records of a bucket."""
FORMS = (*BUCKET_FORMS, "hash_bitmap", "pairs", "row_sparse")
BUCKET_OPS = ("prune_encode", "encode", "decode_add")
OPS = (*BUCKET_OPS, "hash_partition", "row_union", "row_match", "row_expand")
"""Each format has those that it knows."""


@dataclass
class Row:
    """One line of the table and one JSON object; times are medians in microseconds.

    There is a row for each peer; the operation's own numbers are the same in all of them.
    """

    op: str
    format: str
    dtype: str
    density: float
    count: int
    bytes_moved: int
    time_us: float | None
    copy_us: float | None
    stream_us: float | None
    ratio: float | None
    peer: str | None
    peer_us: float | None
    device: str
    wrong: int


@dataclass(frozen=True, kw_only=True)
class Sweep(table.SizeSweep):
    """What to measure.

    Attributes:
        densities: fractions that are sent, in (0, 1].
        dtypes: of the gradient and of the values on the wire.
        forms: names in `FORMS`.
        ops: names in `OPS`.
        peers: whether to time them too.
        device: `cpu` or `cuda`; on a GPU what is timed is the device's work.
    """

    densities: Sequence[float] = (0.001, 0.01, 0.05, 0.1, 0.5, 1.0)
    dtypes: Sequence[str] = ("fp32",)
    forms: Sequence[str] = BUCKET_FORMS
    ops: Sequence[str] = OPS
    peers: bool = True
    device: str = "cpu"

    def __post_init__(self) -> None:
        table.check_arguments(
            "bench codecs",
            [
                *self.range_checks(),
                (
                    "density",
                    self.densities,
                    all(0 < d <= 1 for d in self.densities),
                    "above 0, at most 1",
                ),
                ("dtype", self.dtypes, set(self.dtypes) <= set(DTYPES), " | ".join(DTYPES)),
                ("format", self.forms, set(self.forms) <= set(FORMS), " | ".join(FORMS)),
                ("op", self.ops, set(self.ops) <= set(OPS), " | ".join(OPS)),
                ("device", self.device, self.device in ("cpu", "cuda"), "cpu | cuda"),
            ],
        )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "bench codecs: there is no CUDA device",
                expected="a GPU that torch sees",
                got="none",
                remedy="measure with --device cpu; see megatron-sparse doctor",
            )


def run(
    sweep: Sweep,
    json_path: Path | None = None,
    check: Path | None = None,
    margin: float = 1.0,
    save_baseline: Path | None = None,
) -> list[dict[str, Any]]:
    """Prints the table and returns its rows.

    Args:
        sweep: what to measure.
        json_path: file for one JSON object a line; None writes none.
        check: a baseline to compare with, as `save_baseline` writes it.
        margin: how many times its stated noise a row may exceed the baseline by.
        save_baseline: measures three times and writes ratios and noise to this file.

    Returns:
        A dictionary for each row, with the fields of `Row`.

    Raises:
        ConfigError: an argument is out of range, or a file cannot be read or written.
        MegatronSparseError: a row is slower than the baseline allows.
    """
    expected = None if check is None else baseline.read(check)
    runs = [measure(sweep) for _ in range(1 if save_baseline is None else 3)]
    rows = runs[-1]
    write_rows(json_path, rows)
    if save_baseline is not None:
        baseline.save(save_baseline, runs, header(sweep))
    if expected is not None:
        baseline.compare(rows, expected, margin)
    return rows


def measure(sweep: Sweep) -> list[dict[str, Any]]:
    """Prints the table once and returns its rows."""
    rows: list[Row] = []
    with table.torch_threads(sweep.threads):
        print(f"# {header(sweep)}")
        print(
            f"# {'size(B)':>11} {'count':>11} {'type':>5} {'op':>12} {'format':>10} {'density':>7} "
            f"{'moved(B)':>11} {'time(us)':>10} {'copy(us)':>10} {'ratio':>6} {'stream(us)':>10} "
            f"{'peer(us)':>11} {'x':>6} {'#wrong':>6} peer"
        )
        for size, dtype, density, form in product(
            sweep.sizes(), sweep.dtypes, sweep.densities, sweep.forms
        ):
            for task in _tasks(sweep, size, density, dtype, form):
                if task.op not in sweep.ops:
                    continue
                for row in _rows(task, size, density, dtype, sweep):
                    rows.append(row)
                    print(_line(row, size), flush=True)
    return [asdict(row) for row in rows]


def header(sweep: Sweep) -> str:
    """The machine, the versions and how it is measured."""
    place = table.describe_cpu(sweep.threads)
    if sweep.device == "cuda":
        place = (
            f"{torch.cuda.get_device_name()}, megatron_sparse {__version__}, "
            f"torch {torch.__version__}, CUDA {torch.version.cuda}, events"
        )
    return f"{place}, {sweep.warmup} + {sweep.iters} rounds, medians"


def _tasks(sweep: Sweep, size: int, density: float, dtype: str, form: str) -> Iterator[Task]:
    if form not in BUCKET_FORMS:
        return hash_cases.make_tasks(size, density, dtype, form, torch.device(sweep.device))
    if sweep.device == "cpu":
        return cases.make_tasks(size, density, dtype, form, peers=sweep.peers)
    return cuda.make_tasks(size, density, dtype, form, torch.device(sweep.device))


def _rows(task: Task, size: int, density: float, dtype: str, sweep: Sweep) -> list[Row]:
    peers: dict[str | None, Action] = {**task.peers} if sweep.peers else {}
    own = Row(
        op=task.op,
        format=task.format,
        dtype=dtype,
        density=density,
        count=size // DTYPES[dtype].itemsize,
        bytes_moved=task.bytes_moved,
        time_us=None,
        copy_us=None,
        stream_us=None,
        ratio=None,
        peer=None,
        peer_us=None,
        device=sweep.device,
        wrong=task.wrong,
    )
    if task.wrong:
        return [own]
    actions: list[Action] = [task.run, table.copy_action(task.bytes_moved, sweep.device)]
    if task.stream is not None:
        actions.append(task.stream)
    first_peer = len(actions)
    time_in_turn = table.time_in_turn if sweep.device == "cpu" else cuda.time_in_turn
    times_us = time_in_turn([*actions, *peers.values()], sweep.warmup, sweep.iters)
    own.time_us, own.copy_us = median(times_us[0]), median(times_us[1])
    own.stream_us = None if task.stream is None else median(times_us[2])
    own.ratio = median(a / b for a, b in zip(times_us[0], times_us[1], strict=True))
    if not peers:
        return [own]
    return [
        Row(**(asdict(own) | {"peer": name, "peer_us": median(spent)}))
        for name, spent in zip(peers, times_us[first_peer:], strict=True)
    ]


def _line(row: Row, size: int) -> str:
    faster = None if row.peer_us is None or row.time_us is None else row.peer_us / row.time_us
    return (
        f"  {size:>11} {row.count:>11} {row.dtype:>5} {row.op:>12} {row.format:>10} "
        f"{row.density:>7g} {row.bytes_moved:>11} {cell(row.time_us, 10, 1)} "
        f"{cell(row.copy_us, 10, 1)} {cell(row.ratio, 6, 2)} {cell(row.stream_us, 10, 1)} "
        f"{cell(row.peer_us, 11, 1)} {cell(faster, 6, 1)} {row.wrong:>6} {row.peer or '-'}"
    )
