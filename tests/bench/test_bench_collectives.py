"""`bench collectives`: wrong sums, timing, output and refusals."""

import dataclasses
import math
import subprocess
import sys
import time

import pytest
import torch
from torch.distributed import HashStore

from megatron_sparse.bench.exchange import collectives, frame
from megatron_sparse.bench.exchange.case import BucketCase, RankReducer, cases_of
from megatron_sparse.bench.exchange.collectives import CollectiveBench
from megatron_sparse.bench.exchange.options import CollectiveSweep
from megatron_sparse.bench.exchange.row import MEASURED, CollectiveRow, payload_rate
from megatron_sparse.bench.table import HostLoad, foreign_share
from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.errors import CommunicationError, ConfigError
from megatron_sparse.reduction.reducer import Groups
from megatron_sparse.run import local_ranks
from megatron_sparse.transport import Link, Topology, VirtualCluster
from tests.commands import refused, run
from tests.tracked import json_lines

KEYS = {
    *("op", "scheme", "dtype", "density", "count", "bytes", "world_size", "wire_bytes"),
    *("time_us", "dense_us", "encode_us", "network_us", "decode_us", "host_us"),
    *("transport", "wrong"),
}
"""The keys on which readers of the JSON lines may rely."""
LINK = Link(1e-5, 8e-10)


def sweep(**changed) -> CollectiveSweep:
    fields = {
        "min_bytes": 2**14,
        "max_bytes": 2**14,
        "densities": [0.05],
        "schemes": ["direct"],
        "warmup": 1,
        "iters": 2,
    }
    return CollectiveSweep(**fields | changed)


def run_virtual(n=4, path=None, **changed):
    topology = Topology.even(n, 2, LINK, LINK)
    rows = frame.run_virtual(CollectiveBench, sweep(**changed), topology, path)
    return [row.to_dict() for row in rows]


def break_scheme(monkeypatch, name: str, change) -> None:
    """Lets a scheme's sums be wrong: `change` mutates the bucket's gradient [N] after it."""

    def broken(exchange, *arguments):
        sent = yield from real(exchange, *arguments)
        change(exchange.bucket.grad_N)
        return sent

    real = SCHEMES[name].run
    monkeypatch.setitem(SCHEMES, name, dataclasses.replace(SCHEMES[name], run=broken))


