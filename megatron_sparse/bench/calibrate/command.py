"""`megatron-sparse calibrate`: measures a cluster, and sweeps the adaptive ring's thresholds.

The ranks are started as for `bench collectives`: as processes of this machine, on hosts of the
network test bed, or by torchrun or srun. Rank 0 writes the cluster file: a `ClusterModel` in YAML.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import IO

from megatron_sparse.bench.calibrate.threshold_sweep import (
    THRESHOLDS,
    RingRuns,
    SweepCase,
    SweepPoint,
    sweep_thresholds,
    swept,
)
from megatron_sparse.bench.exchange.frame import Bench, as_rank, start_ranks
from megatron_sparse.bench.exchange.options import CalibrationOptions, CalibrationPlace
from megatron_sparse.bench.table import HostLoad
from megatron_sparse.calibration.launch_check import check_launch
from megatron_sparse.calibration.measure import FULL, QUICK, calibrate
from megatron_sparse.config.scheme import RING_DENSITIES
from megatron_sparse.errors import ConfigError
from megatron_sparse.planner.fingerprint import fingerprint
from megatron_sparse.planner.link_timing import complete, gather_rows, host_clock, one_rank
from megatron_sparse.pricing.cluster import ClusterModel, CodecRate
from megatron_sparse.recording import StageTimer
from megatron_sparse.run import launchers, local_ranks
from megatron_sparse.run.rows import MOST_FOREIGN_LOAD, print_table
from megatron_sparse.transport.netbed import netbed_mbit
from megatron_sparse.version import __version__

SHOWN_DENSITIES = (0.001, 0.01, 0.05, 0.1, 0.5, 1.0)
"""Densities in the printed table of the codec; the cluster file has more."""
SWEPT_DENSITIES = (0.05, 0.2, 0.4)
"""Fractions of non-zero elements in the gradients of a sweep."""
ADDED = "thresholds:"
"""Begins the file's comment line that says which command added the thresholds."""
NOISY = "noisy: other programs took {:.0%} of the machine in the meantime; measure again"

type Thresholds = tuple[float, float, float]


def load_for_sweep(request: CalibrationOptions) -> ClusterModel | None:
    """Loads an existing cluster file, to which `--sweep` shall add thresholds.

    Returns None where the cluster must be measured: there is no file, or `--force` replaces it.

    Raises:
        ConfigError: the file exists, without `--sweep` or `--force`; or it is no cluster file.
    """
    if not request.out.exists() or request.force:
        return None
    if not request.sweep:
        raise ConfigError(
            f"{request.out} exists already",
            expected="a new file",
            got=request.out,
            remedy="give another --output, or --force to measure it anew",
        )
    return ClusterModel.load(request.out)


def run(request: CalibrationOptions, place: CalibrationPlace) -> int:
    """Runs one rank if a launcher started this process, else all ranks; returns the exit code.

    Raises:
        ConfigError: flags contradict one another, there is one rank only, or the output file exists
            already.
        CommunicationError: a rank is missing, or has failed.
    """
    # srun does not set the variables RANK, WORLD_SIZE, ... that torch reads.
    os.environ.update(launchers.slurm_ranks(os.environ))
    started = local_ranks.started_ranks()
    flags = {"netbed": place.netbed, "mbit": place.mbit, "ranks": place.ranks}
    local_ranks.check_place(**flags, virtual=False, started=started)
    ranks = place.ranks or started or 2
    if ranks < 2:
        raise one_rank()
    if not started:
        load_for_sweep(request)  # refuses a bad output file before ranks start
        return start_ranks(["calibrate", *request.arguments()], place, ranks, place.mbit)
    if request.env is not None:
        from megatron_sparse.run.composition import compose

        # Set before the process group is made, whose backend reads them; one already set stays.
        for name, value in compose([f"cluster={request.env}"]).cluster.env.items():
            os.environ.setdefault(name, value)
    make = partial(CalibrationRank, request)
    as_rank(make, lambda made: made.run(), timeout_s=request.timeout_s)
    return 0


