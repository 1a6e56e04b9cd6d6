"""Raw or exact by price: the formula, the measurements, and the ranks' agreement on settings."""

import pytest
import torch

from megatron_sparse.config.parameters import ParametersConfig
from megatron_sparse.config.sparse import PlannerConfig, SparseConfig
from megatron_sparse.errors import CommunicationError
from megatron_sparse.parameters import price
from megatron_sparse.parameters.choice import GatherChooser
from megatron_sparse.parameters.gather import Way
from megatron_sparse.parameters.lossy import LossyWay
from megatron_sparse.parameters.price import (
    CoderSpeed,
    GatherLinks,
    Prices,
    gather_prices,
)
from megatron_sparse.planner.link_timing import complete
from megatron_sparse.transport import Link, Topology
from tests.parameters.gather_cases import Echo

SLOW, FAST = Link(50e-6, 1 / 6e6), Link(5e-6, 1 / 20e9)
SPEED = CoderSpeed(2e-9, 2e-9)
BUCKET = torch.zeros(2**20, dtype=torch.bfloat16)


def measured_as(result):
    """A measurement, whatever its arguments are, that posts nothing and returns `result`."""

    def measured(*_):
        yield from ()
        return result

    return measured


def timed_as(link):
    """`gather_times` of a ring whose rounds cost what this link says."""
    sizes = [8, 1024, 2**16, 2**18]
    return measured_as((sizes, [link.alpha_s + link.beta_s * size for size in sizes]))


def chooser(method="auto", link=None, monkeypatch=None, **config):
    """A chooser on two ranks; with `link` that and `SPEED` are what it measures."""
    if link is not None:
        monkeypatch.setattr(price, "gather_times", timed_as(link))
        monkeypatch.setattr(price, "measure_coder", measured_as(SPEED))
    parameters = ParametersConfig(method, verify_every=7)
    return GatherChooser(SparseConfig(parameters=parameters, **config), Echo())


def test_the_formula():
    n, numel = 4, 1000
    prices = gather_prices(numel, torch.bfloat16, n, GatherLinks(Link(1e-3, 1e-6)), SPEED)
    assert prices.raw_s == pytest.approx(3 * (1e-3 + 250 * 2 * 1e-6))
    assert prices.exact_s[False] == pytest.approx(
        4 * 1e-3 + 3 * (1e-3 + 250 * 3.2 / 8 * 1e-6) + 250 * 2e-9 + 3 * 250 * 2e-9
    )
    both = prices + prices
    assert both.raw_s == 2 * prices.raw_s
    assert both.exact_s[False] == 2 * prices.exact_s[False]


@pytest.mark.parametrize(("nic", "sharing"), [("rank", 1), ("node", 2)])
def test_the_formula_on_two_levels(nic, sharing):
    """Two nodes of two ranks, 1000 numbers each: 400 bytes of a record, 2000 raw."""
    inside, across = Link(1e-5, 1e-9), Link(1e-3, 1e-6)
    topology = Topology((2, 2), inside, across, nic)
    links = GatherLinks(Link(2e-3, 2e-6), topology)
    exact_s = gather_prices(4000, torch.bfloat16, 4, links, SPEED).exact_s
    alone_s, crossing_s = 1e-3 + 400 * 1e-6, 1e-3 + sharing * 400 * 1e-6
    coding_s = 2 * 1e-3 + 2 * 1e-5 + 1000 * 2e-9
    # In the first and the last of three rounds one rank of a node crosses, in the second both.
    assert exact_s[False] == pytest.approx(coding_s + 2 * alone_s + crossing_s + 3 * 1000 * 2e-9)
    assert exact_s[True] == pytest.approx(
        coding_s + crossing_s + (1e-5 + 2 * 2000 * 1e-9) + 1000 * 2e-9
    )


def test_stated_bits_take_the_place_of_assumed_ones():
    links, speed = GatherLinks(Link(0.0, 1e-6)), CoderSpeed(0.0, 0.0, bits=1.6)
    exact_s = gather_prices(4000, torch.bfloat16, 4, links, speed).exact_s
    assert exact_s[False] == pytest.approx(3 * 1000 * 1.6 / 8 * 1e-6)


@pytest.mark.parametrize(
    ("nodes", "setting", "inside", "expected"),
    [
        ((0, 0, 1, 1), "auto", FAST, True),
        ((0, 0, 1, 1), "auto", Link(0.0, 1.0), False),
        ((0, 0, 1, 1), "never", FAST, False),
        ((0, 0, 1, 1), "always", Link(0.0, 1.0), True),
        ((0, 1, 2, 3), "always", FAST, False),
        ((0, 0, 0, 0), "always", FAST, False),
    ],
)
def test_once_per_node_where_it_pays(monkeypatch, nodes, setting, inside, expected):
    topology = Topology((2, 2), inside, SLOW)
    monkeypatch.setattr(price, "gather_times", timed_as(SLOW))
    monkeypatch.setattr(price, "measure_topology", measured_as(topology))
    config = SparseConfig(parameters=ParametersConfig("exact", setting))
    way = GatherChooser(config, Echo(nodes=nodes)).choose([BUCKET])
    assert way is not None
    assert way.per_node == expected


