"""The arrival counter: all ranks hold the same decision, in whatever order they arrive."""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.errors import CommunicationError
from megatron_sparse.transport import VirtualCluster
from megatron_sparse.transport.arrival_counter import StoreArrivalCounter
from megatron_sparse.transport.operation import Operation
from tests.waiting import DEADLINE_S

LATE_S = 0.12
"""Much longer than a store in this process takes, some milliseconds on a busy machine."""


def _store():
    return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]


def _counter(store, rank, n, timeout_s=20.0):
    cpu = torch.device("cpu")
    return StoreArrivalCounter(
        store, "test", rank, n, cpu, lambda name: Operation(name, None, timeout_s)
    )


@pytest.fixture
def counters():
    """Makes the counters of n ranks in this process over one store; closes them."""
    made = []

    def make(n, timeout_s=20.0, store=None):
        shared = store or _store()
        made.extend(_counter(shared, rank, n, timeout_s) for rank in range(n))
        return made

    yield make
    for counter in made:
        counter.close()
    left = [t.name for t in threading.enumerate() if t.name == "megatron_sparse_arrivals"]
    assert not left, "a closed counter leaves no thread behind"


def _arrive(counter, delay_s, grace):
    """The straggler, when this rank has arrived (at the earliest, at the latest), and its wait."""
    time.sleep(delay_s)
    began_s = time.perf_counter()
    arrival = counter.arrive("b", grace)
    came_s = began_s, time.perf_counter()
    arrival.finish()
    return arrival.straggler, came_s, arrival.waited()


def _one_is_late(counters, late, grace):
    """It arrives when the others no longer wait."""
    early = [counter for rank, counter in enumerate(counters) if rank != late]
    results = _all_arrive(early, [0] * len(early), grace)
    return [*results, _arrive(counters[late], 0, grace)]


def _all_arrive(counters, delays_s, grace):
    with ThreadPoolExecutor(len(counters)) as pool:
        futures = [
            pool.submit(_arrive, counter, delay_s, grace)
            for counter, delay_s in zip(counters, delays_s, strict=True)
        ]
        return [future.result() for future in futures]


@pytest.mark.parametrize(("late", "grace_s"), [(0, 0.0), (2, 0.0), (2, LATE_S / 4)])
def test_the_missing_rank_is_named_after_the_grace_and_no_rank_waits_for_it(
    counters, late, grace_s
):
    results = _one_is_late(counters(3), late, lambda missing: grace_s)
    assert {straggler for straggler, _, _ in results} == {late}


def test_ranks_wait_for_one_that_arrives_within_the_grace(counters):
    results = _all_arrive(counters(3), [0, LATE_S / 4, 0], lambda missing: 20 * LATE_S)
    assert {straggler for straggler, _, _ in results} == {None}


def test_grace_is_called_with_the_missing_rank(counters):
    asked = []

    def grace(missing):
        asked.append(missing)
        return math.inf

    _all_arrive(counters(4), [0, LATE_S, 0, 0], grace)
    assert asked == [1]


def test_waits_are_measured_without_a_common_clock(counters):
    results = _all_arrive(counters(3), [0, LATE_S / 2, LATE_S], None)
    assert {straggler for straggler, _, _ in results} == {None}
    waits = [waited.result(timeout=DEADLINE_S) for _, _, waited in results]
    came_s = [came for _, came, _ in results]
    last = max(range(3), key=lambda rank: came_s[rank])
    for rank, (began_s, arrived_s) in enumerate(came_s):
        if rank == last:
            assert waits[rank] == 0
            continue
        # A twentieth of the wait may be added, and threads take some milliseconds.
        assert waits[rank] > came_s[last][0] - arrived_s - 0.05
        assert waits[rank] < 1.05 * (came_s[last][1] - began_s) + 0.05


def test_visits_do_not_mix_and_old_keys_are_deleted(counters):
    store = _store()
    made = counters(2, store=store)
    for visit in range(6):
        late = visit % 2
        results = _one_is_late(made, late, lambda missing: 0.0)
        assert {straggler for straggler, _, _ in results} == {late}
        for _, _, waited in results:
            waited.result(timeout=DEADLINE_S)
    # At most three keys each of the last two visits.
    assert store.num_keys() <= 6


@settings(max_examples=20)
@given(
    st.integers(2, 5), st.lists(st.floats(0, 0.004), min_size=5, max_size=5), st.floats(0, 0.004)
)
def test_all_ranks_hold_the_same_decision_when_arrivals_are_close(n, delays, grace_s):
    store = _store()
    made = [_counter(store, rank, n) for rank in range(n)]
    try:
        results = _all_arrive(made, delays[:n], lambda missing: grace_s)
    finally:
        for counter in made:
            counter.close()
    assert len({straggler for straggler, _, _ in results}) == 1


def test_several_ranks_that_never_arrive_are_an_error_at_the_timeout(counters):
    made = counters(3, timeout_s=0.3)
    with pytest.raises(CommunicationError, match=r"all ranks but one at bucket b failed"):
        _arrive(made[0], 0, lambda missing: 0.0)


def test_a_store_that_is_gone_is_a_typed_error(counters, monkeypatch):
    made = counters(2)

    class Gone:
        def add(self, *_):
            raise RuntimeError("connection reset by peer")

    monkeypatch.setattr(made[0], "_store", Gone())
    arrival = made[0].arrive("b", lambda missing: 0.0)
    with pytest.raises(CommunicationError, match="connection reset"):
        arrival.finish()


@pytest.mark.parametrize(
    ("grace_s", "straggler", "clock_s"),
    [
        # Without grace the last rank is named when the others have arrived.
        (0.0, 1, [2.0, 5.0, 2.0]),
        # Within the grace all wait.
        (3.0, None, [5.0, 5.0, 5.0]),
        # After the grace the others continue.
        (2.5, 1, [4.5, 5.0, 4.5]),
        # Measuring takes no time.
        (None, None, [0.0, 5.0, 2.0]),
    ],
)
def test_the_same_decisions_from_modelled_clocks(grace_s, straggler, clock_s):
    cluster, delays_s = VirtualCluster(3), [0.0, 5.0, 2.0]

    def start(transport):
        transport.charge(delays_s[transport.rank])
        grace = None if grace_s is None else lambda missing: grace_s
        arrival = transport.open_arrival_counter().arrive("b", grace)
        if grace is not None:
            yield arrival
            assert arrival.straggler == straggler
        else:
            yield from ()
        return arrival.waited()

    waited = cluster.run(start)
    assert cluster.clock_s == clock_s
    assert [each.result() for each in waited] == [5.0, 0.0, 3.0]
