"""Schedules of the straggler-aware all-reduce: their rounds, and that a wrong one is found."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import pytest

from megatron_sparse.errors import ConfigError, ScheduleError
from megatron_sparse.straggler import (
    Transfer,
    broadcast_cost,
    critical_delay_s,
    make_schedule,
    ring_cost,
    straggler_aware_cost,
    verify,
)
from megatron_sparse.straggler.generate import doubling_rounds
from megatron_sparse.transport import Link
from tests.commands import run

QUICK = (*range(2, 17), 24, 32, 64, 128, 256)
REST = tuple(n for n in range(2, 65) if n not in QUICK)


def _most_rounds(n):
    """StragglAR's theorem 1 for powers of two; for others what was found to 64, not proved."""
    levels = (n - 1).bit_length()
    if n & (n - 1) == 0:
        return n + levels - 2
    # With odd n one early rank is idle in each round.
    return n + 2 * levels - 2 + n % 2 * -(-n // 5)


def _check(n, stragglers):
    for straggler in stragglers:
        schedule = make_schedule(n, straggler)
        assert (schedule.world_size, schedule.straggler) == (n, straggler)
        verify(schedule)
        assert len(schedule.rounds) <= _most_rounds(n)


@pytest.mark.parametrize("n", QUICK)
def test_schedules_are_right_for_every_straggler(n):
    _check(n, range(n) if n <= 16 else (0, n // 2, n - 1))


@pytest.mark.slow
@pytest.mark.parametrize("n", REST)
def test_schedules_of_every_size_to_64_are_right(n):
    _check(n, (0, n - 1))


@pytest.mark.parametrize("n", [2**k for k in range(1, 9)])
def test_powers_of_two_take_the_rounds_of_theorem_1(n):
    assert len(make_schedule(n).rounds) == n + math.log2(n) - 2


@pytest.mark.parametrize(("n", "most"), [(6, 7), (10, 12), (12, 14), (24, 27)])
def test_rounds_of_other_even_numbers(n, most):
    assert len(make_schedule(n).rounds) <= most


def test_256_ranks_take_no_time():
    start = time.process_time()
    list(doubling_rounds(256))
    assert time.process_time() - start < 1


def _changed(schedule, number, transfers):
    rounds = list(schedule.rounds)
    rounds[number] = tuple(transfers)
    return replace(schedule, rounds=tuple(rounds))


@pytest.mark.parametrize("n", [4, 6, 7])
def test_a_schedule_that_lacks_any_transfer_is_refused(n):
    schedule = make_schedule(n)
    for number, transfers in enumerate(schedule.rounds):
        for index in range(len(transfers)):
            left = transfers[:index] + transfers[index + 1 :]
            with pytest.raises(ScheduleError):
                verify(_changed(schedule, number, left))


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        (Transfer(1, 2, 1), "sends chunk 1, which it does not hold"),
        (Transfer(2, 1, 3), "chunk 3 does not exist"),
        (Transfer(1, 1, 1), "not between two ranks"),
        (Transfer(1, 4, 1), "not between two ranks"),
        (Transfer(0, 1, 0), "sends two chunks"),
        (Transfer(2, 0, 2), "meets ranks"),
    ],
)
def test_a_broken_rule_is_named(extra, names):
    schedule = make_schedule(4)
    with pytest.raises(ScheduleError, match=names):
        verify(_changed(schedule, 0, (*schedule.rounds[0], extra)))


def test_a_chunk_is_not_added_twice():
    schedule = make_schedule(4)
    twice = replace(schedule, rounds=(schedule.rounds[0], *schedule.rounds))
    with pytest.raises(ScheduleError, match="has chunk 0 already"):
        verify(twice)


@pytest.mark.parametrize(("n", "straggler"), [(1, 0), (0, 0), (4, 4), (4, -1)])
def test_ranks_that_do_not_exist_are_refused(n, straggler):
    with pytest.raises(ConfigError):
        make_schedule(n, straggler)


def test_costs_are_those_of_table_1():
    n, rounds, link, size = 8, 9, Link(2.0, 3.0), 7.0
    assert straggler_aware_cost(n, rounds).time_s(size, link) == pytest.approx(9 * 2 + 9 / 7 * 21)
    worst = straggler_aware_cost(n, rounds, worst=True)
    assert (worst.rounds, worst.buffers) == (2 * 6 + 3, (2 * 6 + 3) / 7)
    assert ring_cost(n).time_s(size, link) == pytest.approx(14 * 2 + 2 * 7 / 8 * 21)
    broadcast = broadcast_cost(n, worst=True)
    assert (broadcast.rounds, broadcast.buffers) == (2 * 8 + 3 - 4, 3 + 2 * 6 / 7)
    ring = ring_cost(n).time_s(size, link)
    assert critical_delay_s(n, rounds, size, link) == pytest.approx(worst.time_s(size, link) - ring)
    assert critical_delay_s(2, 1, size, link) == 0


def test_the_command_shows_and_writes_the_schedule(tmp_path, capsys):
    json_path, picture = tmp_path / "s.json", tmp_path / "s.png"
    words = ["schedule --ranks 6 --straggler 2 --json", json_path, "--output", picture]
    assert run(*words) == 0
    printed = capsys.readouterr().out
    assert "7 rounds" in printed
    assert "recursive halving/doubling" in printed
    line = json.loads(json_path.read_text())
    assert (line["ranks"], line["straggler"], line["n_rounds"]) == (6, 2, 7)
    assert line["verified"] is True
    assert [t for t in line["rounds"][4] if 2 in t[:2]] == [[5, 2, 4], [2, 5, 4]]
    assert picture.read_bytes().startswith(b"\x89PNG")
