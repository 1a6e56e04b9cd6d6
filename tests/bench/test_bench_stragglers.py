"""`bench stragglers`: measured times, compared rows, pictures and refusals."""

from __future__ import annotations

import csv
import dataclasses

import pytest
import torch

from megatron_sparse.bench.exchange.case import BucketCase
from megatron_sparse.bench.exchange.options import STRAGGLER_SCHEMES, StragglerSweep
from megatron_sparse.bench.exchange.straggler_figure import draw
from megatron_sparse.bench.exchange.stragglers import (
    AUTO_FACTOR,
    RULE,
    StragglerBench,
    StragglerRow,
    compare,
    modelled_us,
)
from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.errors import ConfigError
from megatron_sparse.straggler import critical_delay_s
from megatron_sparse.transport import Link, Topology
from tests.bench import running
from tests.bench.running import add_one, break_scheme, read_rows

DEFAULT_SCHEMES = STRAGGLER_SCHEMES.split(",")
LINK = Link(1e-5, 8e-9)
DENSE = ("dense", "dense_ring", "dense_rhd", "dense_allpairs", "dense_broadcast")


def run_virtual(n, delays_ms, path=None, figure=None, **changed):
    fields = {"min_bytes": 2**18, "max_bytes": 2**18, "densities": [0.02], "delays_ms": delays_ms}
    sweep = StragglerSweep(**fields | changed)
    rows = running.run_virtual(StragglerBench, sweep, Topology((n,), LINK, LINK), path, figure)
    return {(row["scheme"], round(row["delay_us"])): row for row in rows}, rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Of eight virtual ranks, without a delay and with an automatic one."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    found, rows = run_virtual(8, [0.0, None], path)
    assert read_rows(path) == rows
    return found


