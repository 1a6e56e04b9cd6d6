"""`bench cost-models`: reference times, rows, verdict and refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_sparse.bench.cost_models import command, virtual_truth
from megatron_sparse.bench.cost_models.codec_prices import (
    Call,
    MemoryBoundPrices,
    TimedPrices,
    calls_of,
)
from megatron_sparse.bench.cost_models.command import (
    CostRow,
    CostSweep,
    measured_rows,
    simulated_numel,
)
from megatron_sparse.bench.cost_models.virtual_truth import Setting
from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.cli import main
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.pricing.cluster import CodecOp, find
from megatron_sparse.simulate import gradients
from megatron_sparse.sparsity.characteristics import profile_of

OPTIONS = SchemeConfig()
ROW = {
    "op": "all_reduce",
    "scheme": "auto",
    "carried_by": "direct",
    "dtype": "fp32",
    "density": 0.01,
    "count": 2**20,
    "world_size": 4,
    "modelled": False,
    "time_us": 1000.0,
    "sent_density": 0.01,
}


def sweep(**changed) -> CostSweep:
    fields = {
        "schemes": ["direct", "zen", "dense", "sparse_ring"],
        "kinds": ["uniform", "embedding"],
        "densities": [0.02],
        "world_sizes": [4],
        "clusters": ["ethernet_25gbit"],
        "full_numel": 2**22,
    }
    return CostSweep(**fields | changed)


def setting(prices=None, n=4, full_numel=2**20, **options) -> Setting:
    chosen = SchemeConfig(**options)
    return Setting.on(find("perlmutter"), n, prices, chosen, CollectiveOp.ALL_REDUCE, full_numel)


def given(n=4, numel=2**16):
    model = gradients.uniform(numel, 0.05)
    return [model.gradient(rank) for rank in range(n)]


def run_cli(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main.main(["bench", "cost-models", *arguments])
    return int(caught.value.code or 0)


class TestTruth:
    """The virtual runs that predictions are compared with."""

    def test_the_same_prices_give_the_same_times(self):
        prices = MemoryBoundPrices(1e11)
        times = [virtual_truth.run("direct", given(), setting(prices)) for _ in range(2)]
        assert times[0] == times[1]

    def test_local_work_costs_in_proportion_to_its_price(self):
        fast, slow = (
            virtual_truth.run("direct", given(), setting(MemoryBoundPrices(rate)))
            for rate in (1e11, 1e10)
        )
        assert slow.codec_s == pytest.approx(10 * fast.codec_s, rel=1e-9)
        assert fast.total_s < slow.total_s

    def test_a_small_bucket_stands_for_a_large_one(self):
        """Both have an exact share of it: a quarter, or all of it."""
        large = given(numel=2**18)
        small = [gradient[: 2**16] for gradient in large]
        where = setting(MemoryBoundPrices(1e11), full_numel=2**18)
        for scheme in ("agsparse", "direct", "omnireduce", "zen", "adaptive_ring"):
            a, b = (virtual_truth.run(scheme, rows, where).total_s for rows in (small, large))
            # 3,277 of 65,536 elements are not zero: their number in a quarter varies by 2 %. ZEN's
            # path has operations on words and offsets, whose small cost is not that of a share.
            assert a == pytest.approx(b, rel=0.10 if scheme == "zen" else 0.05), scheme

    def test_the_host_is_charged_for_each_message(self):
        free = replace(setting(), prices=None)
        hosted = replace(free, host_s_per_message=1.0, host_s_per_bucket=7.0)
        # Three rounds there and three back; two agreements of three messages each.
        assert virtual_truth.run("direct", given(), hosted).total_s == pytest.approx(
            7 + 6 + 6 + virtual_truth.run("direct", given(), free).total_s, abs=1e-3
        )

    def test_gradients_of_different_sizes_and_missing_forms_are_refused(self):
        with pytest.raises(ConfigError):
            virtual_truth.run("direct", [torch.ones(4096), torch.ones(8192)], setting(n=2))
        with pytest.raises(ConfigError):
            virtual_truth.run("zen", given(), replace(setting(), op=CollectiveOp.REDUCE_SCATTER))


class TestTimedPrices:
    """Prices of this machine's codec, by call."""

    def test_calls_are_recognised_by_their_operations(self):
        seen: list[Call] = []

        def keep(*operation):
            seen.extend(calls_of(*operation))
            return 0.0

        class Kept:
            def measure(self, scale):
                return keep

        numel, n = 2**14, 4
        virtual_truth.run("direct", given(n, numel), setting(Kept()))
        counts = {op: sum(call.op is op for call in seen) for op in CodecOp}
        # Each rank selects once; adds four shards, one freshly; encodes its sum; decodes four.
        assert counts[CodecOp.SELECT] == counts[CodecOp.ENCODE] == n
        assert counts[CodecOp.DECODE_ADD] == n * (n - 1)
        assert counts[CodecOp.DECODE] == n + n * n
        selected = next(call for call in seen if call.op is CodecOp.SELECT)
        assert (selected.format, selected.numel) == ("pici", numel)
        assert selected.density == pytest.approx(0.05, rel=0.01)
        seen.clear()
        virtual_truth.run("zen", given(n, numel), setting(Kept()))
        names = {(call.op, call.format) for call in seen}
        assert {
            (CodecOp.PARTITION, "pairs"),
            (CodecOp.DECODE_ADD, "pairs"),
            (CodecOp.ENCODE, "hash_bitmap"),
            (CodecOp.DECODE_ADD, "hash_bitmap"),
        } <= names

    def test_a_call_costs_what_was_timed_for_its_density_and_size(self):
        table = {(CodecOp.ADD, "dense"): np.array([[1.0, 3.0], [10.0, 30.0]])}
        prices = TimedPrices((100, 10_000), (0.01, 1.0), table)
        for numel, density, expected in (
            (100, 1.0, 300.0),
            (150, 0.1, 300.0),
            (20_000, 0.01, 200_000.0),
            (100, 1e-9, 100.0),
        ):
            assert prices.call_s(Call(CodecOp.ADD, "dense", numel, density)) == pytest.approx(
                expected
            )

    def test_timing_covers_every_call_of_the_schemes(self):
        prices = TimedPrices.timed(numels=(2**12,), densities=(0.02, 0.5), repeats=1)
        for scheme in ("agsparse", "omnireduce", "zen", "adaptive_ring", "hierarchical"):
            assert virtual_truth.run(scheme, given(), setting(prices)).codec_s > 0, scheme


