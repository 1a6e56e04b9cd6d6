"""Faults over real processes and sockets: a sample of each kind in every scheme.

Worlds whose ranks mostly wait run side by side. The whole matrix is marked slow.
"""

import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.collectives.cases import NAMES, SPARSE
from tests.collectives.fault_ranks import (
    NUMEL,
    SLOW_S,
    disagree_everywhere,
    one_after_another,
    terminal,
)
from tests.collectives.faults import Fault
from tests.ranks import CONTEXT, run_ranks, start_rank
from tests.waiting import DEADLINE_S

N = 3
TIMEOUT_S = 10.0
SLACK_S = 60.0
"""Additional seconds for a machine that runs several worlds at once."""
WORLDS_AT_ONCE = 7
OPERATIONS = ("exchange with ranks", "all_gather", "all_reduce")


@pytest.fixture(scope="module")
def posts():
    """How many operations each rank posts, by scheme; and each scheme once without a fault."""
    cases = [(name, Fault("none", 0, 0)) for name in NAMES]
    by_rank = run_ranks(one_after_another, N, cases, 20.0)
    assert all(result["right"] for results in by_rank for result in results)
    return {
        name: [results[index]["posted"] for results in by_rank] for index, name in enumerate(NAMES)
    }


def _worlds(cases, folder, numel=NUMEL):
    """Runs the (scheme, fault) cases, some at a time; the survivors' results of each, by rank."""
    # Nothing reads the queue, but a child cannot start after it was deleted.
    queue = CONTEXT.Queue()
    results = []
    for first in range(0, len(cases), WORLDS_AT_ONCE):
        started = []
        for number, (scheme, fault) in enumerate(cases[first : first + WORLDS_AT_ONCE], first):
            place = Path(folder) / str(number)
            place.mkdir()
            arguments = (scheme, fault, numel, TIMEOUT_S, str(place))
            store = str(place / "store")
            processes = [start_rank(terminal, r, N, store, queue, arguments) for r in range(N)]
            started.append((fault, place, processes))
        try:
            results += [_survivors(*world) for world in started]
        finally:
            for _, _, processes in started:
                for process in processes:
                    process.kill()
                    process.join()
    return results


def _survivors(fault, place, processes):
    """Waits for the survivors' reports and ends."""
    deadline_s = time.monotonic() + DEADLINE_S
    collected = {}
    for rank in set(range(N)) - {fault.victim}:
        report = place / f"rank{rank}.json"
        while not report.exists():
            assert time.monotonic() < deadline_s, f"{fault}: rank {rank} hangs"
            assert processes[rank].is_alive(), f"{fault}: rank {rank} ended without an answer"
            time.sleep(0.05)
        collected[rank] = json.loads(report.read_text())
    for rank in collected:
        processes[rank].join(DEADLINE_S)
        assert processes[rank].exitcode == 0, f"{fault}: rank {rank} does not end by itself"
    return collected


def _check(cases, outcomes):
    """Each survivor has a complete typed error or the right sum; at least one fails."""
    for (scheme, fault), survivors in zip(cases, outcomes, strict=True):
        errors = [result for result in survivors.values() if result["kind"]]
        assert errors, (scheme, fault)
        for rank, result in survivors.items():
            where = (scheme, fault, rank, result["text"])
            assert result["close_s"] < SLACK_S, where
            if not result["kind"]:
                assert result["right"], where
                continue
            assert result["kind"] == "CommunicationError", where
            assert "bucket b" in result["text"], where
            assert any(operation in result["text"] for operation in OPERATIONS), where
            assert f"rank {fault.victim} " in result["text"], where
            assert result["seconds"] < TIMEOUT_S + SLACK_S, where


def _sample(posts, kind, place):
    """One fault for each scheme; `place` (0 to 1) says at which of its operations."""
    cases = []
    for index, (name, counts) in enumerate(posts.items()):
        # The server of sparse_ps is rank 0: it is a victim, too.
        victim = index % N
        cases.append((name, Fault(kind, victim, int(place * (counts[victim] - 1)))))
    return cases