class TestVirtual:
    """All ranks in one process, on a modelled network."""

    def late_us(self, rows):
        return max(delay for _, delay in rows)

    def test_every_row_is_right_and_labelled_as_a_model(self, rows):
        assert {name for name, _ in rows} == {*DEFAULT_SCHEMES, RULE}
        for row in rows.values():
            assert (row["wrong"], row["modelled"], row["straggler"]) == (0, True, 7)
            assert row["total_us"] == pytest.approx(row["time_us"] + row["delay_us"])

    def test_an_automatic_delay_is_as_many_reduce_scatters(self, rows):
        scatter_s = 7 * (LINK.alpha_s + 2**18 / 8 * LINK.beta_s)
        # The delay is rounded to whole microseconds here.
        assert self.late_us(rows) == pytest.approx(AUTO_FACTOR * scatter_s * 1e6, abs=1)

    def test_dense_rows_are_the_alpha_beta_model(self, rows):
        for name in (*DENSE[1:], "straggler"):
            for delay in (0, self.late_us(rows)):
                row = rows[name, delay]
                # Chunks of 2^16 elements / 7 are cut at multiples of 32 of them: 0.4 % at most.
                assert row["time_us"] == pytest.approx(row["model_us"], rel=5e-3), (name, delay)

    def test_the_straggler_is_waited_for_less(self, rows):
        late = self.late_us(rows)
        aware, worst = rows["straggler", late], rows["straggler", 0]
        assert aware["best_dense"] in DENSE
        best_us = min(rows[name, late]["time_us"] for name in DENSE)
        assert aware["best_dense_us"] == best_us
        assert aware["dense_speedup"] == pytest.approx(best_us / aware["time_us"])
        # 14 eighths of a buffer against 9 sevenths: 1.36; all-pairs has 2 rounds for 9.
        assert 1.3 < aware["dense_speedup"] < 1.36
        assert worst["dense_speedup"] < 1
        assert rows["straggler_direct", late]["time_us"] < rows["straggler_direct", 0]["time_us"]
        # Other schemes take as long with a delay, except that sizes are exchanged a moment earlier.
        for name in ("dense_ring", "direct"):
            after_us = [rows[name, delay]["time_us"] for delay in (0, late)]
            assert after_us[0] == pytest.approx(after_us[1], rel=2e-3)

    def test_sparse_rows_are_compared_with_sparse_ones(self, rows):
        for delay in (0, self.late_us(rows)):
            row = rows["straggler_direct", delay]
            plain = {name: rows[name, delay]["time_us"] for name in ("agsparse", "direct")}
            assert row["best_sparse"] == min(plain, key=lambda name: plain[name])
            assert row["sparse_speedup"] == pytest.approx(min(plain.values()) / row["time_us"])
            assert rows["straggler", delay]["sparse_speedup"] is None

    def test_the_rule_skips_the_straggler_if_that_is_faster(self, rows):
        late = self.late_us(rows)
        assert rows[RULE, 0]["carried_by"] == "dense"
        assert rows[RULE, late]["carried_by"] == "straggler"
        assert rows[RULE, late]["time_us"] == rows["straggler", late]["time_us"]
        # Well below the critical delay and well above it: the rule knows better baselines too.
        critical_ms = critical_delay_s(8, 9, 2**18, LINK) * 1e3
        for factor, taken in ((0.5, "dense"), (3.0, "straggler")):
            found, _ = run_virtual(8, [factor * critical_ms], schemes=["dense"])
            (row,) = [row for (name, _), row in found.items() if name == RULE]
            assert row["carried_by"] == taken, factor

    def test_any_rank_may_be_late_and_a_reduce_scatter_is_right(self):
        schemes = ["dense", "straggler", "direct", "straggler_direct"]
        found, rows = run_virtual(
            3, [0.5], straggler=1, rule=False, schemes=schemes, ops=["reduce_scatter"]
        )
        assert [row["scheme"] for row in rows] == schemes
        for row in rows:
            assert (row["wrong"], row["straggler"], row["op"]) == (0, 1, "reduce_scatter")
        assert found["straggler", 500]["model_us"] is None

    def test_a_wrong_sum_is_counted_and_not_timed(self, monkeypatch):
        break_scheme(monkeypatch, "straggler", add_one)
        found, _ = run_virtual(4, [0.0], schemes=["dense", "straggler"], rule=False)
        row = found["straggler", 0]
        assert row["wrong"] == 2 * 4  # an element a step on each rank
        assert row["time_us"] is None
        assert found["dense", 0]["best_dense"] == "dense"
        size = ["--min-bytes=16K", "--max-bytes=16K", "--delay-ms=0", "--no-rule"]
        code = running.run_cli("stragglers", "--virtual", "--ranks=2", "--scheme=straggler", *size)
        assert code == 1


class TestRow:
    """From readings of the clock to a row."""

    CASE = BucketCase(CollectiveOp.ALL_REDUCE, "straggler", "fp32", 1.0, 1000)

    def row(self, scheme="straggler", delay_s=0.5):
        case = dataclasses.replace(self.CASE, scheme=scheme)
        late = {"straggler": 2, "delay_us": delay_s * 1e6, "alpha_us": LINK.alpha_s * 1e6}
        return StragglerRow.of(case, scheme, 3, 0, **late)

    def test_time_counts_from_the_last_arrival_to_the_last_end(self):
        rounds = torch.tensor(
            [
                [[10.0, 11.5, 100, 1000], [20.0, 21.6, 100, 1000], [30.0, 31.0, 100, 1000]],
                [[10.1, 11.2, 300, 1000], [20.0, 21.2, 300, 1000], [30.0, 31.8, 300, 1000]],
                [[10.5, 11.4, 200, 1000], [20.5, 21.1, 200, 1000], [30.4, 31.1, 200, 1000]],
            ],
            dtype=torch.float64,
        )
        row = self.row().measured(rounds, LINK)
        assert row.time_us == pytest.approx(1.1e6)  # of 1.0, 1.1, 1.4
        assert row.total_us == pytest.approx(1.6e6)  # of 1.5, 1.6, 1.8
        assert row.late_us == pytest.approx(0.4e6)  # of 0.4, 0.5, 0.4
        assert row.wire_bytes == 300
        assert row.sent_density == 1.0

    def test_the_model_hides_what_the_delay_covers(self):
        # Three ranks: 1 early round of half a buffer, then 3 rounds of half a buffer.
        early_us = (LINK.alpha_s + 2000 * LINK.beta_s) * 1e6
        for delay_us, left in ((0.0, 1.0), (early_us / 4, 0.75), (2 * early_us, 0.0)):
            row = self.row(delay_s=delay_us * 1e-6)
            assert modelled_us(row, LINK) == pytest.approx((3 + left) * early_us)
        assert modelled_us(self.row("direct"), LINK) is None
        narrow = dataclasses.replace(self.row(), dtype="bf16")
        assert modelled_us(narrow, LINK) is None

    def test_baselines_are_the_schemes_without_a_straggler(self):
        names = ["dense", "dense_ring", "straggler", "direct", "straggler_direct"]
        times = [30.0, 20.0, 10.0, 8.0, 4.0]
        rows = []
        for name, time_us in zip(names, times, strict=True):
            density = 0.01 if SCHEMES[name].takes == "sparse" else 1.0
            rows.append(dataclasses.replace(self.row(name), time_us=time_us, density=density))
        rows.append(dataclasses.replace(self.row("straggler"), scheme=RULE, time_us=10.0))
        compare(rows)
        assert [row.dense_speedup for row in rows] == [2 / 3, 1, 2, 2.5, 5, 2]
        assert [row.best_dense for row in rows] == ["dense_ring"] * 6
        assert [row.sparse_speedup for row in rows] == [None, None, None, 1, 2, None]