class CalibrationRank(Bench[CalibrationOptions]):
    """One rank of the calibration; `_cases` are the command's options."""

    def run(self) -> None:
        """Measures the cluster, sweeps the thresholds if requested; rank 0 prints and writes."""
        request = self._cases
        has_file, cluster = self._load_on_rank_0()
        if not has_file:
            effort = QUICK if request.quick else FULL
            for line in check_launch(self._transport, host_clock(self._device)):
                self._tell(line, sys.stdout)
            load = HostLoad()
            cluster = calibrate(
                self._transport, self._progress, effort, request.out.stem, self._tell
            )
            foreign = self._foreign_load(load)
            warning = NOISY.format(foreign) if foreign > MOST_FOREIGN_LOAD else ""
            if self.rank == 0:
                print_cluster(cluster)
                self._write(cluster, warning)
        if request.sweep:
            found, points = self._sweep()
            if self.rank == 0 and cluster is not None:  # rank 0 always has one
                self._save_thresholds(
                    replace(cluster, ring_densities=cluster.ring_densities | found)
                )
                self._report(points, found)

    def _load_on_rank_0(self) -> tuple[bool, ClusterModel | None]:
        """Returns whether there is a file for a sweep to add to, and (rank 0 only) its cluster."""
        found = load_for_sweep(self._cases) if self.rank == 0 else None
        if found is not None:
            found.check_fingerprint(fingerprint(self._transport))
        # All ranks must take the same branch of `run`, so rank 0 tells the others.
        rows = complete(gather_rows([float(found is not None)], self._transport))
        return bool(rows[0, 0]), found  # row 0 is rank 0's

    def _sweep(self) -> tuple[dict[str, Thresholds], list[SweepPoint]]:
        """Sweeps thresholds; returns the best by format, and the time of every value tried."""
        size_bytes, repeats, step = (1 << 20, 3, 0.2) if self._cases.quick else (16 << 20, 7, 0.1)
        n = self.world_size
        numel = size_bytes // 4 // n * n  # fp32, and equal shards
        case = SweepCase(numel, SWEPT_DENSITIES, repeats, step)
        runs = RingRuns(self._transport, case, host_clock(self._device), StageTimer(self._device))
        found, points = {}, []
        for form in RING_DENSITIES:
            self._tell(f"measuring: thresholds for {form}")
            found[form], tried = complete(sweep_thresholds(form, runs))
            points += tried
        return found, points

    def _write(self, cluster: ClusterModel, warning: str) -> None:
        """Writes the cluster file, with a comment that ends with `warning` if there is one."""
        comment = self._comment()
        cluster.save(self._cases.out, f"{comment}\n{warning}" if warning else comment)
        print(f"# written: {self._cases.out}")
        if warning:
            print(f"# {warning}")

    def _save_thresholds(self, cluster: ClusterModel) -> None:
        """Replaces the cluster file by `cluster`, which has the thresholds that were found.

        The file's comment stays, but its line about an earlier sweep is replaced (`ADDED`).
        """
        lines = self._cases.out.read_text("utf-8").splitlines()
        kept = [line.removeprefix("# ") for line in lines if line.startswith("#")]
        kept = [line for line in kept if not line.startswith(ADDED)]
        added = f"{ADDED} {self._comment().splitlines()[0]}"  # line 0 is the command
        cluster.save(self._cases.out, "\n".join([*kept, added]))
        print(f"# thresholds added: {self._cases.out}")

    def _report(self, points: Sequence[SweepPoint], found: Mapping[str, Thresholds]) -> None:
        """Prints the time of every value tried, and the best thresholds as configuration keys."""
        densities = ", ".join(f"{density:g}" for density in SWEPT_DENSITIES)
        print(f"# {self.world_size} ranks, {self.backend}, input densities {densities}")
        for threshold in sorted(set(THRESHOLDS) - set(swept(self._transport))):
            print(f"# {threshold}: these ranks have no such link, SpCCL's value stays")
        print_table(points, json_path=None)
        for form, thresholds in found.items():
            named = zip(THRESHOLDS, thresholds, strict=True)
            keys = " ".join(f"scheme.ring_{name}_density={value:g}" for name, value in named)
            print(f"scheme.format={form} {keys}")

    def _comment(self) -> str:
        mbit, where = netbed_mbit(), [f"--ranks={self.world_size}"]
        if mbit is not None:
            per_host = self.world_size // len(self.nodes)
            where += ["--netbed", f"--mbit={mbit}", f"--ranks-per-node={per_host}"]
        command = shlex.join(["megatron-sparse", "calibrate", *where, *self._cases.arguments()])
        return f"{command}\nmegatron_sparse {__version__}; docs/calibration.md explains it"

    def _tell(self, what: str, file: IO[str] | None = None) -> None:
        """Rank 0 says it, on standard error by default."""
        if self.rank == 0:
            print(f"# {what}", file=file or sys.stderr, flush=True)


def print_cluster(cluster: ClusterModel) -> None:
    """Prints the measured links, the host's cost and the codec's rates as tables."""
    print(
        f"cluster {cluster.name}: {cluster.device}, nodes of {', '.join(map(str, cluster.nodes))} "
        f"ranks, one network port for each {cluster.nic}; "
        + "; ".join(f"{key}: {value}" for key, value in cluster.fingerprint.items())
    )
    print(f"\n{'':<7}{'alpha (us)':>12}{'Gbit/s':>10}")
    for kind, link, what in (
        ("intra", cluster.intra, "within a node"),
        ("inter", cluster.inter, "between nodes"),
        ("dense", cluster.dense, "the backend's all-reduce, as a ring"),
    ):
        gbit = f"{8e-9 / link.beta_s:.3g}" if link.beta_s else "-"  # `beta_s`: seconds a byte
        print(f"{kind:<7}{link.alpha_s * 1e6:>12.1f}{gbit:>10}  {what}")
    print(
        f"\nhost: {cluster.host_s_per_message * 1e6:.1f} us a message, "
        f"{cluster.host_s_per_bucket * 1e6:.1f} us a bucket"
    )
    by_call: dict[tuple[str, str], list[CodecRate]] = {}
    for rate in cluster.codec:
        by_call.setdefault((rate.op, rate.format), []).append(rate)
    densities = [d for d in SHOWN_DENSITIES if d in {rate.density for rate in cluster.codec}]
    print("codec: ns an element, by density; the file has more densities\n")
    headers = "".join(f"{density:>9.1%}" for density in densities)
    print(f"{'codec':<18}{'format':<12}{'us a call':>10}{headers}")
    for (op, form), rates in sorted(by_call.items()):
        ns = {rate.density: f"{rate.seconds_per_element * 1e9:.3g}" for rate in rates}
        # The table has one column for the cost of a call: the largest over all densities.
        most_us = max(rate.seconds_per_call for rate in rates) * 1e6
        shown = "".join(f"{ns.get(density, ''):>9}" for density in densities)
        print(f"{op:<18}{form:<12}{most_us:>10.1f}{shown}".rstrip())
