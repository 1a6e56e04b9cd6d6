"""The arrival counter: how long each rank waited for the last one, without a common clock."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_sparse.errors import CommunicationError
from megatron_sparse.transport import VirtualCluster
from megatron_sparse.transport.arrival_counter import StoreArrivalCounter
from megatron_sparse.transport.operation import Operation
from tests.waiting import DEADLINE_S

LATE_S = 0.12
"""Much longer than a store in this process takes, some milliseconds on a busy machine."""


def _store():
    return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]


@pytest.fixture
def counters():
    """Makes the counters of n ranks in this process over one store; closes them."""
    made, operation = [], partial(Operation, liveness=None, timeout_s=DEADLINE_S)

    def make(n, store=None):
        given = store or _store(), "test", n, torch.device("cpu"), operation
        made.extend(StoreArrivalCounter(*given) for _ in range(n))
        return made

    yield make
    for counter in made:
        counter.close()
    left = [t.name for t in threading.enumerate() if t.name == "megatron_sparse_arrivals"]
    assert not left, "a closed counter leaves no thread behind"


def _arrive(counter, delay_s):
    """When this rank has arrived (at the earliest, at the latest), and its wait."""
    time.sleep(delay_s)
    began_s = time.perf_counter()
    waited = counter.arrive("b")
    came_s = began_s, time.perf_counter()
    return came_s, waited.result(timeout=DEADLINE_S)


def test_waits_are_measured_without_a_common_clock(counters):
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(_arrive, counters(3), [0, LATE_S / 2, LATE_S]))
    waits = [wait for _, wait in results]
    came_s = [came for came, _ in results]
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
    made = counters(2, store)
    for visit in range(6):
        late = visit % 2
        early = made[1 - late].arrive("b")
        time.sleep(LATE_S / 4)
        assert not early.done()
        waits = [each.result(timeout=DEADLINE_S) for each in (early, made[late].arrive("b"))]
        # On a loaded machine the thread of the early rank's counter may be the last to count.
        assert min(waits) == 0 < max(waits)
    # Of the bucket's complete visits, and of the last visit until it is deleted.
    assert store.num_keys() <= 2


def test_a_store_that_is_gone_is_a_typed_error(counters, monkeypatch):
    made = counters(2)

    class Gone:
        def add(self, *_):
            raise RuntimeError("connection reset by peer")

    monkeypatch.setattr(made[0], "_store", Gone())
    with pytest.raises(CommunicationError, match="connection reset"):
        made[0].arrive("b").result(timeout=DEADLINE_S)


def test_the_same_waits_from_modelled_clocks():
    cluster, delays_s = VirtualCluster(3), [0.0, 5.0, 2.0]

    def start(transport):
        transport.charge(delays_s[transport.rank])
        waited = transport.open_arrival_counter()("b")
        yield from ()
        return waited

    waited = cluster.run(start)
    assert cluster.clock_s == delays_s, "measuring takes no time"
    assert [each.result() for each in waited] == [5.0, 0.0, 3.0]


def test_an_arrival_that_is_read_after_a_later_one_is_settled(counters, monkeypatch):
    made = counters(2)
    store = made[0]._store

    class Late:
        def get(self, key):
            found = store.get(key)
            return found if int(found) == 2 else b"0"

        def __getattr__(self, name):
            return getattr(store, name)

    monkeypatch.setattr(made[0], "_store", Late())
    waits = [made[0].arrive("b") for _ in range(2)]
    time.sleep(LATE_S / 4)  # it is not the last one to count
    waits += [made[1].arrive("b") for _ in range(2)]
    for wait in waits:
        wait.result(timeout=DEADLINE_S)