def test_the_figure_shows_every_row_where_it_belongs(tmp_path):
    _, rows = run_virtual(
        3, [0.0, None], figure=tmp_path, schemes=["dense_ring", "straggler"], max_bytes=2**20
    )
    assert (tmp_path / "stragglar-figure-5.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "stragglar-figure-5.csv").open() as file:
        drawn = list(csv.DictReader(file))
    panels = {row["panel"] for row in drawn}
    assert panels == {"longest delay", "shortest delay", "delays"}
    # Two sizes of three series twice, and the larger size again.
    assert len(drawn) == 2 * 2 * 3 + 2 * 3
    sizes = {float(row["size_mib"]) for row in drawn if row["panel"] == "delays"}
    # A row is a multiple of three elements, and six digits of its size are written.
    assert all(size == pytest.approx(1.0, abs=2e-5) for size in sizes)
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw([rows[0] | {"time_us": None}], tmp_path)


def test_ranks_over_loopback(tmp_path):
    path = tmp_path / "rows.jsonl"
    options = ["--min-bytes=64K", "--max-bytes=64K", "--density=0.05", "--warmup=1", "--iters=3"]
    options += ["--scheme=dense,dense_ring,straggler,direct,straggler_direct", "--straggler=0"]
    options += ["--delay-ms=0,60", "--mbit=10000", f"--json={path}"]
    assert running.run_loopback(3, "stragglers", *options) == 0
    rows = read_rows(path)
    schemes = ["dense", "dense_ring", "straggler", "direct", "straggler_direct", RULE]
    assert [row["scheme"] for row in rows] == 2 * schemes
    for row in rows:
        assert (row["wrong"], row["modelled"], row["transport"]) == (0, False, "gloo")
        assert row["straggler"] == 0
        assert 0 < row["time_us"] <= row["p99_us"]
        assert row["wire_bytes"] > 0
        assert row["alpha_us"] > 0
    for row in rows[len(schemes) :]:
        # A rank that sleeps wakes no earlier; how much later depends on the machine.
        assert row["late_us"] > 40e3
        assert row["total_us"] > row["time_us"] + 40e3
    assert {row["carried_by"] for row in rows if row["scheme"] == RULE} <= {"dense", "straggler"}


def test_ranks_of_several_machines_are_refused():
    ranks = StragglerBench.__new__(StragglerBench)
    ranks.rank = 0
    ranks._gather = lambda own: torch.stack([own, own + 1])
    with pytest.raises(ConfigError, match="clocks cannot be compared"):
        ranks._check_clocks()
    ranks._gather = lambda own: torch.stack([own, own])
    ranks._check_clocks()
