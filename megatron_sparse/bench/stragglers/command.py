"""`bench stragglers`: what is left to do when the last rank arrives, scheme by scheme.

One rank is late by as much as asked for. `#wrong` counts, first, what `bench collectives` counts;
then each row is the time from the last rank's arrival to the last rank's end, beside the best dense
and the best sparse scheme that know of no straggler, in the same rounds. The ranks are processes of
this machine over loopback, hosts of the network test bed, those of a launch on this machine, or
virtual (a model).
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_sparse.bench.collectives.report import (
    Rows,
    print_head,
    print_rows,
    run_as_rank,
    show_progress,
    virtual_place,
)
from megatron_sparse.bench.stragglers import figure as straggler_figure
from megatron_sparse.bench.stragglers import virtual
from megatron_sparse.bench.stragglers.ranks import StragglerBench
from megatron_sparse.bench.stragglers.row import HEADER
from megatron_sparse.bench.stragglers.sweep import StragglerSweep
from megatron_sparse.bench.table import torch_threads
from megatron_sparse.transport import Topology


def run_virtual(
    bench: StragglerSweep, topology: Topology, json_path: Path | None, figure: Path | None
) -> Rows:
    """Prints the table of a virtual cluster, labelled as a model.

    Args:
        bench: what to measure.
        topology: the cluster.
        json_path: written anew after each row.
        figure: folder to draw the rows in.

    Raises:
        ConfigError: the JSON file cannot be written, or the ranks do not fit into memory.
        MegatronSparseError: a collective refuses a case.
    """
    with torch_threads(1):
        print_head(bench, virtual_place(topology), HEADER)
        rows = print_rows(virtual.rows(bench, topology, show_progress), json_path)
    _draw(rows, figure)
    return rows


def run_rank(bench: StragglerSweep, json_path: Path | None, figure: Path | None) -> Rows:
    """One rank's part where RANK and WORLD_SIZE are set; see `run_as_rank`. Rank 0 draws."""
    rows = run_as_rank(
        lambda store, rank, world_size: StragglerBench(bench, store, rank, world_size),
        lambda ranks, progress: ranks.straggler_rows(progress),
        bench,
        HEADER,
        json_path,
    )
    if os.environ["RANK"] == "0":
        _draw(rows, figure)
    return rows


def _draw(rows: Rows, folder: Path | None) -> None:
    if folder is not None:
        for path in straggler_figure.draw(rows, folder):
            print(path)
