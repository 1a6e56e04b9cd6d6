"""Calibration: it finds known links again, fits are right, the command writes a valid file."""

import time
import weakref
from functools import partial

import pytest
import torch
from torch.distributed import HashStore

from megatron_sparse.bench.calibrate.command import CalibrationRank
from megatron_sparse.bench.calibrate.threshold_sweep import (
    RingRuns,
    SweepCase,
    choose,
    sweep_thresholds,
)
from megatron_sparse.bench.exchange.options import CalibrationOptions
from megatron_sparse.calibration import codec
from megatron_sparse.calibration.codec import DENSITIES, codec_calls, fit_rate
from megatron_sparse.config.scheme import RING_DENSITIES
from megatron_sparse.errors import ConfigError
from megatron_sparse.planner.link_timing import LinkSweep, fit_link, measure_links
from megatron_sparse.pricing.cluster import ClusterModel, CodecOp
from megatron_sparse.simulate.pricing import ChargingTimer, memory_bound
from megatron_sparse.transport import Link, Topology, VirtualCluster
from tests.commands import run

SWEEP = LinkSweep((8, 1024, 2**16, 2**18), repeats=3, rounds=4)
INTRA, INTER = Link(5e-6, 1e-11), Link(3e-5, 3.2e-10)


def measured(topology: Topology):
    """The result of every rank of a virtual cluster; all are equal."""
    cluster = VirtualCluster(topology.world_size, topology)

    def start(transport):
        clock = partial(cluster.clock_s.__getitem__, transport.rank)
        return measure_links(transport, SWEEP, clock)

    first, *others = cluster.run(start)
    assert all(found == first for found in others)
    return first


def about(link: Link):
    """5 %: the barrier leaves ranks up to a small message's time apart, once in four rounds."""
    return Link(
        pytest.approx(link.alpha_s, rel=0.05),  # type: ignore[arg-type]
        pytest.approx(link.beta_s, rel=0.05),  # type: ignore[arg-type]
    )


class TestLinks:
    """A virtual cluster's links are known, so measurements can be compared with them."""

    @pytest.mark.parametrize("nic", ["rank", "node"])
    @pytest.mark.parametrize("node_sizes", [(2, 2), (3, 3, 3), (2, 1)])
    def test_two_levels(self, node_sizes, nic):
        found = measured(Topology(node_sizes, INTRA, INTER, nic))
        assert found.nodes == node_sizes
        assert found.intra == about(INTRA)
        assert found.inter == about(INTER)
        assert found.dense == about(INTER)
        # With one rank on the smallest node the two levels cannot be distinguished.
        assert found.nic == (nic if min(node_sizes) > 1 else "rank")

    @pytest.mark.parametrize(("sizes", "link"), [((3,), INTRA), ((1, 1, 1), INTER)])
    def test_one_level(self, sizes, link):
        found = measured(Topology(sizes, INTRA, INTER))
        assert found.intra == found.inter == about(link)
        assert found.dense == about(link)

    def test_noise_makes_no_link_free(self):
        """Times that fall with the size: the largest message's time counts as its bytes'."""
        found = fit_link([8, 4096, 8192], [3e-6, 4e-6, 2.048e-6])
        assert found.beta_s == pytest.approx(2.5e-10)
        assert found.alpha_s == pytest.approx(3e-6, rel=1e-3)
        assert fit_link([1024, 4096, 8192], [0.0, 4e-6, 8e-6]).alpha_s == 0.0

    def test_a_burst_that_passes_unlimited_does_not_change_beta(self):
        """As the test bed's: the first 4000 bytes take no time."""
        sizes = [8, 1024, 2**13, 2**14, 2**16]
        found = fit_link(sizes, [1e-3 + max(size - 4000, 0) * 1e-8 for size in sizes])
        assert found.beta_s == pytest.approx(1e-8)
        assert found.alpha_s == pytest.approx(1e-3, rel=0.02)


class TestCodec:
    """Calls and their rates."""

    def test_a_call_that_was_timed_keeps_no_vectors(self, monkeypatch):
        """The largest vectors of all calls together take 3 GiB on each rank."""
        made, alive, make = [], [], codec.sparse_vector

        def counted(*arguments):
            alive.append(sum(vector() is not None for vector in made))
            vector = make(*arguments)
            made.append(weakref.ref(vector))
            return vector

        monkeypatch.setattr(codec, "sparse_vector", counted)
        sweep = codec.CodecSizes((64, 256), windows=1, window_s=1e-9)
        cluster = VirtualCluster(1, Topology((1,), INTRA, INTER))
        cluster.run(lambda transport: codec.measure_codec(transport, sweep, time.perf_counter))
        assert max(alive) <= 3

    def test_every_call_runs_and_is_of_its_density(self):
        for numel in (1, 4097):
            found = set()
            for call in codec_calls(numel, (0.01, 1.0), torch.device("cpu")):
                call.run()
                call.run()
                found.add((call.op, call.format, call.density))
            # 2 plain ones, 4 of dense_q4; at each density 6 formats in 4 operations, and ZEN's 5.
            assert len(found) == 2 + 4 + 2 * (4 * 6 + 5)

    def test_fit(self):
        (call, *_) = codec_calls(16, (1.0,), torch.device("cpu"))
        rate = fit_rate(call, (1000, 100_000), (3e-6, 102e-6))
        assert rate.seconds_per_call == pytest.approx(2e-6)
        assert rate.seconds_per_element == pytest.approx(1e-9)
        assert (rate.op, rate.format, rate.density) == (CodecOp.ADD, "dense", 1.0)

    def test_fit_is_never_negative(self):
        (call, *_) = codec_calls(16, (1.0,), torch.device("cpu"))
        faster = fit_rate(call, (1000, 100_000), (1e-6, 200e-6))
        assert faster.seconds_per_call == 0.0
        assert 1e-9 < faster.seconds_per_element < 2e-9
        flat = fit_rate(call, (1000, 100_000), (2e-6, 1e-6))
        assert flat.seconds_per_element == 0.0
        assert 1e-6 < flat.seconds_per_call < 2e-6


