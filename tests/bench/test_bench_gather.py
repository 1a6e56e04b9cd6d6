"""`bench gather`: bits, bytes and modelled times on virtual ranks; one run between real ones."""

import pytest
import torch

from megatron_sparse.bench.exchange.gather import GatherBench
from megatron_sparse.bench.exchange.options import GatherSweep
from megatron_sparse.parameters import price
from megatron_sparse.transport import Link, Topology
from tests.commands import run
from tests.tracked import json_lines

INSIDE, ACROSS = Link(1e-6, 1e-11), Link(10e-6, 1e-9)


def rows(topology, **sweep):
    cases = GatherSweep(elements=100_000, **sweep)
    return list(GatherBench.virtual_rows(cases, topology))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_virtual_ranks_end_with_the_owners_bits(dtype):
    found = rows(Topology((2, 2, 1), INSIDE, ACROSS), dtype=dtype, rates=(1e-4, 1e-2))
    assert len(found) == 4
    for row in found:
        assert row.wrong == 0
        assert row.numel == 100_000
        assert row.raw_bytes == 80_000 * (2 if dtype == "fp32" else 1) * 2
        assert 0 < row.bits < 32


def test_once_per_node_is_faster_over_slow_links():
    flat, per_node = rows(Topology((4, 4), INSIDE, ACROSS))
    assert (flat.way, per_node.way) == ("flat", "per-node")
    assert per_node.time_us < flat.time_us < flat.raw_us


def test_ranks_on_one_node_have_one_way():
    (row,) = rows(Topology((3,), INSIDE, INSIDE))
    assert row.way == "flat"


@pytest.mark.parametrize("sizes", [(1,) * 6, (2, 2), (4, 4), (3, 3, 3)], ids=str)
def test_the_prices_are_those_of_the_virtual_cluster(sizes, monkeypatch):
    """The formulas, with the bits of this step and a codec that takes no time."""
    topology = Topology(sizes, INSIDE, ACROSS)
    several = price.several_levels(topology.nodes)
    links = price.GatherLinks(ACROSS, topology if several else None)
    for row in rows(topology):
        monkeypatch.setitem(price.MOVE_BITS, torch.bfloat16, row.bits)
        n, speed = row.world_size, price.CoderSpeed(0.0, 0.0)
        prices = price.gather_prices(row.numel, torch.bfloat16, n, links, speed)
        predicted_s = prices.exact_s[row.way == "per-node"]
        # The virtual ranks announce their sizes all at once, a backend in a ring.
        crossings = len(sizes) if several else n
        ring_s = crossings * ACROSS.alpha_s + (n - crossings) * INSIDE.alpha_s
        predicted_s += ACROSS.alpha_s - ring_s
        assert row.time_us * 1e-6 == pytest.approx(predicted_s, rel=0.1)


def test_between_ranks(tmp_path):
    path = tmp_path / "rows.jsonl"
    options = "--ranks 2 --elements 20000 --iters 2 --json"
    assert run("bench gather", options, path) == 0
    (row,) = json_lines(path)
    assert row["wrong"] == 0
    assert row["transport"] == "gloo"
    assert row["time_us"] > 0
    assert row["raw_us"] > 0
    assert row["wire_bytes"] < row["raw_bytes"]
