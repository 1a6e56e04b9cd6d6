"""Reports of codec calls on their way to the host, without a GPU."""

import threading

import pytest
import torch

from megatron_sparse.cuda_ext.reports import HostCopy
from tests.waiting import DEADLINE_S


class Event:
    """A CUDA event that the test ends, or that fails."""

    def __init__(self, fails: bool = False) -> None:
        self._over, self._fails = threading.Event(), fails

    def end(self) -> None:
        self._over.set()

    def synchronize(self) -> None:
        self._over.wait(DEADLINE_S)
        if self._fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def copy_behind(event: Event) -> HostCopy:
    """As one that a CUDA device has queued."""
    copy = HostCopy([(torch.zeros(1, dtype=torch.int64), lambda words: None)])
    copy._copied = event  # type: ignore[assignment]
    return copy


def test_one_thread_on_the_right_device_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: devices.append((threading.current_thread().name, device)),
    )
    events = [Event(), Event(fails=True), Event()]
    woken = [threading.Event() for _ in events]
    copies = [copy_behind(event) for event in events]
    for copy, wake in zip(copies, woken, strict=True):
        copy.when_ready(wake.set)
    assert not any(each.is_set() for each in woken)
    for event in events:
        event.end()
    assert all(each.wait(DEADLINE_S) for each in woken), "an error of the device wakes too"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        copies[1].finish()
    assert devices == [("megatron_sparse_report", torch.device("cpu"))] * 3
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("megatron_sparse_report") == 1


def test_the_thread_outlives_a_device_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    for set_device in (fails, lambda device: None):
        monkeypatch.setattr(torch.cuda, "set_device", set_device)
        event, woken = Event(), threading.Event()
        event.end()
        copy_behind(event).when_ready(woken.set)
        assert woken.wait(DEADLINE_S)


def test_what_is_there_wakes_at_once() -> None:
    woken: list[bool] = []
    HostCopy([]).when_ready(lambda: woken.append(True))
    assert woken == [True]


def test_a_copy_that_was_waited_for_is_checked_once() -> None:
    """The thread that drives a job finishes its work, and so does the job itself."""
    looks: list[int] = []
    words = torch.tensor([0, 7])
    copy = HostCopy([(words, lambda words: looks.append(int(words[1])))])
    copy.finish()
    copy.finish()
    assert looks == [7]
