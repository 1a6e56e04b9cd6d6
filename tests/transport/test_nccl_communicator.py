"""The plugin's own NCCL communicator: making, monitoring and ending it."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_sparse.errors import CommunicationError, ConfigError, DependencyError
from megatron_sparse.transport import ProcessGroupTransport, nccl_communicator, nccl_library
from megatron_sparse.transport.nccl_communicator import NcclCommunicator, require_supported
from megatron_sparse.transport.nccl_library import NcclLibrary, loaded_nccl
from tests import fake_nccl
from tests.waiting import DEADLINE_S, until

GPU = torch.device("cuda:0")


class Deadline:
    """A stand-in for a call, which the test completes."""

    def __init__(self, name: str) -> None:
        self.name, self.over = name, False

    def is_hopeless(self) -> bool:
        return self.over

    def error(self, cause: Exception | None = None) -> CommunicationError:
        return CommunicationError(f"{self.name} failed", got=cause)


class Event:
    """A stand-in for a CUDA event, which the test completes."""

    done = True
    fails = False

    def record(self) -> None: ...

    def query(self) -> bool:
        if Event.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return Event.done


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fake_nccl.build(tmp_path_factory.mktemp("nccl"))


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "done", True)
    monkeypatch.setattr(Event, "fails", False)


def make(fake: Any, ranks: int, come: int, timeout_s: float = 30) -> list[Any]:
    """The communicators of the first ranks that join, or the errors of making them."""
    told: list[bytes] = []
    heard = threading.Barrier(come)
    deadlines: dict[int, list[Deadline]] = {rank: [] for rank in range(come)}

    def join(rank: int) -> Any:
        def broadcast(text: bytes) -> bytes:
            if rank == 0:
                told.append(text.ljust(1024))
            heard.wait(DEADLINE_S)
            return told[0]

        def deadline(name: str) -> Deadline:
            deadlines[rank].append(Deadline(name))
            return deadlines[rank][-1]

        try:
            made = NcclCommunicator(
                NcclLibrary(fake), rank, ranks, GPU, timeout_s, broadcast, deadline
            )
        except CommunicationError as error:
            return error
        made.deadlines = deadlines[rank]
        made.is_aborted = lambda: fake.fake_nccl_is_aborted(made.words[2].item())
        return made

    with ThreadPoolExecutor(come) as pool:
        return list(pool.map(join, range(come)))


@pytest.fixture
def communicator(fake: Any) -> Iterator[Any]:
    """Of one rank; closed as a broken one unless the test has closed it."""
    (made,) = make(fake, 1, 1)
    yield made
    made.close(broken=True)


def post(communicator: Any) -> None:
    """A call that NCCL takes at once."""
    with communicator.call("sum of bucket b") as require:
        require(nccl_library.SUCCESS)


def test_torchs_own_nccl_has_every_function() -> None:
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    library = loaded_nccl()
    assert all(library.addresses)
    assert len(set(library.addresses)) == len(nccl_library.POSTING)
    assert "no error" in library.words(nccl_library.SUCCESS)


def test_a_torch_without_it_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_library, "SONAME", "libnot_there.so.2")
    with pytest.raises(DependencyError, match=r"libnot_there\.so\.2"):
        loaded_nccl.__wrapped__()


def test_all_ranks_join_and_leave(fake: Any) -> None:
    made = make(fake, 3, 3)
    assert [each.words[:2].tolist() for each in made] == [[rank, 3] for rank in range(3)]
    assert len({each.words[2].item() for each in made}) == 3
    for each in made:
        post(each)
        each.check()
        each.close()
        each.close()
        assert not each._monitor.is_alive()


def test_a_rank_that_does_not_join_is_an_error_in_time(fake: Any) -> None:
    began_s = time.monotonic()
    raised = make(fake, 3, 2, timeout_s=1)
    assert 1 <= time.monotonic() - began_s < DEADLINE_S
    assert all(isinstance(each, CommunicationError) for each in raised)
    assert all("all 3 ranks within scheme.timeout_s (1 s)" in str(each) for each in raised)


def test_a_kernel_that_does_not_end_has_a_deadline(communicator: Any) -> None:
    """The host's part is done; the device waits for the peer."""
    Event.done = False
    post(communicator)
    time.sleep(0.3)
    communicator.check()
    communicator.deadlines[0].over = True
    until(communicator.is_aborted)
    with pytest.raises(CommunicationError, match="sum of bucket b failed"):
        communicator.check()
    with (
        pytest.raises(CommunicationError, match="sum of bucket b failed"),
        communicator.call("another"),
    ):
        pytest.fail("it is refused before anything is posted")


