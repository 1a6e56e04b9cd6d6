"""On CUDA: which stream a bucket's work is on, what it waits for, and who launches it."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives import POSTED, QUEUED
from megatron_sparse.errors import CommunicationError, WireFormatError
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.recording import StageTimer
from megatron_sparse.reduction.job import GATE, INSIDE, LOCAL, Pending, Stage, used_here
from megatron_sparse.reduction.progress import (
    QUEUES,
    InOrderProgress,
    Progress,
    ProgressThread,
    progress_on,
)
from megatron_sparse.reduction.reducer import MessageTurns
from tests.reduction.fake_cuda import DEVICE, Driver, Event, FakeCuda, StreamWork, drivers
from tests.reduction.test_progress import ManualWork, fails, submit


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.fixture
def driver() -> Driver:
    return InOrderProgress


@pytest.fixture
def progress(cuda: FakeCuda, driver: Driver) -> Iterator[Progress]:
    made = driver(DEVICE, 30)
    yield made
    made.close()


def bucket(cuda: FakeCuda, name: str, report: ManualWork | None = None) -> Stage[None]:
    """A bucket's job: select, exchange, decode, and in capacity mode a report."""
    cuda.note(f"select {name}")
    yield GATE
    cuda.note(f"post {name}")
    yield POSTED
    yield StreamWork(lambda: cuda.note(f"arrival of {name}"))
    cuda.note(f"decode {name}")
    if report is not None:
        yield QUEUED
        yield report


@drivers
def test_the_next_bucket_is_selected_beside_the_exchange_of_the_last(
    cuda: FakeCuda, progress: Progress
) -> None:
    for name in "ab":
        cuda.note(f"gradient {name}")
        submit(progress, name, bucket(cuda, name)).wait()
        cuda.note(f"use of {name}")
    for name in "ab":
        order = ["gradient", "select", "post", "arrival of", "decode", "use of"]
        streams = ["launching", "codec", "network", "network", "network", "launching"]
        steps = [f"{stream}: {step} {name}" for stream, step in zip(streams, order, strict=True)]
        cuda.assert_order(steps)
    assert cuda.precedes("network: decode a", "network: post b")


def test_a_selection_does_not_wait_for_an_exchange(cuda: FakeCuda, progress: Progress) -> None:
    first = submit(progress, "a", bucket(cuda, "a"))
    second = submit(progress, "b", bucket(cuda, "b"))
    assert not cuda.precedes("network: post a", "codec: select b")
    assert cuda.precedes("codec: select a", "codec: select b")
    first.wait()
    second.wait()


@drivers
def test_above_level_rank_a_bucket_is_added_up_and_selected_beside_the_exchange_of_the_last(
    cuda: FakeCuda, progress: Progress
) -> None:
    def above_rank(name: str) -> Stage[None]:
        cuda.note(f"average {name}")
        yield INSIDE
        yield StreamWork(lambda: cuda.note(f"sum {name}"))
        yield LOCAL
        yield from bucket(cuda, name)

    pending = [submit(progress, name, above_rank(name)) for name in "ab"]
    for each in pending:
        each.wait()
    for name in "ab":
        steps = ["codec: average", "inside: sum", "codec: select", "network: post"]
        cuda.assert_order([f"{step} {name}" for step in steps])
    for step in ("inside: sum b", "codec: select b"):
        assert not cuda.precedes("network: post a", step)
    assert cuda.precedes("network: decode a", "network: post b")


@drivers
def test_a_bucket_takes_over_the_buffers_of_the_last_but_one(
    cuda: FakeCuda, progress: Progress
) -> None:
    buffers, pending = MessageBuffers(), []
    turns = MessageTurns(buffers)
    with FakeTensorMode():
        gradient = torch.empty(8, device="cuda")
        for name in "abcd":
            launched = Bucket(name, gradient, (), CollectiveOp.ALL_REDUCE, 2)
            pending.append(Pending(name, bucket(cuda, name), StageTimer()))
            turns.take(launched, pending[-1])
            progress.submit(pending[-1])
            buffers.take_own("message", launched, 100)
    for each in pending:
        each.wait()
    assert buffers.by_purpose() == {"message": 200}
    for before, after in ("ac", "bd"):
        assert cuda.precedes(f"network: decode {before}", f"codec: select {after}")
    for before, after in ("ab", "bc", "cd"):
        assert not cuda.precedes(f"network: post {before}", f"codec: select {after}")


