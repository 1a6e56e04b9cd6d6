"""Schedules of the straggler-aware all-reduce; the critical delay, which turns them on."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sparse.errors import ConfigError
from megatron_sparse.straggler.cost import (
    SplitTimes,
    dense_split,
    expected_delay_s,
    sparse_split,
)
from megatron_sparse.straggler.generate import doubling_rounds, make_schedule
from megatron_sparse.straggler.schedule import Transfer, early_ranks
from megatron_sparse.transport import Link
from tests.straggler.table_1 import ring_cost, straggler_aware_cost

QUICK = (*range(2, 17), 24, 32, 64, 128, 256)
REST = tuple(n for n in range(2, 65) if n not in QUICK)


def verify(rounds, n, straggler):
    """Replays a schedule, independently of its generator.

    A chunk is added once: when an early rank that holds its sum of the early ranks and the
    straggler exchange it. Everything else is a copy of a complete chunk.
    """
    partial = dict(enumerate(early_ranks(n, straggler)))
    complete = [set() for _ in range(n)]
    for number, transfers in enumerate(rounds):
        assert len({t.sender for t in transfers}) == len(transfers), f"{number}: two chunks sent"
        peers, arrived = {}, []
        for sender, receiver, chunk in transfers:
            assert sender != receiver
            assert peers.setdefault(sender, receiver) == receiver, f"{number}: {sender} meets two"
            assert peers.setdefault(receiver, sender) == sender, f"{number}: {receiver} meets two"
            assert chunk not in complete[receiver], f"{number}: {receiver} has chunk {chunk}"
            if chunk not in complete[sender]:
                assert {sender, receiver} == {partial[chunk], straggler}, transfers
                assert Transfer(receiver, sender, chunk) in transfers
            arrived.append((receiver, chunk))
        for receiver, chunk in arrived:
            complete[receiver].add(chunk)
    assert all(chunks == set(range(n - 1)) for chunks in complete)


def _most_rounds(n):
    """StragglAR's theorem 1 for powers of two; for others what was found to 64, not proved."""
    levels = (n - 1).bit_length()
    if n & (n - 1) == 0:
        return n + levels - 2
    # With odd n one early rank is idle in each round.
    return n + 2 * levels - 2 + n % 2 * -(-n // 5)


@pytest.mark.parametrize("n", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in REST)])
def test_schedules_are_right_for_every_straggler(n):
    for straggler in range(n) if n <= 16 else (0, n // 2, n - 1):
        rounds = make_schedule(n, straggler)
        verify(rounds, n, straggler)
        assert len(rounds) <= _most_rounds(n)


@pytest.mark.parametrize(("n", "most"), [(6, 7), (10, 12), (12, 14), (24, 27)])
def test_rounds_of_other_even_numbers(n, most):
    assert len(make_schedule(n)) <= most


def test_256_ranks_take_no_time():
    start = time.process_time()
    list(doubling_rounds(256))
    assert time.process_time() - start < 1


@pytest.mark.parametrize(("n", "straggler"), [(1, 0), (0, 0), (4, 4), (4, -1)])
def test_ranks_that_do_not_exist_are_refused(n, straggler):
    with pytest.raises(ConfigError):
        make_schedule(n, straggler)


# -- the critical delay


LINK = Link(alpha_s=20e-6, beta_s=16e-9)
SIZE = 64e6
POWERS = (2, 4, 8, 16, 64)


@pytest.mark.parametrize("n", POWERS)
def test_the_dense_split_is_table_1(n):
    split = dense_split(n, SIZE, LINK, LINK)
    best, worst = (
        straggler_aware_cost(n, n + int(math.log2(n)) - 2, worst=worst).time_s(SIZE, LINK)
        for worst in (False, True)
    )
    assert split.after_s == pytest.approx(best)
    assert split.early_s + split.after_s == pytest.approx(worst)
    assert split.otherwise_s == pytest.approx(ring_cost(n).time_s(SIZE, LINK))


def test_the_backends_own_collective_is_the_one_to_beat():
    slow = Link(LINK.alpha_s, 2 * LINK.beta_s)
    split = dense_split(8, SIZE, LINK, slow)
    assert split.otherwise_s == pytest.approx(2 * 7 * slow.alpha_s + 2 * 7 / 8 * SIZE * slow.beta_s)
    assert split.critical_s < dense_split(8, SIZE, LINK, LINK).critical_s


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


def test_the_sparse_form_wins_with_8_ranks_and_a_long_delay():
    message, summed = 0.16 * SIZE, 0.7 * SIZE
    split = sparse_split(8, message, summed, LINK)
    # The early sum in, and 2 of the schedule's 9 rounds carry only chunks of the message.
    rounds = len(make_schedule(8))
    bytes_after = summed + (rounds - 7) / 7 * message
    assert split.after_s == pytest.approx((1 + rounds) * LINK.alpha_s + bytes_after * LINK.beta_s)
    # Two agreements, n - 1 rounds of the exchange and of the gather.
    for seconds, n in ((split.otherwise_s, 8), (split.early_s, 7)):
        assert seconds == pytest.approx(
            2 * n * LINK.alpha_s + (n - 1) / n * (message + summed) * LINK.beta_s
        )
    # If messages are small compared with their sum, the gain is smaller: the sum must still be
    # sent.
    assert split.after_s > 0.9 * split.otherwise_s
    overlapping = sparse_split(8, message, message, LINK)
    assert overlapping.early_s - overlapping.critical_s > 0.2 * overlapping.otherwise_s


def test_expected_delay_weighs_by_persistence_and_has_a_cap():
    steps = [[0, 0, 4], [0, 0, 10], [3, 0, 0], [0, 0, 2]]
    assert expected_delay_s(steps, 2) == (4 + 10 + 0 + 2) / 4
    assert expected_delay_s(steps, 2, most_s=5) == (4 + 5 + 0 + 2) / 4
    assert expected_delay_s(steps, 0) == 3 / 4
    assert expected_delay_s(steps, 1) == 0