def test_exact_must_be_clearly_shorter():
    assert Prices(1.0, {False: 0.59, True: 2.0}).exact_pays
    assert not Prices(1.0, {False: 0.61, True: 2.0}).exact_pays


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_dtype_pays_on_a_slow_link_only(dtype):
    assert gather_prices(2**22, dtype, 4, GatherLinks(SLOW), SPEED).exact_pays
    assert not gather_prices(2**22, dtype, 4, GatherLinks(FAST), SPEED).exact_pays


def test_auto_takes_exact_on_a_slow_link_and_says_why(monkeypatch):
    chosen = chooser(link=SLOW, monkeypatch=monkeypatch)
    way = chosen.choose([BUCKET])
    assert way is not None
    assert way.verify_every == 7
    text = chosen.explain()
    assert "1 of 1 buckets exact" in text
    assert "links of 6 MB/s (measured)" in text


def test_auto_stays_raw_on_a_fast_link_and_for_small_buckets(monkeypatch):
    chosen = chooser(link=FAST, monkeypatch=monkeypatch)
    assert chosen.choose([BUCKET]) is None
    assert "0 of 1 buckets exact" in chosen.explain()
    chosen = chooser(link=SLOW, monkeypatch=monkeypatch)
    assert chosen.choose([BUCKET[:16]]) is None


def test_the_link_of_a_cluster_file_is_taken_without_measuring(monkeypatch):
    monkeypatch.setattr(price, "gather_times", None)
    chosen = chooser(planner=PlannerConfig(cluster="perlmutter"))
    assert chosen.choose([BUCKET]) is None
    assert "of perlmutter" in chosen.explain()


def test_what_is_set_is_taken_without_measuring(monkeypatch):
    monkeypatch.setattr(price, "gather_times", None)
    monkeypatch.setattr(price, "measure_coder", None)
    assert chooser("exact").choose([BUCKET[:16]]) == Way(verify_every=7)
    assert chooser("raw").choose([BUCKET]) is None


def test_measurements_are_positive():
    links = complete(price.measure_gather_links(Echo()))
    assert links.dense.beta_s > 0
    speed = complete(price.measure_coder(Echo(), torch.bfloat16))
    assert 0 < speed.encode_s < 1e-4
    assert 0 < speed.decode_s < 1e-4


def test_a_codec_that_shares_its_core_is_as_fast_as_its_windows_are_on_average(monkeypatch):
    encode_s, decode_s = [1.0, 5.0] * (price.WINDOWS // 2), [2.0, 8.0] * (price.WINDOWS // 2)
    readings, now_s = [], 0.0
    for window in zip(encode_s, decode_s, strict=True):
        readings += [now_s, now_s + window[0], now_s + sum(window)]
        now_s += 10
    monkeypatch.setattr(price, "host_clock", lambda device: iter(readings).__next__)
    numel = price.SAMPLE_NUMEL * price.SAMPLE_REPEATS["cpu"]
    speed = price.coder_speed(torch.bfloat16, torch.device("cpu"))
    assert speed == (3.0 / numel, 5.0 / numel)


@pytest.mark.parametrize(
    ("place", "name"),
    [(0, "method"), (1, "per_node"), (2, "bits"), (3, "verify_every")],
)
def test_ranks_with_other_settings_are_told(place, name):
    def other(own):
        changed = own.clone()
        changed[place] -= 1
        return changed

    config = SparseConfig(parameters=ParametersConfig("exact", "always"))
    with pytest.raises(CommunicationError, match=f"rank 1 .* another parameters.{name}"):
        GatherChooser(config, Echo(other))


def test_lossy_is_for_fp32_and_others_are_exact():
    chosen = chooser("lossy")
    assert chosen.choose([torch.zeros(512), torch.zeros(512)]) == LossyWay(4, verify_every=7)
    assert chosen.explain() == "2 buckets lossy, 4 bits"
    assert chosen.choose([BUCKET]) == Way(verify_every=7)
    assert chosen.explain().startswith("2 buckets lossy, 4 bits; 1 ")


@pytest.mark.parametrize(
    ("byte_s", "ranks", "largest"),
    [(1e-10, 2, 2**23), (1e-7, 2, 2**18), (3e-9, 8, 2**20), (1e-12, 256, 2**20)],
)
def test_larger_messages_are_measured_until_they_take_long(monkeypatch, byte_s, ranks, largest):
    """Seconds by a clock that only gathers move on."""
    now_s, link = [0.0], Link(1e-6, byte_s)

    class Ring(Echo):
        def all_gather(self, gathered, own):
            now_s[0] += (ranks - 1) * (link.alpha_s + own.nbytes * byte_s)
            return super().all_gather(gathered, own)

    monkeypatch.setattr(price, "host_clock", lambda device: lambda: now_s[0])
    sizes, times_s = complete(price.gather_times(Ring(nodes=range(ranks))))
    assert sizes == [size for size in price.GATHERED_BYTES if size <= largest]
    assert price.fit_link(sizes, times_s).beta_s == pytest.approx(byte_s, rel=1e-4)
