"""The rule of the progress thread: posts in launch order, whichever job is ready first."""

import threading
import time

import pytest
import torch

from megatron_sparse.collectives import POSTED, UNORDERED
from megatron_sparse.errors import CommunicationError
from megatron_sparse.recording import StageTimer
from megatron_sparse.reduction.job import GATE, Pending
from megatron_sparse.reduction.progress import ProgressThread
from tests.waiting import DEADLINE_S, until


class ManualWork:
    """A work that ends when the test says so, with an error if there is one."""

    def __init__(self, error=None, *, ended=False):
        self.event = threading.Event()
        self.error, self.reads = error, 0
        if ended:
            self.event.set()

    def ready(self):
        return self.event.is_set()

    def when_ready(self, wake):
        """It wakes no thread: the progress thread must poll it."""

    def finish(self):
        self.reads += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def progress():
    thread = ProgressThread(torch.device("cpu"), timeout_s=30)
    yield thread
    thread.close()


def _job(name, log, works):
    log.append(f"{name} select")
    yield GATE
    for index, work in enumerate(works):
        log.append(f"{name} post{index}")
        if index == len(works) - 1:
            yield POSTED
        yield work
    log.append(f"{name} decode")


def submit(progress, name, job, timer=None):
    return progress.submit(Pending(name, job, timer or StageTimer()))


def fails(pending, words):
    with pytest.raises(CommunicationError, match=words):
        pending.wait()


def test_a_later_bucket_selects_but_does_not_post_before_an_earlier_one_has_posted(progress):
    log = []
    first, second = [ManualWork(), ManualWork()], [ManualWork()]
    a = submit(progress, "a", _job("a", log, first))
    b = submit(progress, "b", _job("b", log, second))
    second[0].event.set()
    until(lambda: "b select" in log)
    assert "b post0" not in log
    first[0].event.set()
    b.wait()
    assert not a.done()
    assert log.index("a post1") < log.index("b post0") < log.index("b decode")
    first[1].event.set()
    a.wait()
    assert log[-1] == "a decode"


def test_a_bucket_whose_other_posts_need_no_order_lets_the_next_one_post(progress):
    log, straggler, last = [], ManualWork(), ManualWork()

    def job():
        yield GATE
        log.append("a shakes hands")
        yield UNORDERED
        yield straggler
        log.append("a posts the rest")
        yield POSTED
        yield last

    a = submit(progress, "a", job())
    submit(progress, "b", _job("b", log, [ManualWork(ended=True)])).wait()
    assert log[0] == "a shakes hands"
    assert "a posts the rest" not in log
    straggler.event.set()
    last.event.set()
    a.wait()
    assert log[-1] == "a posts the rest"


def test_a_jobs_steps_are_charged_and_its_waiting_is_not(progress):
    """Computation counts in both clocks, sleep in a step only in the wall clock."""
    busy_s, asleep_s, waited_s = 0.1, 0.15, 0.4
    work, begun_s, posted = ManualWork(), [], []

    def job():
        begun_s.append(time.perf_counter())
        until_s = time.thread_time() + busy_s
        while time.thread_time() < until_s:
            pass
        yield GATE
        yield POSTED
        posted.append(True)
        yield work
        time.sleep(asleep_s)

    pending = submit(progress, "a", job())
    until(lambda: posted)
    time.sleep(waited_s)
    work.event.set()
    pending.wait()
    assert pending.host_cpu_s >= busy_s
    # Nothing but the loop keeps the processor busy, so neither the sleep nor the wait is in it.
    assert pending.host_cpu_s < busy_s + asleep_s / 2
    assert pending.host_wall_s >= busy_s + asleep_s
    assert pending.host_wall_s <= pending.finished_s - begun_s[0] - waited_s


def test_an_error_surfaces_in_wait_and_stops_all_that_follow(progress):
    log, work = [], ManualWork(CommunicationError("peer gone"))
    failing = submit(progress, "a", _job("a", log, [work]))
    waiting = submit(progress, "b", _job("b", log, [ManualWork()]))
    work.event.set()
    fails(failing, "bucket a: peer gone")
    fails(waiting, "bucket b was not synchronised")
    fails(submit(progress, "c", _job("c", log, [])), "bucket c was not synchronised")
    assert "c select" not in log


def test_an_error_of_a_work_that_is_asked_whether_it_is_ready_ends_the_job(progress):
    """As of an event on a device that has failed."""
    work = ManualWork()
    work.ready = lambda: [][0]
    failing = submit(progress, "a", _job("a", [], [work]))
    with pytest.raises(IndexError):
        failing.wait()
    assert progress.broken


def test_an_operation_that_never_ends_is_an_error_after_the_deadline(monkeypatch):
    monkeypatch.setattr("megatron_sparse.reduction.job.DEADLINE_SLACK_S", 0.0)
    progress = ProgressThread(torch.device("cpu"), timeout_s=0.1)
    pending = submit(progress, "a", _job("a", [], [ManualWork()]))
    fails(pending, "out of time")
    progress.close()


def test_network_time_is_recorded(progress):
    timer, work = StageTimer(), ManualWork()
    pending = submit(progress, "a", _job("a", [], [work]), timer)
    time.sleep(0.05)
    work.event.set()
    pending.wait()
    assert timer.times_us()["network"] >= 40_000


def test_close_does_not_wait_for_peers_that_never_come():
    """As on a rank that leaves a step because of an error: not the deadline of 455 s."""
    progress = ProgressThread(torch.device("cpu"), timeout_s=300)
    log = []
    posted = submit(progress, "a", _job("a", log, [ManualWork()]))
    queued = submit(progress, "b", _job("b", log, [ManualWork()]))
    until(lambda: "b post0" in log)
    start_s = time.monotonic()
    progress.close()
    assert time.monotonic() - start_s < DEADLINE_S
    assert progress.broken, "the group has operations under way and must not be used again"
    fails(posted, "bucket a: the reducer was closed while")
    fails(queued, "bucket b was not synchronised")


def test_close_ends_the_thread_after_pending_jobs():
    progress = ProgressThread(torch.device("cpu"), timeout_s=30)
    log = []
    submit(progress, "a", _job("a", log, [ManualWork(ended=True)]))
    progress.close()
    assert log[-1] == "a decode"
    fails(submit(progress, "b", _job("b", log, [])), "closed reducer")