class TestVirtual:
    """All ranks in one process, on a modelled network."""

    def test_every_scheme_is_right_and_labelled_as_a_model(self, tmp_path, capsys):
        path = tmp_path / "rows.jsonl"
        schemes = ["auto", *SCHEMES]
        rows = run_virtual(8, path, schemes=schemes, ops=["all_reduce", "reduce_scatter"])
        assert json_lines(path) == rows
        assert {row["scheme"] for row in rows} == set(schemes)
        for row in rows:
            assert set(row) >= KEYS
            assert row["wrong"] == 0
            assert row["transport"] == "virtual"
            assert row["time_us"] > 0
            assert row["dense_us"] > 0
            assert row["world_size"] == 8
        printed = capsys.readouterr().out
        assert "MODELLED" in printed
        assert "#wrong" in printed

    @pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter"])
    def test_levels_are_right_and_told_apart(self, op):
        rank, node = run_virtual(8, levels=["rank", "node"], ops=[op])
        assert (rank["level"], node["level"]) == ("rank", "node")
        assert rank["wrong"] == node["wrong"] == 0
        assert rank["inside_bytes"] == 0
        assert node["inside_bytes"] == 2**14 // 2 * (2 if op == "all_reduce" else 1)
        assert node["wire_bytes"] - node["inside_bytes"] < rank["wire_bytes"]
        assert node["sent_density"] == pytest.approx(0.05, rel=0.5)

    def test_the_clock_is_the_alpha_beta_model(self):
        """Dense all-pairs: 2 rounds, each of 3 messages of a quarter, one port for all of them."""
        (row,) = run_virtual(4, schemes=["dense_allpairs"])
        quarter = row["bytes"] / 4
        expected_s = 2 * (3 * LINK.beta_s * quarter + LINK.alpha_s)
        assert row["wire_bytes"] == 6 * quarter
        # The time includes a few small messages more, fingerprints for example.
        assert row["time_us"] == pytest.approx(expected_s * 1e6, rel=0.2)

    def test_time_counts_from_the_late_rank_on(self):
        """Once it has come, 14 eighths of a buffer are left of a ring, else 9 sevenths."""
        times_us = {}
        for delay_ms in (0.0, 5.0):
            names = ["dense_ring", "straggler", "direct", "straggler_direct"]
            size = {"min_bytes": 2**20, "max_bytes": 2**20, "delay_ms": delay_ms}
            for row in run_virtual(8, schemes=names, **size):
                assert (row["wrong"], row["delay_us"]) == (0, delay_ms * 1e3)
                times_us[row["scheme"], delay_ms] = row["time_us"]
        for name in ("dense_ring", "direct"):
            # Sizes are exchanged a moment earlier.
            assert times_us[name, 5.0] == pytest.approx(times_us[name, 0.0], rel=0.02)
        assert 1.36 < times_us["dense_ring", 5.0] / times_us["straggler", 5.0] < 1.4
        assert times_us["straggler", 0.0] > times_us["dense_ring", 0.0]
        assert times_us["straggler_direct", 5.0] < times_us["straggler_direct", 0.0]

    def test_a_wrong_sum_is_counted_and_not_timed(self, monkeypatch, capsys):
        break_scheme(monkeypatch, "direct", lambda grad_N: grad_N[3].add_(1))
        good, bad = run_virtual(4, schemes=["agsparse", "direct"])
        assert (good["wrong"], bad["wrong"]) == (0, 2 * 4)  # an element a step on each rank
        assert bad["time_us"] is None
        size = "--min-bytes=16K --max-bytes=16K --density=0.05"
        assert run("bench collectives --virtual --ranks=2 --scheme=direct", size) == 1
        assert "  4 " in capsys.readouterr().out.splitlines()[-1]

    @pytest.mark.parametrize("dtype", ["bf16", "fp16"])
    def test_narrow_dtypes_are_exact(self, dtype):
        for row in run_virtual(5, dtypes=[dtype], schemes=["dense", "direct", "agsparse"]):
            assert row["wrong"] == 0

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    @pytest.mark.parametrize("sum_bits", [None, 32, 4])
    def test_values_in_few_bits_are_right_and_fewer_bytes(self, dtype, sum_bits):
        names = ["dense", "direct", "sparse_ring", "dense_q", "zen", "hierarchical"]
        rows = run_virtual(
            4,
            schemes=names,
            value_bits=[32, 8, 2],
            sum_bits=sum_bits,
            dtypes=[dtype],
            ops=["all_reduce", "reduce_scatter"],
            min_bytes=2**16,
            max_bytes=2**16,
        )
        assert all(row["wrong"] == 0 for row in rows)
        wire = {(r["op"], r["scheme"], r["value_bits"]): r["wire_bytes"] for r in rows}
        for op in ("all_reduce", "reduce_scatter"):
            assert wire[op, "direct", None] > wire[op, "direct", 8] > wire[op, "direct", 2]
            # Those that have only whole values, or only some bits.
            assert {bits for _, name, bits in wire if name in ("dense", "zen")} == {None}
            assert {bits for _, name, bits in wire if name == "dense_q"} == {4, 8}
            assert wire[op, "dense_q", 4] < wire[op, "dense_q", 8]
        counted = [r["sum_bits"] for r in rows if r["scheme"] == "direct" and r["value_bits"] == 8]
        expected = {None: 8, 32: None, 4: 4}[sum_bits]
        assert counted == [expected, None], "a reduce-scatter gathers no sums"
        if sum_bits == 4:
            least = wire["all_reduce", "dense_q", 4]
            assert least < (0.2 if dtype == "fp32" else 0.4) * wire["all_reduce", "dense", None]

    def test_a_value_of_few_bits_that_is_off_by_a_level_is_counted(self, monkeypatch):
        def scale(grad_N):
            grad_N[3] *= 1 + 2**-8  # a unit of bf16's, as levels have them

        break_scheme(monkeypatch, "dense_q", scale)
        (row,) = run_virtual(4, schemes=["dense_q"], value_bits=[8])
        assert row["wrong"] == 2 * 4

    def test_what_does_not_fit_into_memory_is_refused(self, monkeypatch):
        monkeypatch.setattr(collectives, "free_memory_bytes", lambda: 2**20)
        with pytest.raises(ConfigError, match="memory"):
            run_virtual(64)


