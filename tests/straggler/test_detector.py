"""Which rank was last, how late it was, and whether it will be late again."""

import pytest
from scipy.stats import binomtest

from megatron_sparse.straggler.detector import (
    delay_s,
    last_rank,
    persistent_straggler,
    share_bound,
)


def test_of_ranks_that_come_together_the_lowest_is_the_last_and_not_late():
    assert last_rank([1.0, 3.0, 3.0]) == 1
    assert delay_s([1.0, 3.0, 3.0]) == 0
    assert delay_s([5.0]) == 0


@pytest.mark.parametrize(("hits", "count"), [(5, 5), (15, 20), (6, 10), (0, 7), (49, 50)])
def test_the_share_bound_is_wilsons(hits, count):
    interval = binomtest(hits, count, alternative="greater").proportion_ci(0.95, "wilson")
    assert share_bound(hits, count) == pytest.approx(interval.low, abs=1e-12)


def _steps(lasts, n=4):
    return [[float(rank == last) for rank in range(n)] for last in lasts]


@pytest.mark.parametrize(
    ("lasts", "expected"),
    [
        ([3] * 5, 3),
        ([3] * 4, None),  # too few to say anything
        ([3, 1, 3, 1, 3, 1], None),
        ([2] * 15 + [0] * 5, 2),
        ([2] * 6 + [0] * 4, None),
    ],
)
def test_a_persistent_straggler_was_last_in_most_steps(lasts, expected):
    assert persistent_straggler(_steps(lasts)) == expected