def test_a_rank_killed_in_any_scheme_is_named_at_once(posts, tmp_path):
    cases = _sample(posts, "kill", 0.5)
    outcomes = _worlds(cases, tmp_path)
    _check(cases, outcomes)
    for case, survivors in zip(cases, outcomes, strict=True):
        for result in survivors.values():
            assert result["seconds"] < TIMEOUT_S, case


def test_a_rank_stopped_in_any_scheme_is_named_within_the_timeout(posts, tmp_path):
    cases = _sample(posts, "stop", 0.5)
    _check(cases, _worlds(cases, tmp_path))


def test_a_rank_killed_while_it_sends_a_large_message_is_named(tmp_path):
    """Alone, gloo waits out its timeout in the middle of a message."""
    cases = [("dense_ring", Fault("kill while sending", 1, 0))]
    outcomes = _worlds(cases, tmp_path, numel=1 << 24)
    _check(cases, outcomes)
    assert all(result["seconds"] < TIMEOUT_S for result in outcomes[0].values())


def test_a_slow_rank_changes_nothing(posts):
    cases = [(name, Fault("slow", 1, posts[name][1] // 2)) for name in NAMES]
    by_rank = run_ranks(one_after_another, N, cases, 20.0)
    for results in by_rank:
        for case, result in zip(cases, results, strict=True):
            assert result["right"], (case, result["text"])
    assert all(result["seconds"] >= SLOW_S for result in by_rank[1]), "it was slow"


def test_a_damaged_message_is_an_error_on_every_rank(posts):
    """The receiver's error names the damage; the others learn that it has given up."""
    cases = []
    for name in SPARSE:
        for kind in ("header", "size", "truncate"):
            at = 0 if kind == "size" else posts[name][1] - 1
            cases.append((name, Fault(kind, 1, at)))
    by_rank = run_ranks(one_after_another, N, cases, TIMEOUT_S)
    for index, case in enumerate(cases):
        results = [results[index] for results in by_rank]
        if not results[1]["struck"]:
            assert all(result["right"] for result in results), case
            continue
        kinds = [result["kind"] for result in results]
        assert "WireFormatError" in kinds or "CommunicationError" in kinds, case
        for result in results:
            assert result["kind"] or result["right"], (case, result["text"])
            assert not result["kind"] or "bucket b" in result["text"], case
            assert result["seconds"] < TIMEOUT_S + SLACK_S, case
            assert result["close_s"] < SLACK_S, case


def test_ranks_that_disagree_get_an_error_in_every_scheme():
    """The worlds run side by side: dense ranks that disagree wait for their timeout."""
    parts = list(itertools.product(("size", "dtype", "step", "scheme"), (NAMES[::2], NAMES[1::2])))
    with ThreadPoolExecutor(len(parts)) as pool:
        worlds = [
            pool.submit(run_ranks, disagree_everywhere, N, [(name, what) for name in names], 2.0)
            for what, names in parts
        ]
    for (what, names), world in zip(parts, worlds, strict=True):
        for rank, results in enumerate(world.result()):
            for scheme, result in zip(names, results, strict=True):
                where = (scheme, what, rank, result["text"])
                assert result["kind"] == "CommunicationError", where
                assert "bucket b" in result["text"], where
                assert "rank" in result["text"], where
                if scheme in SPARSE and what != "scheme":
                    assert "of the group is not in the same collective" in result["text"], where
                assert result["seconds"] < 2.0 + SLACK_S, where


@pytest.mark.parametrize("numel", [0, 1])
@pytest.mark.parametrize("world_size", [1, N])
def test_empty_buckets_and_a_world_of_one(world_size, numel):
    cases = [(name, Fault("none", 0, 0)) for name in NAMES]
    for results in run_ranks(one_after_another, world_size, cases, 20.0, numel):
        for (scheme, _), result in zip(cases, results, strict=True):
            assert result["right"], (scheme, result["text"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["kill", "stop"])
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_lost_at_any_operation_of_any_scheme(name, kind, posts, tmp_path):
    cases = [
        (name, Fault(kind, victim, at))
        for victim, count in enumerate(posts[name])
        for at in range(count)
    ]
    _check(cases, _worlds(cases, tmp_path))
