"""StragglAR's figures: the virtual cluster's times equal those of the paper's formulas."""

import csv

import pytest

from megatron_sparse.run.local_ranks import CHECKOUT
from megatron_sparse.simulate import stragglar
from megatron_sparse.simulate.machines import DGX_H100, GIB
from megatron_sparse.straggler.cost import dense_split
from megatron_sparse.straggler.generate import make_schedule
from tests.straggler.table_1 import all_reduce_costs

# Beside the chunks: one handshake of at most 8 (n + 1) bytes for each early rank, and only the
# order of floating-point sums.
HANDSHAKE_S = 8 * 17 * 16 * DGX_H100.intra.beta_s + 1e-9


# If n is not a power of two, ports that carry one message at a time leave gaps in these; see
# docs/results/figures.md.
GAPS = ("dense_rhd", "dense_allpairs")
TABLE_1 = [
    (scheme, n)
    for scheme in stragglar.NAMES
    for n in ((4, 8, 16) if scheme in GAPS else (4, 6, 8, 10, 16))
]


@pytest.mark.parametrize(("scheme", "n"), TABLE_1)
def test_times_are_those_of_table_1(scheme, n):
    best, worst = all_reduce_costs(n, len(make_schedule(n)))[scheme]
    for delay_s, cost in ((stragglar.IDEAL_S, best), (0.0, worst)):
        expected_s = cost.time_s(GIB, DGX_H100.intra)
        found_s = stragglar.after_s(DGX_H100, scheme, n, GIB, delay_s)
        assert found_s == pytest.approx(expected_s, abs=HANDSHAKE_S), delay_s


@pytest.mark.parametrize("n", stragglar.FAST_POWERS)
def test_the_critical_delay_on_the_cluster_is_appendix_b(n):
    """A delay below the reduce-scatter's time is hidden completely, so it is a difference."""
    link = DGX_H100.intra
    aware_s, ring_s = (
        stragglar.after_s(DGX_H100, scheme, n, GIB, 0.0) for scheme in ("straggler", "dense_ring")
    )
    exact_s = dense_split(n, GIB, link, link).critical_s
    assert aware_s - ring_s == pytest.approx(exact_s, abs=HANDSHAKE_S)


def test_beyond_four_ranks_an_ideal_delay_wins_over_every_other_and_more_so_with_more_ranks():
    rows = stragglar._scaling_rows((8, 16))
    speedup = {(row["series"], row["ranks"]): row["speedup"] for row in rows}
    for n in (8, 16):
        others = [
            s for (name, ranks), s in speedup.items() if ranks == n and "StragglAR" not in name
        ]
        assert speedup["StragglAR, ideal", n] > max(others) > speedup["StragglAR, no delay", n]
    assert speedup["StragglAR, ideal", 16] > speedup["StragglAR, ideal", 8] > 1.2


def test_figure_9_of_the_page_has_the_ranks_of_the_sweep():
    table = CHECKOUT / "docs/results/figures/stragglar-figure-9.csv"
    with table.open() as file:
        assert {int(row["ranks"]) for row in csv.DictReader(file)} == set(stragglar.EVENS)
