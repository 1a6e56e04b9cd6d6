"""`bench gather`: the all-gather of updated parameters, raw and exact, in turn.

The parameters are synthetic: normal weights and a step of Adam. First every rank holds the bits
before the step; then each owner writes its shard as the step leaves it, all ranks gather, and their
bits are compared. Every round the step goes back or forth. The ranks are processes of this machine
over loopback, hosts of the network test bed, those of a launch, or virtual (a model).
"""

from __future__ import annotations

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
from megatron_sparse.bench.collectives.sweep import NodePlace
from megatron_sparse.bench.gather import virtual
from megatron_sparse.bench.gather.case import GatherRow
from megatron_sparse.bench.gather.ranks import GatherBench
from megatron_sparse.bench.gather.sweep import GatherSweep
from megatron_sparse.bench.options import at_least, check_arguments
from megatron_sparse.bench.table import print_table, torch_threads
from megatron_sparse.transport import Topology
from megatron_sparse.transport.netbed import netbed_mbit


def run(sweep: GatherSweep, place: NodePlace, json_path: Path | None) -> int:
    """Measures a sweep; returns the exit code, 1 where bits are wrong. See `run_anywhere`."""
    sweep = replace(sweep, mbit=sweep.mbit or netbed_mbit())
    return run_anywhere(
        place,
        sweep.mbit,
        json_path,
        check=lambda ranks: check_arguments("bench gather", [at_least("ranks", ranks, 2)]),
        virtual=lambda topology: run_virtual(sweep, topology, json_path),
        rank=lambda: run_rank(sweep, json_path),
        command=["bench", "gather", *sweep.arguments()],
    )


def run_virtual(sweep: GatherSweep, topology: Topology, json_path: Path | None) -> Rows:
    """Prints the table of a virtual cluster, labelled as a model.

    Raises:
        ConfigError: the JSON file cannot be written.
    """
    with torch_threads(1):
        print_head(sweep, virtual_place(topology))
        found = virtual.rows(sweep, topology, progress_of)
        return dicts(print_table(GatherRow.COLUMNS, found, json_path))


def run_rank(sweep: GatherSweep, json_path: Path | None) -> Rows:
    """One rank's part where RANK and WORLD_SIZE are set; see `run_as_rank`."""
    return run_as_rank(
        lambda store, rank, world_size: GatherBench(sweep, store, rank, world_size),
        lambda ranks, progress: ranks.rows(progress),
        sweep,
        GatherRow.COLUMNS,
        json_path,
    )