def swept(topology: Topology, seconds_a_byte: float, case: SweepCase, format: str = "pici"):
    """The thresholds that are best on a virtual cluster."""
    cluster = VirtualCluster(topology.world_size, topology)

    def start(transport):
        timer = ChargingTimer(transport, memory_bound(seconds_a_byte))
        clock = partial(cluster.clock_s.__getitem__, transport.rank)
        return sweep_thresholds(format, RingRuns(transport, case, clock, timer))

    outcomes = cluster.run(start)
    assert all(found == outcomes[0] for found in outcomes)
    return outcomes[0]


class TestSweep:
    """Cases in which the best thresholds are known."""

    CASE = SweepCase(numel=3 * 2**11, densities=(0.1,), repeats=1, step=0.5)

    def test_a_slow_network_and_a_free_codec_stay_sparse(self):
        """The densest sum that crosses a link, 1 - 0.9^3 = 0.27, is smaller as COO."""
        link = Link(0.0, 1e-6)
        (intra, inter, gather), points = swept(Topology((2, 2), link, link), 0.0, self.CASE, "coo")
        assert min(intra, inter, gather) == 0.5
        assert {point.threshold for point in points} == {"intra", "inter", "gather"}
        assert sum(point.best for point in points) == 3

    def test_a_free_network_and_a_slow_codec_go_dense_at_once(self):
        """A dense sum is added in 12 bytes an element; a sparse one is encoded (4 and more), and
        added in a sector each way for nearly one element in five.
        """
        link = Link(0.0, 1e-15)
        (intra, inter, _), points = swept(Topology((1, 1, 1), link, link), 1e-6, self.CASE)
        assert inter == 0.0
        assert intra == RING_DENSITIES["pici"][0], "there is no such link"
        assert {point.threshold for point in points} == {"inter", "gather"}

    def test_a_tie_keeps_the_old_threshold(self):
        assert choose([0.0, 0.5, 1.0], [1.0, 1.0, 1.0], before=0.6) == 0.5
        assert choose([0.0, 0.5, 1.0], [1.0, 2.0, 2.0], before=0.6) == 0.0


class TestCommand:
    """The whole command."""

    @pytest.mark.timeout(420)  # Ten seconds on an idle machine.
    def test_two_ranks(self, tmp_path, capfd):
        """The planner reads the file; a second run refuses to overwrite it; a sweep extends it."""
        path = tmp_path / "lab.yaml"
        quick = f"calibrate --output={path} --quick --ranks=2"
        assert run(quick) == 0
        printed = capfd.readouterr().out
        cluster = ClusterModel.load(path)
        assert cluster.nodes == (2,)
        assert cluster.device == "cpu"
        assert cluster.fingerprint["transport"] == "gloo"
        assert cluster.fingerprint["hosts"] == "one"
        # Loopback: a microsecond a message, and less than 1 TB/s; a busy machine is much slower.
        for link in (cluster.intra, cluster.dense):
            assert 1e-6 < link.alpha_s < 1
            assert 1e-12 < link.beta_s < 1e-5
        assert {rate.density for rate in cluster.codec} == set(DENSITIES)
        assert "decode_add" in printed
        assert run(quick, "--sweep") == 0
        assert "inter: these ranks have no such link" in capfd.readouterr().out
        with_densities = ClusterModel.load(path)
        assert set(with_densities.ring_densities) == {"coo", "pici"}
        assert with_densities.codec == cluster.codec
        first, *others = path.read_text().splitlines()
        assert first.startswith("# megatron-sparse calibrate --ranks=2")
        assert sum("thresholds: megatron-sparse calibrate" in line for line in others) == 1
        other = path.read_text().replace("transport: gloo", "transport: nccl")
        path.write_text(other)
        request = CalibrationOptions(out=path, sweep=True)
        refused = pytest.raises(ConfigError, match="its transport is not this one's")
        with CalibrationRank(request, HashStore(), 0, 1) as rank, refused:
            rank.run()
        assert path.read_text() == other