def test_an_abort_waits_for_a_call_that_is_being_posted(communicator: Any) -> None:
    """Aborting frees the communicator that C++ is using."""
    with communicator.call("sum of bucket b") as require:
        communicator.deadlines[0].over = True
        until(lambda: communicator._error is not None)
        time.sleep(0.2)
        assert not communicator.is_aborted()
        require(nccl_library.SUCCESS)
    until(communicator.is_aborted)


def test_an_abort_frees_a_call_that_nccl_keeps(
    communicator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_communicator, "POSTING_S", 0.1)
    with communicator.call("sum of bucket b"):
        communicator.deadlines[0].over = True
        until(communicator.is_aborted)


def test_the_monitor_works_on_the_ranks_device(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: dict[str, torch.device] = {}
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: devices.setdefault(threading.current_thread().name, device),
    )
    (communicator,) = make(fake, 1, 1)
    until(lambda: "megatron_sparse_nccl" in devices)
    communicator.close()
    assert devices["megatron_sparse_nccl"] == GPU


def test_a_device_that_fails_is_an_error_and_the_monitor_goes_on(communicator: Any) -> None:
    Event.fails = True
    post(communicator)
    until(lambda: communicator._error is not None)
    with pytest.raises(CommunicationError, match="illegal memory access"):
        communicator.check()
    assert communicator.is_aborted()


def test_a_completed_call_has_no_deadline(fake: Any, communicator: Any) -> None:
    post(communicator)
    until(lambda: not communicator._pending)
    communicator.deadlines[0].over = True
    fake.fake_nccl_notice(communicator.words[2].item(), 6)
    time.sleep(0.3)
    communicator.check()
    communicator.close()


def test_closing_a_broken_group_waits_for_nothing(communicator: Any) -> None:
    Event.done = False
    post(communicator)
    began_s = time.monotonic()
    communicator.close(broken=True)
    assert time.monotonic() - began_s < DEADLINE_S
    assert communicator.is_aborted()


def test_a_call_that_fails_before_it_is_queued_leaves_nothing_behind(communicator: Any) -> None:
    with pytest.raises(ValueError, match="no such plan"), communicator.call("sum"):
        raise ValueError("no such plan")
    communicator.deadlines[0].over = True
    time.sleep(0.3)
    communicator.check()
    communicator.close()


@pytest.mark.parametrize("wrapped", [False, True])
def test_another_backend_of_the_name_nccl_is_refused(
    monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    """The name is nccl for both: TORCH_DIST_USE_NCCL2=1."""
    legacy, other = type("Legacy", (), {}), type("ProcessGroupNCCL2", (), {})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", legacy, raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(dist, "get_rank", lambda: pytest.fail("it was let through"))
    for kind in (legacy, other):
        backend: Any = SimpleNamespace(wrapped_pg=kind()) if wrapped else kind()
        group: Any = SimpleNamespace(
            group_desc="megatron_sparse",
            _get_backend=lambda device, found=backend: {"cuda": found}[device.type],
        )
        if kind is legacy:
            require_supported(group)
            continue
        with pytest.raises(ConfigError, match="nccl_engine=true with the group meg") as caught:
            ProcessGroupTransport(group, 30, GPU, nccl_engine=True)
        assert caught.value.got == "nccl (ProcessGroupNCCL2)"
