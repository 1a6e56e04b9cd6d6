"""The speed of encoding and adding messages, beside a plain copy of the same bytes and peers.

Every row is first checked against the oracle; `#wrong` counts bytes that differ, and a wrong row is
not timed. Operation, copy and peers are measured in turn, in the same run, so that a temporary
slowdown of the machine affects all of them. Times are medians. `ratio` is the median of time / copy
over the rounds.

`stream` only reads the bytes that an encoder reads, or only writes the bytes that a scatter-add
writes; `copy` is that of `bench/table.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megatron_sparse.bench import table
from megatron_sparse.bench.codecs import baseline, cases, cuda, hash_cases, rice_cases
from megatron_sparse.bench.codecs.cases import Task
from megatron_sparse.bench.codecs.row import OperationRow
from megatron_sparse.bench.codecs.sweep import BUCKET_FORMS, RICE_FORMS, Sweep
from megatron_sparse.bench.table import Action, Columns, print_table
from megatron_sparse.run.json_lines import write_rows
from megatron_sparse.version import __version__


@dataclass
class Row(OperationRow):
    """There is a row for each peer; the operation's own numbers are the same in all of them.

    Attributes:
        stream_us: the time only to read the bytes that an encoder reads, or only to write those
            that a scatter-add writes.
        ratio: the median over the rounds of time / copy.
    """

    COLUMNS = Columns(
        "size >13 size(B) | count >11 | dtype >5 type | op >12 | format >10 | density >7g | "
        "bytes_moved >11 moved(B) | time_us >10.1f time(us) | copy_us >10.1f copy(us) | "
        "ratio >6.2f | stream_us >10.1f stream(us) | peer_us >11.1f peer(us) | "
        "peer_us/time_us >6.1f x | wrong >6 #wrong | peer <1"
    )

    stream_us: float | None = None
    ratio: float | None = None


def run(
    sweep: Sweep,
    json_path: Path | None = None,
    check: Path | None = None,
    margin: float = 1.0,
    save_baseline: Path | None = None,
) -> list[dict[str, Any]]:
    """Prints the table and returns its rows.

    Args:
        sweep: the options.
        json_path: file for one JSON object a line; None writes none.
        check: a baseline to compare with, as `save_baseline` writes it.
        margin: a row may exceed its baseline by this many times the noise stated there.
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
    with table.torch_threads(sweep.threads):
        print(f"# {header(sweep)}")
        return [row.to_dict() for row in print_table(Row.COLUMNS, _rows(sweep), None)]


def header(sweep: Sweep) -> str:
    """The machine, the versions and the method of measurement."""
    place = table.describe_cpu(sweep.threads)
    if sweep.device == "cuda":
        place = (
            f"{torch.cuda.get_device_name()}, megatron_sparse {__version__}, "
            f"torch {torch.__version__}, CUDA {torch.version.cuda}, events"
        )
    return f"{place}, {sweep.warmup} + {sweep.iters} rounds, medians"


def _tasks(sweep: Sweep, size: int, density: float, dtype: str, form: str) -> Iterator[Task]:
    if form in RICE_FORMS:
        return rice_cases.make_tasks(size, density, dtype, form, peers=sweep.peers)
    if form not in BUCKET_FORMS:
        return hash_cases.make_tasks(size, density, dtype, form, torch.device(sweep.device))
    if sweep.device == "cpu":
        return cases.make_tasks(size, density, dtype, form, peers=sweep.peers)
    return cuda.make_tasks(size, density, dtype, form, torch.device(sweep.device))


def _rows(sweep: Sweep) -> Iterator[Row]:
    for size, dtype, density, form in product(
        sweep.sizes(), sweep.dtypes, sweep.densities, sweep.forms
    ):
        for task in _tasks(sweep, size, density, dtype, form):
            if task.op in sweep.ops:
                yield from _measure(task, Row.of(task, size, density, dtype, sweep.device), sweep)


def _measure(task: Task, own: Row, sweep: Sweep) -> list[Row]:
    """Fills in the times; a row for each peer."""
    if task.wrong:
        return [own]
    peers: dict[str, Action] = {**task.peers} if sweep.peers else {}
    actions: list[Action] = [task.run, table.copy_action(task.bytes_moved, sweep.device)]
    if task.stream is not None:
        actions.append(task.stream)
    first_peer = len(actions)
    time_in_turn = table.time_in_turn if sweep.device == "cpu" else cuda.time_in_turn
    times_us = time_in_turn([*actions, *peers.values()], sweep.warmup, sweep.iters)
    own.time_us, own.copy_us = median(times_us[0]), median(times_us[1])
    own.stream_us = None if task.stream is None else median(times_us[2])
    own.ratio = median(a / b for a, b in zip(times_us[0], times_us[1], strict=True))
    spent_us = zip(peers, times_us[first_peer:], strict=True)
    return [replace(own, peer=name, peer_us=median(us)) for name, us in spent_us] or [own]
