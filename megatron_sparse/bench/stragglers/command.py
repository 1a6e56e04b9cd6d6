"""`bench stragglers`: the time that each scheme takes after the last rank arrives.

One rank is late by the requested delay. First `#wrong` is counted as in `bench collectives`; then
each row is the time from the last rank's arrival to the last rank's end, beside the best dense and
the best sparse scheme that do not use the straggler, in the same rounds. The ranks are processes of
this machine over loopback, hosts of the network test bed, those of a launch on this machine, or
virtual (a model).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from megatron_sparse.bench.collectives.report import (
    Rows,
    dicts,
    print_head,
    progress_of,
    run_anywhere,
    run_as_rank,
    virtual_place,
)
from megatron_sparse.bench.stragglers import figure as straggler_figure
from megatron_sparse.bench.stragglers import virtual
from megatron_sparse.bench.stragglers.groups import groups_of
from megatron_sparse.bench.stragglers.ranks import StragglerBench
from megatron_sparse.bench.stragglers.row import StragglerRow
from megatron_sparse.bench.stragglers.sweep import LinkPlace, StragglerSweep
from megatron_sparse.bench.table import print_table, torch_threads
from megatron_sparse.transport import Topology
from megatron_sparse.transport.netbed import netbed_mbit


def run(
    bench: StragglerSweep, place: LinkPlace, json_path: Path | None, figure: Path | None
) -> int:
    """Measures a sweep; returns the exit code, 1 where a row is wrong. See `run_anywhere`."""
    bench = replace(bench, mbit=bench.mbit or netbed_mbit())
    drawn = [] if figure is None else [f"--figure={figure}"]

    def check(ranks: int) -> None:
        bench.late_rank(ranks)
        groups_of(bench, ranks)

    return run_anywhere(
        place,
        bench.mbit,
        json_path,
        check=check,
        virtual=lambda topology: run_virtual(bench, topology, json_path, figure),
        rank=lambda: run_rank(bench, json_path, figure),
        command=["bench", "stragglers", *bench.arguments(), *drawn],
    )


def run_virtual(
    bench: StragglerSweep, topology: Topology, json_path: Path | None, figure: Path | None
) -> Rows:
    """Prints the table of a virtual cluster, labelled as a model.

    Args:
        bench: what to measure.
        topology: the cluster.
        json_path: gets a line after each row; None writes none.
        figure: folder to draw the rows in.

    Raises:
        ConfigError: the JSON file cannot be written, or the ranks do not fit into memory.
        MegatronSparseError: a collective refuses a case.
    """
    with torch_threads(1):
        print_head(bench, virtual_place(topology))
        found = virtual.rows(bench, topology, progress_of)
        rows = dicts(print_table(StragglerRow.COLUMNS, found, json_path))
    _draw(rows, figure)
    return rows


def run_rank(bench: StragglerSweep, json_path: Path | None, figure: Path | None) -> Rows:
    """One rank's part where RANK and WORLD_SIZE are set; see `run_as_rank`. Rank 0 draws."""
    rows = run_as_rank(
        lambda store, rank, world_size: StragglerBench(bench, store, rank, world_size),
        lambda ranks, progress: ranks.straggler_rows(progress),
        bench,
        StragglerRow.COLUMNS,
        json_path,
    )
    if os.environ["RANK"] == "0":
        _draw(rows, figure)
    return rows


def _draw(rows: Rows, folder: Path | None) -> None:
    if folder is not None:
        for path in straggler_figure.draw(rows, folder):
            print(path)