@pytest.mark.parametrize("driver", [ProgressThread])
def test_a_bucket_without_buffers_waits_for_the_host_s_part_too(
    cuda: FakeCuda, progress: Progress
) -> None:
    """Where sizes are exchanged, the work of a bucket is queued bit by bit."""
    sizes = ManualWork()

    def exchanging():
        yield GATE
        yield sizes
        cuda.note("decode a")

    first = submit(progress, "a", exchanging())
    second = Pending("b", bucket(cuda, "b"), StageTimer())
    second.after = first
    progress.submit(second)
    assert not second.done()
    sizes.event.set()
    second.wait()
    assert cuda.precedes("network: decode a", "codec: select b")
    first.wait()


@drivers
def test_a_queued_bucket_can_be_used_before_its_report_has_come(
    cuda: FakeCuda, progress: Progress
) -> None:
    report, ended = ManualWork(), threading.Event()
    pending = Pending("a", bucket(cuda, "a", report), StageTimer(), on_done=lambda _: ended.set())
    progress.submit(pending)
    pending.wait_until_queued()
    cuda.note("use of a")
    assert cuda.precedes("network: decode a", "launching: use of a")
    assert not pending.done()
    assert not ended.is_set()
    assert report.reads == 0
    report.event.set()
    pending.confirm()
    assert report.reads == 1
    assert ended.is_set()


@drivers
def test_an_error_in_a_report_surfaces_when_it_is_read_and_stops_what_follows(
    cuda: FakeCuda, progress: Progress
) -> None:
    report = ManualWork(WireFormatError("a bad record", expected="a good one", got="another"))
    pending = submit(progress, "a", bucket(cuda, "a", report))
    pending.wait_until_queued()
    report.event.set()
    with pytest.raises(WireFormatError, match="bucket a: a bad record"):
        pending.confirm()
    assert progress.broken
    fails(submit(progress, "b", bucket(cuda, "b")), "bucket b was not synchronised")


def test_the_launching_thread_launches_all_device_work_in_order(
    cuda: FakeCuda, progress: Progress
) -> None:
    threads = []

    def job():
        threads.append(threading.current_thread())
        yield from bucket(cuda, "a", ManualWork())

    submit(progress, "a", job())
    assert threads == [threading.current_thread()]
    assert cuda.log[-2:] == ["network: decode a", "network: record network1"]
    cuda.note("a collective of the tensor-parallel group")
    submit(progress, "b", bucket(cuda, "b", ManualWork()))
    launches = [line for line in cuda.log if " record " not in line and " wait " not in line]
    one, other = (
        [f"{what} {name}" for what in ("select", "post", "arrival of", "decode")] for name in "ab"
    )
    between = "a collective of the tensor-parallel group"
    assert [line.split(": ")[1] for line in launches] == [*one, between, *other]


def test_an_error_while_launching_surfaces_in_the_wait(cuda: FakeCuda, progress: Progress) -> None:
    def job():
        yield GATE
        raise CommunicationError("rank 1 is gone", expected="all ranks", got="none")

    pending = submit(progress, "a", job())
    for wait in (pending.wait_until_queued, pending.confirm):
        with pytest.raises(CommunicationError, match="bucket a: rank 1 is gone"):
            wait()
    progress.close()
    fails(submit(progress, "b", bucket(cuda, "b")), "an earlier failure")


def test_closing_beside_work_that_never_ends_breaks_the_group(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that is not broken is destroyed, which waits for its work."""
    monkeypatch.setattr("megatron_sparse.reduction.progress.CLOSING_S", 0.1)
    for has_ended in (True, False):
        cuda.made = 0
        monkeypatch.setattr(Event, "has_ended", has_ended)
        progress = InOrderProgress(DEVICE, 30)
        submit(progress, "a", bucket(cuda, "a", ManualWork()))
        progress.close()
        assert progress.broken is not has_ended


@pytest.mark.parametrize(
    ("queues", "device", "driver"),
    [
        ("1", DEVICE, InOrderProgress),
        ("8", DEVICE, ProgressThread),
        (None, DEVICE, ProgressThread),
        ("1", torch.device("cpu"), ProgressThread),
    ],
)
def test_one_hardware_queue_takes_the_launching_thread(
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    queues: str | None,
    device: torch.device,
    driver: type,
) -> None:
    monkeypatch.delenv(QUEUES, raising=False)
    if queues is not None:
        monkeypatch.setenv(QUEUES, queues)
    progress = progress_on(device, 30)
    assert type(progress) is driver
    progress.close()


def test_memory_that_crosses_the_gate_is_named_to_the_allocator(cuda: FakeCuda) -> None:
    class OnGpu:
        device = DEVICE

        def record_stream(self, stream) -> None:
            cuda.note(f"keep until {stream.name}")

    used_here([OnGpu(), torch.zeros(1)])  # type: ignore[list-item]
    assert cuda.log == ["launching: keep until launching"]