class TestInputs:
    """The data of the check and of the timed rounds."""

    def left(self, case: BucketCase, rank: int, values_N: torch.Tensor) -> torch.Tensor:
        """What a rank's selection leaves in its residual; both ranks have the same gradient."""

        def steps(transport):
            rank_reducer = RankReducer(case, sweep(), Groups(transport))
            bucket = case.bucket(values_N, 2)
            yield from rank_reducer.steps(dataclasses.replace(bucket, grad_N=values_N.clone()), 0)
            return rank_reducer.residual(bucket)

        return VirtualCluster(2).run(steps)[rank]

    @pytest.mark.parametrize("density", [0.01, 0.3, 1.0])
    def test_the_check_selects_about_what_the_case_says(self, density):
        """A check in which nothing is selected would find no scheme wrong."""
        case = BucketCase(CollectiveOp.ALL_REDUCE, "direct", "fp32", density, 2**16)
        residual_N = self.left(case, 0, case.small_integers(0, 2, 0))
        nnz = case.numel - int(residual_N.count_nonzero())
        # Peaks that are ties with the threshold are dropped: at most one value of five.
        assert 0.5 * density * case.numel < nnz <= 1.2 * density * case.numel

    def test_sums_stay_exact_for_as_many_ranks_as_are_allowed(self):
        case = BucketCase(CollectiveOp.ALL_REDUCE, "direct", "bf16", 1.0, 4096)
        most = 256 // (2 * 3)
        parts = [
            case.small_integers(rank, most, step).double()
            for rank in range(most)
            for step in range(2)
        ]
        assert sum(part.abs() for part in parts).max() <= 256
        with pytest.raises(ConfigError, match="at most 42 to count"):
            case.small_integers(0, most + 1, 0)

    def test_timed_values_keep_the_density_at_independent_positions(self):
        case = BucketCase(CollectiveOp.ALL_REDUCE, "direct", "fp32", 0.1, 2**16)
        kept = [self.left(case, rank, case.normal_values(rank)) == 0 for rank in range(2)]
        # The samples' relative error is 5 %, 7 % for the product; three of them are allowed.
        assert kept[0].double().mean() == pytest.approx(0.1, rel=0.15)
        assert (kept[0] & kept[1]).double().mean() == pytest.approx(0.01, rel=0.21)

    def test_dense_schemes_run_once_and_missing_forms_are_left_out(self):
        swept = sweep(
            schemes=["dense", "direct", "ssar_rd"],
            densities=[0.1, 0.2],
            ops=["all_reduce", "reduce_scatter"],
        )
        cases = cases_of(swept, 3)
        both = cases_of(sweep(schemes=["dense", "direct", "straggler"], levels=["rank", "node"]), 4)
        assert [(case.scheme, case.level) for case in both] == [
            ("dense", "rank"),
            ("direct", "rank"),
            ("direct", "node"),
            ("straggler", "rank"),
        ]
        names = [(case.op, case.scheme, case.density) for case in cases]
        assert names.count((CollectiveOp.ALL_REDUCE, "dense", 1.0)) == 1
        assert (CollectiveOp.ALL_REDUCE, "ssar_rd", 0.2) in names
        assert not [name for name in names if name[:2] == (CollectiveOp.REDUCE_SCATTER, "ssar_rd")]
        assert all(case.numel % 3 == 0 for case in cases)
        few = cases_of(sweep(schemes=["dense", "zen", "dense_q"], value_bits=[4, 3, 8]), 3)
        assert [(case.scheme, case.value_bits) for case in few] == [
            ("dense", None),
            ("dense_q", 4),
            ("dense_q", 8),
        ]


class TestFigures:
    """A row is computed from the ranks' measurements."""

    CASE = BucketCase(CollectiveOp.ALL_REDUCE, "agsparse", "fp32", 0.01, 1000)

    def measured(self, order: int = 1, **more: float) -> CollectiveRow:
        """Of two ranks, or in reverse order, and three rounds; rank 1 is slow in the last two."""

        def figures(total, network, wire):
            given = {"total": total, "network": network, "wire_bytes": wire, "host_cpu": total / 5}
            given |= {"threshold": 1, "prune": 2, "profile": 0, "encode": 3, "decode": 4}
            return [(given | {"inside_bytes": 0, "nnz": 10, "numel": 1000})[x] for x in MEASURED]

        rounds = [
            [figures(50, 20, 100), figures(40, 20, 100), figures(40, 20, 100)],
            [figures(45, 15, 200), figures(60, 30, 200), figures(90, 60, 200)],
        ]
        dense = [[90.0, 90.0, 90.0], [80.0, 120.0, 120.0]]
        row = CollectiveRow.of(self.CASE, "agsparse", 2, 0, transport="gloo", mbit=1000, **more)
        rounds, dense = (
            torch.tensor(each[::order], dtype=torch.float64) for each in (rounds, dense)
        )
        row.measured(rounds, dense, 1e6)
        return row

    def test_the_slowest_rank_of_each_round_counts(self):
        row = self.measured()
        assert (row.time_us, row.dense_us) == (60, 120)
        assert row.network_us == 30
        assert row.host_us == 20  # of 50 - 30, 60 - 40, 90 - 70
        assert row.host_cpu_us == 12  # of 10, 12, 18
        assert row.prune_us == 3
        assert row.speedup == pytest.approx(90 / 50)  # of 90/50, 120/60, 120/90
        assert row.wire_bytes == 200
        assert row.p99_us == pytest.approx(89.4)  # 1 % of the way from 90 to 60
        assert row.network_floor_us == pytest.approx(200)

    def test_a_rank_that_waits_for_the_late_one_waits_in_its_stages(self):
        row = self.measured(-1, delay_us=25.0)
        assert row.time_us == 60
        # Rank 1 was late; rank 0, the slowest in two rounds, waited: of 20, 20 + 25, 20 + 25.
        assert row.host_us == 45

    def test_the_late_rank_counts_from_its_arrival(self):
        start_s = time.monotonic()
        with CollectiveBench(sweep(delay_ms=100.0, warmup=0), HashStore(), 0, 1) as bench:
            (row,) = bench.rows()
        assert (row.wrong, row.delay_us) == (0, 100e3)
        assert 0 < row.time_us < 90e3
        # Two checked steps, and two rounds of scheme and dense collective.
        assert time.monotonic() - start_s > 6 * 0.1

    def test_the_payload_is_what_frames_leave_of_the_rate(self):
        assert payload_rate(1000) == pytest.approx(119.55e6, rel=1e-4)

    def test_noisy_rows_say_so(self):
        row = self.measured()
        assert "noisy" not in row.line()
        row.foreign_load = 0.37
        assert "noisy: 37%" in row.line()


