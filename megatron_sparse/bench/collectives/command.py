"""`bench collectives`: every scheme beside the backend's dense collective, as nccl-tests does it.

`#wrong` counts the elements, on small integers, that differ from the exact sum of what the ranks
selected; a row that has any is not timed. The ranks are processes of this machine over loopback,
hosts of the network test bed, those of an existing launch (torchrun, srun), or virtual.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_sparse.bench.collectives import virtual
from megatron_sparse.bench.collectives.case import cases_of
from megatron_sparse.bench.collectives.ranks import RankBench
from megatron_sparse.bench.collectives.report import (
    Rows,
    dicts,
    print_head,
    progress_of,
    run_anywhere,
    run_as_rank,
    virtual_place,
)
from megatron_sparse.bench.collectives.row import Row
from megatron_sparse.bench.collectives.sweep import Place, Sweep
from megatron_sparse.bench.table import print_table, torch_threads
from megatron_sparse.errors import ConfigError
from megatron_sparse.transport import Topology
from megatron_sparse.transport.netbed import netbed_mbit


def run(sweep: Sweep, place: Place, json_path: Path | None) -> int:
    """Measures a sweep; returns the exit code, 1 where a row is wrong. See `run_anywhere`."""
    sweep = replace(sweep, mbit=sweep.mbit or netbed_mbit())
    return run_anywhere(
        place,
        sweep.mbit,
        json_path,
        check=lambda ranks: cases_of(sweep, ranks),
        virtual=lambda topology: run_virtual(sweep, topology, json_path),
        rank=lambda: run_rank(sweep, json_path),
        command=["bench", "collectives", *sweep.arguments()],
    )


def run_virtual(sweep: Sweep, topology: Topology, json_path: Path | None) -> Rows:
    """Prints the table of a virtual cluster, labelled as a model.

    Raises:
        ConfigError: the JSON file cannot be written, the ranks do not fit into memory, or the
            engine is asked for.
        MegatronSparseError: a collective refuses a case.
    """
    if sweep.nccl_engine:
        raise ConfigError(
            "bench collectives --virtual --nccl-engine: virtual ranks have no NCCL",
            expected="one of them",
            got="both",
            remedy="leave out --nccl-engine",
        )
    with torch_threads(1):
        print_head(sweep, virtual_place(topology))
        found = virtual.rows(sweep, topology, progress_of)
        return dicts(print_table(Row.COLUMNS, found, json_path))


def run_rank(sweep: Sweep, json_path: Path | None) -> Rows:
    """One rank's part where RANK and WORLD_SIZE are set; see `run_as_rank`."""
    return run_as_rank(
        lambda store, rank, world_size: RankBench(sweep, store, rank, world_size),
        lambda bench, progress: bench.rows(progress),
        sweep,
        Row.COLUMNS,
        json_path,
    )
