"""Which rank was last, how late it was, and whether it will be late again."""

import pytest
from scipy.stats import binomtest

from megatron_sparse.straggler.detector import (
    DelayStatistics,
    delay_s,
    last_rank,
    persistent_straggler,
    share_bound,
)


def test_of_ranks_that_come_together_the_lowest_is_the_last_and_not_late():
    assert last_rank([1.0, 3.0, 3.0]) == 1
    assert delay_s([1.0, 3.0, 3.0]) == 0
    assert delay_s([5.0]) == 0


def test_statistics_by_hand():
    # Delays 2, 1, 4 with ranks 2, 2, 0 last; and a bucket with one step, rank 2, delay 3.
    first = [[0, 1, 3], [0, 2, 3], [9, 5, 1]]
    second = [[0, 0, 3]]
    found = DelayStatistics.of([first, second])
    assert found == DelayStatistics(
        count=4, median_s=2.5, mean_s=2.5, max_s=4, persistence=0.5, rank=2, share=0.75
    )
    alone = DelayStatistics.of([second])
    assert alone is not None
    assert alone.persistence is None
    assert DelayStatistics.of([]) is None
    assert DelayStatistics.of([[]]) is None


def test_steps_of_different_buckets_do_not_follow_one_another():
    always_0, always_1 = [[1, 0]] * 3, [[0, 1]] * 3
    found = DelayStatistics.of([always_0, always_1])
    assert found is not None
    assert found.persistence == 1


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