@pytest.fixture(scope="module")
def rows() -> list[CostRow]:
    """Of a small sweep."""
    return list(sweep().rows())


class TestRows:
    """The table and its verdict."""

    def test_predictions_are_near_the_measured_times(self, rows):
        assert len(rows) == 8
        # What the full bench prints is below 10 % for each scheme's mean; these are 8 cases.
        assert all(abs(row.error) < 0.2 for row in rows), [row.line() for row in rows]

    def test_a_wrong_model_is_found_out(self, rows):
        wrong = [replace(row, predicted_us=2 * row.predicted_us) for row in rows]
        assert all(e.mean_error > 0.5 for e in command.errors_by_scheme(wrong))

    def test_errors_are_those_of_the_rows(self):
        def row(scheme: str, predicted_us: float) -> CostRow:
            shape = ("all_reduce", "uniform", 0.1, 4, "rank", "c", 10)
            return CostRow(scheme, *shape, predicted_us, 0, 0, 0, 100.0, True)

        found = command.errors_by_scheme([row("a", 110), row("b", 100), row("a", 70)])
        assert [(e.scheme, e.cases) for e in found] == [("a", 2), ("b", 1)]
        assert found[0].mean_error == pytest.approx(0.2)
        assert found[0].worst.predicted_us == 70

    def test_the_profile_of_a_small_bucket_keeps_lasting_skewness(self):
        """Random skewness disappears; that of a crowded beginning stays."""
        even = gradients.uniform(2**16, 0.01)
        crowded = gradients.skewed(2**16, 0.01)
        for model, low, high in ((even, 1.0, 1.15), (crowded, 20.0, 60.0)):
            profile = profile_of([model.gradient(rank) for rank in range(4)])
            found = virtual_truth.at_full_size(profile, 2**24)
            assert found.numel == 2**24
            assert low <= found.skewness[64] <= high
            assert found.skewness[64] <= profile.skewness[64]

    def test_shards_have_whole_tiles_and_something_in_them(self):
        for n, density in ((2, 0.5), (8, 0.01), (64, 0.01)):
            numel = simulated_numel(n, density, 2**24)
            assert numel % (4096 * n) == 0
            assert numel * density / n >= command.LEAST_NNZ


class TestCommand:
    """The command line."""

    def test_it_prints_the_mean_error_and_writes_rows(self, tmp_path, capsys):
        path = tmp_path / "rows.jsonl"
        arguments = ["--scheme=direct,dense", "--kind=uniform", "--density=0.02", "--ranks=2"]
        assert run_cli(*arguments, "--size=4M", f"--json={path}") == 0
        printed = capsys.readouterr().out
        assert "mean error of 6 predictions" in printed
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == 6
        assert all(row["modelled"] for row in rows)
        assert all(row["error"] == row["predicted_us"] / row["taken_us"] - 1 for row in rows)

    def test_measured_rows_are_priced_on_their_cluster(self, tmp_path, capsys):
        path = tmp_path / "measured.jsonl"
        left_out = [
            ROW | {"modelled": True},
            ROW | {"time_us": None},
            ROW | {"carried_by": "straggler"},
            ROW | {"level": "node"},
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in [ROW, *left_out]))
        (row,) = measured_rows(path, find("ethernet_25gbit"))
        assert (row.scheme, row.taken_us, row.modelled) == ("direct", 1000.0, False)
        assert run_cli(f"--measured={path}", "--cluster=ethernet_25gbit") == 0
        assert "4 rows are left out" in capsys.readouterr().out

    def test_measured_rows_of_few_bits_are_priced_in_few_bits(self, tmp_path):
        path, cluster = tmp_path / "measured.jsonl", find("ethernet_25gbit")
        bits = ({}, {"value_bits": 4}, {"value_bits": 4, "sum_bits": 4})
        path.write_text("".join(json.dumps(ROW | each) + "\n" for each in bits))
        whole, values, sums = (row.network_us for row in measured_rows(path, cluster))
        assert whole > values > sums

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--scheme=no_such"],
            ["--kind=no_such"],
            ["--ranks=1"],
            ["--ranks=x"],
            ["--density=2"],
            ["--cluster=no_such"],
            ["--size=16K"],
            ["--op=gather"],
            ["--measured=no_such.jsonl", "--cluster=perlmutter"],
        ],
    )
    def test_mistakes_are_one_error(self, arguments, capsys):
        assert run_cli(*arguments) == ConfigError.exit_code
        assert "expected:" in capsys.readouterr().err

    @pytest.mark.parametrize("text", ["", "no json\n", "[]\n", '{"op": "all_reduce"}\n'])
    def test_a_file_of_something_else_is_one_error(self, text, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_text(text)
        with pytest.raises(ConfigError, match="no measured collectives"):
            list(measured_rows(path, find("perlmutter")))
