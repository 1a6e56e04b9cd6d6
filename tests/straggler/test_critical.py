"""The critical delay and the rule that turns the straggler-aware form on."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.straggler import critical_delay_s, make_schedule
from megatron_sparse.straggler.critical import (
    SplitTimes,
    dense_split,
    expected_delay_s,
    sparse_split,
)
from megatron_sparse.transport import Link

LINK = Link(alpha_s=20e-6, beta_s=16e-9)
SIZE = 64e6
POWERS = (2, 4, 8, 16, 64)


@pytest.mark.parametrize("n", POWERS)
def test_the_dense_split_is_table_1(n):
    split = dense_split(n, SIZE, LINK, CollectiveOp.ALL_REDUCE)
    levels, size_s = math.log2(n), SIZE * LINK.beta_s
    assert split.early_s == pytest.approx((n - 2) * LINK.alpha_s + (n - 2) / (n - 1) * size_s)
    assert split.after_s == pytest.approx((n + levels - 2) * (LINK.alpha_s + size_s / (n - 1)))
    # All-pairs has the ring's bytes in two rounds and is the best of the others here.
    assert split.otherwise_s == pytest.approx(2 * LINK.alpha_s + 2 * (n - 1) / n * size_s)


@pytest.mark.parametrize("n", POWERS)
def test_without_alpha_the_critical_delay_is_appendix_b(n):
    link = Link(0.0, LINK.beta_s)
    split = dense_split(n, SIZE, link, CollectiveOp.ALL_REDUCE)
    rounds = len(make_schedule(n).rounds)
    assert max(0.0, split.critical_s) == pytest.approx(
        critical_delay_s(n, rounds, SIZE, link), abs=1e-12
    )


def test_the_backends_own_collective_is_the_one_to_beat_where_it_is_known():
    slow = Link(LINK.alpha_s, 2 * LINK.beta_s)
    split = dense_split(8, SIZE, LINK, CollectiveOp.ALL_REDUCE, dense=slow)
    assert split.otherwise_s == pytest.approx(2 * 7 * slow.alpha_s + 2 * 7 / 8 * SIZE * slow.beta_s)
    assert split.critical_s < dense_split(8, SIZE, LINK, CollectiveOp.ALL_REDUCE).critical_s


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 2))
def test_gain_is_the_time_saved_after_the_arrival(early_s, after_s, otherwise_s, delay):
    split = SplitTimes(early_s, after_s, otherwise_s)
    aware_s = after_s + max(0.0, early_s - delay)
    # Sums of a few numbers below 2, rounded in another order.
    gain_s = min(delay, early_s) - split.critical_s
    assert gain_s == pytest.approx(otherwise_s - aware_s, abs=1e-12)
    if gain_s > 1e-9:
        assert split.can_win
        assert delay > split.critical_s


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_a_reduce_scatter_has_nothing_to_win(n):
    """The straggler must send n - 1 shards in any case."""
    dense = dense_split(n, SIZE, LINK, CollectiveOp.REDUCE_SCATTER)
    sparse = sparse_split(n, SIZE / 50, SIZE / 15, LINK, CollectiveOp.REDUCE_SCATTER)
    for split in (dense, sparse):
        assert not split.can_win
        assert split.early_s - split.critical_s <= 1e-12


def test_the_sparse_form_wins_with_8_ranks_and_a_long_delay():
    message, summed = 0.16 * SIZE, 0.7 * SIZE
    split = sparse_split(8, message, summed, LINK, CollectiveOp.ALL_REDUCE)
    # The early sum in, and 2 of the schedule's 9 rounds carry only chunks of the message.
    rounds = len(make_schedule(8).rounds)
    bytes_after = summed + (rounds - 7) / 7 * message
    assert split.after_s == pytest.approx((1 + rounds) * LINK.alpha_s + bytes_after * LINK.beta_s)
    assert split.otherwise_s == pytest.approx(
        16 * LINK.alpha_s + 7 / 8 * (message + summed) * LINK.beta_s
    )
    # If messages are small compared with their sum, the gain is smaller: the sum must still be
    # sent.
    assert split.after_s > 0.9 * split.otherwise_s
    overlapping = sparse_split(8, message, message, LINK, CollectiveOp.ALL_REDUCE)
    assert overlapping.early_s - overlapping.critical_s > 0.2 * overlapping.otherwise_s


def test_expected_delay_weighs_by_persistence_and_has_a_cap():
    steps = [[0, 0, 4], [0, 0, 10], [3, 0, 0], [0, 0, 2]]
    assert expected_delay_s(steps, 2) == (4 + 10 + 0 + 2) / 4
    assert expected_delay_s(steps, 2, most_s=5) == (4 + 5 + 0 + 2) / 4
    assert expected_delay_s(steps, 0) == 3 / 4
    assert expected_delay_s(steps, 1) == 0