class TestHostLoad:
    """Other programs' share of the machine."""

    def test_share(self):
        assert foreign_share(10, 6, 4) == pytest.approx(0.2)
        assert foreign_share(10, 3, 4) == 0
        assert foreign_share(10, 30, 4) == 1

    def test_a_busy_neighbour_is_seen(self):
        import psutil

        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            time.sleep(0.2)
            load = HostLoad()
            time.sleep(1.0)
            there_were, worked, own = load.spent()
        finally:
            busy.kill()
            busy.wait()
        # One core, less what other tests' processes take of it.
        assert foreign_share(there_were, worked, own) * (psutil.cpu_count() or 1) > 0.3
        assert own < 0.5


class TestLoopback:
    """Processes of this machine."""

    def test_rows_are_right_timed_and_written(self, tmp_path, capfd):
        schemes, ops = "dense,agsparse,direct,auto", "all_reduce,reduce_scatter"
        path = tmp_path / "rows.jsonl"
        size = "--min-bytes=64K --max-bytes=64K --density=0.05 --warmup=1 --iters=3"
        asked = f"--ranks=2 --scheme={schemes} --op={ops} --json={path}"
        assert run("bench collectives", asked, size) == 0
        assert capfd.readouterr().err == ""
        rows = json_lines(path)
        assert [(row["op"], row["scheme"]) for row in rows] == [
            (op, scheme) for op in ops.split(",") for scheme in schemes.split(",")
        ]
        for row in rows:
            assert set(row) >= KEYS
            assert (row["wrong"], row["transport"]) == (0, "gloo")
            for name in KEYS & {name for name in row if name.endswith("_us")}:
                assert math.isfinite(row[name]), name
            assert row["time_us"] > row["network_us"] > 0
            assert row["p99_us"] >= row["time_us"] >= row["host_us"] > 0
            assert row["network_floor_us"] > 0
            assert 0 <= row["foreign_load"] <= 1
            sparse = SCHEMES[row["carried_by"]].takes == "sparse"
            assert (row["prune_us"] > 0) == sparse
            assert (row["sent_density"] < 0.1) == sparse

    def test_the_first_failure_is_the_exit_code_and_ends_the_others(self, monkeypatch):
        monkeypatch.setattr(local_ranks, "GRACE_S", 0.2)
        # Without their end it would not return.
        code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(1e6)"
        assert local_ranks.run_loopback([sys.executable, "-c", code], 3) == 3

    def test_a_killed_rank_is_a_typed_error(self, monkeypatch):
        monkeypatch.setattr(local_ranks, "GRACE_S", 0.2)
        code = "import os, time\nif os.environ['RANK'] == '0': os.kill(os.getpid(), 9)"
        with pytest.raises(CommunicationError, match="SIGKILL"):
            local_ranks.run_loopback([sys.executable, "-c", code], 2)

    def test_the_first_rank_to_fail_says_so_and_the_others_are_silent(self, tmp_path, capfd):
        """Rank 0 finds the error; the other one waits for rank 0 until it is gone."""
        nowhere = f"--json={tmp_path / 'no' / 'rows.jsonl'}"
        size = ["--min-bytes=16K", "--max-bytes=16K", "--density=0.05", "--iters=1"]
        words = ["bench", "collectives", "--scheme=direct", *size, nowhere]
        code = local_ranks.run_loopback(local_ranks.command_line(words), 2)
        assert code == ConfigError.exit_code
        error = capfd.readouterr().err
        assert error.count("error:") == 1, error
        assert "Traceback" not in error

    def test_no_test_bed_outside_of_a_checkout(self, monkeypatch, tmp_path, capsys):
        monkeypatch.delenv("RANK", raising=False)
        monkeypatch.setattr(local_ranks, "NETBED", tmp_path / "netbed.sh")
        assert "checkout" in refused(capsys, "bench collectives --netbed --mbit=100")
