"""NCCL's failures as typed errors, with groups and a store that stand in for the real ones."""

import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_sparse.errors import CommunicationError, ConfigError
from megatron_sparse.transport import ProcessGroupTransport, nccl_errors
from megatron_sparse.transport.nccl_errors import (
    ENVIRONMENT,
    HealthCheck,
    as_typed,
    check_environment,
)

CPU = torch.device("cpu")
ErrorType = _distributed_c10d.ErrorType


class Backend:
    """Of one group."""

    def __init__(self, error: Any = ErrorType.SUCCESS) -> None:
        self.error = error

    def get_error(self) -> Any:
        return self.error


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def health_check(
    *backends: Backend, gone: str | None = None, timeout_s: float = 30.0
) -> HealthCheck:
    def groups() -> Iterator[tuple[str, Backend]]:
        for number, backend in enumerate(backends):
            yield f"tensor{number} (ranks 0, 1)", backend

    return HealthCheck(timeout_s, lambda: gone, CPU, groups)


@pytest.mark.parametrize(
    ("error", "got"),
    [
        (ErrorType.TIMEOUT, "did not finish in time"),
        (ErrorType.COMM_ERROR, "NCCL has reported an error to this rank"),
        (ErrorType.REMOTE_ERROR, "another rank of the group"),
    ],
)
def test_a_failed_group_is_named(error: Any, got: str) -> None:
    failing = Backend()
    health = health_check(Backend(), failing)
    health.check("the optimizer's step")
    failing.error = error
    with pytest.raises(
        CommunicationError, match=r"group tensor1 \(ranks 0, 1\) has failed"
    ) as caught:
        health.check("the optimizer's step")
    assert "before the optimizer's step" in caught.value.what
    assert got in str(caught.value.got)
    assert "last checkpoint" in str(caught.value.remedy)


def test_the_rank_that_is_gone_is_named_where_it_is_known() -> None:
    with pytest.raises(CommunicationError, match="rank 3 has died"):
        health_check(Backend(ErrorType.TIMEOUT), gone="rank 3 has died").check("a checkpoint")


def agree(health_of: dict[int, HealthCheck], times: int = 1) -> list[Any]:
    """These ranks of three, in threads with clients of one store, agree; returns their errors."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    begun = threading.Barrier(len(health_of))

    def run(rank: int) -> BaseException | None:
        client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        begun.wait()  # each rank has a thread of its own
        try:
            for _ in range(times):
                health_of[rank].agree("a checkpoint", client, rank, 3)
        except BaseException as error:
            return error
        return None

    with ThreadPoolExecutor(len(health_of)) as pool:
        return list(pool.map(run, health_of))


@pytest.fixture(autouse=True)
def first_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that are ranks would share the process's count of agreements."""

    class Numbers(threading.local):
        def __init__(self) -> None:
            self.numbers = itertools.count()

        def __next__(self) -> int:
            return next(self.numbers)

    monkeypatch.setattr(nccl_errors, "_agreements", Numbers())


def test_ranks_that_are_well_save_as_often_as_they_like() -> None:
    assert agree({rank: health_check(Backend()) for rank in range(3)}, times=3) == [None] * 3


def test_no_rank_saves_if_one_ranks_group_has_failed() -> None:
    """Its invalid values may have reached the others through healthy groups."""
    errors = (ErrorType.SUCCESS, ErrorType.TIMEOUT, ErrorType.SUCCESS)
    raised = agree({rank: health_check(Backend(error)) for rank, error in enumerate(errors)})
    assert all(isinstance(error, CommunicationError) for error in raised)
    assert "NCCL group tensor0" in str(raised[1])
    for rank in (0, 2):
        assert "on rank 1: NCCL group tensor0" in str(raised[rank])


def test_no_rank_saves_if_one_does_not_come() -> None:
    late = [health_check(Backend(), gone="rank 1 has died", timeout_s=0.5) for _ in range(2)]
    for error in agree({0: late[0], 2: late[1]}):
        assert isinstance(error, CommunicationError)
        assert "not all ranks have reached a checkpoint: rank 1 has died" in str(error)
        assert error.got == "2 ranks"


def test_groups_are_checked_after_the_device_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that arises while the device is busy must be found."""
    backend = Backend()
    device = torch.device("cuda", 0)

    def synchronize(which: torch.device) -> None:
        assert which == device
        backend.error = ErrorType.TIMEOUT

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    health = HealthCheck(30, lambda: None, device, lambda: iter([("world", backend)]))
    health.check("the optimizer's step")
    with pytest.raises(CommunicationError, match="NCCL group world has failed"):
        health.agree("a checkpoint", HashStore(), 0, 1)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        *(
            (name, value, "megatron-sparse train")
            for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_PROPAGATE_ERROR")
            for value in (None, "3")
        ),
        ("TORCH_DIST_USE_NCCL2", "1", "unset TORCH_DIST_USE_NCCL2"),
    ],
)
def test_an_unsuitable_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, remedy: str
) -> None:
    """With the last one, NCCL is another backend."""
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0")
    check_environment(os.environ)
    health_check()
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"nccl_errors=typed with {name}={value}") as caught:
        health_check()
    assert remedy in str(caught.value.remedy)
    assert name != "TORCH_DIST_USE_NCCL2" or "ProcessGroupNCCL" in str(caught.value.expected)


def test_torchs_own_error_becomes_a_typed_one() -> None:
    with (
        pytest.raises(CommunicationError, match="an operation of NCCL failed") as caught,
        as_typed(),
    ):
        raise dist.DistBackendError("NCCL communicator was aborted on rank 0.\nmore")
    assert caught.value.got == "NCCL communicator was aborted on rank 0."
    with pytest.raises(ZeroDivisionError), as_typed():
        raise ZeroDivisionError


def test_torch_has_the_functions_in_use() -> None:
    assert {"SUCCESS", *nccl_errors._WHAT} == set(ErrorType.__members__)
    nccl = getattr(_distributed_c10d, "ProcessGroupNCCL", None)
    if nccl is not None:
        assert hasattr(nccl, "get_error")


def test_torch_declares_the_watchdog_that_the_check_relies_on() -> None:
    header = (
        Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    )
    if not header.is_file():
        pytest.skip("a torch without NCCL")
    text = header.read_text()
    assert "class Watchdog {" in text
    assert "CleanUpOnly = 2," in text
    for name in ENVIRONMENT:
        assert f'"{name}"' in text


def test_groups_of_the_cpu_are_left_out() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        assert list(nccl_errors.nccl_groups()) == []
    finally:
        dist.destroy_process_group()


class Group:
    """One whose CUDA tensors a given backend serves."""

    group_desc = "megatron_sparse"

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def _get_backend(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        return self.backend


def serving(monkeypatch: pytest.MonkeyPatch, backend: Any, name: str = "nccl") -> Group:
    """The process's only group."""
    group = Group(backend)
    world = type("World", (), {"pg_map": {group: None}, "pg_names": {group: "7"}})
    monkeypatch.setattr(dist.distributed_c10d, "_world", world)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: list(range(0, 20, 2)))
    monkeypatch.setattr(dist, "get_backend", lambda _: name)
    return group


class ProcessGroupNCCL2(Backend):
    """Has `get_error` too, and tells nothing by it before it ends the process."""


def test_a_group_whose_errors_mean_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the check is made, and if the group is made later; it was left out without a word."""
    groups = nccl_errors.nccl_groups
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
    serving(monkeypatch, Backend())
    health = HealthCheck(30, lambda: None, CPU, groups)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("Legacy", (), {}))
    serving(monkeypatch, ProcessGroupNCCL2(), "nccl2")
    for look in (
        lambda: HealthCheck(30, lambda: None, CPU, groups),
        lambda: health.check("the optimizer's step"),
    ):
        with pytest.raises(ConfigError, match="nccl_errors=typed with the group") as caught:
            look()
        assert caught.value.got == "nccl2 (ProcessGroupNCCL2)"
        assert "ProcessGroupNCCL" in str(caught.value.expected)


@pytest.mark.parametrize("supported", [False, True])
def test_the_engine_names_its_backend(monkeypatch: pytest.MonkeyPatch, supported: bool) -> None:
    """The name is nccl for both: TORCH_DIST_USE_NCCL2=1."""
    legacy = Backend if supported else type("Legacy", (), {})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", legacy, raising=False)
    group: Any = serving(monkeypatch, Backend())

    class ReachedError(Exception):
        pass

    def get_rank() -> int:
        raise ReachedError

    monkeypatch.setattr(dist, "get_rank", get_rank)
    with pytest.raises(ReachedError if supported else ConfigError) as caught:
        ProcessGroupTransport(group, 30, torch.device("cuda"), nccl_engine=True)
    if not supported:
        assert "scheme.nccl_engine=true with the group megatron_sparse" in str(caught.value)
        assert "nccl (Backend)" in str(caught.value)
    with pytest.raises(ReachedError):
        ProcessGroupTransport(group, 30, torch.device("cuda"))


@pytest.mark.parametrize("wrapped", [False, True])
def test_every_group_that_can_fail_is_checked(
    monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    backend = Backend()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)

    serving(monkeypatch, SimpleNamespace(wrapped_pg=backend) if wrapped else backend)
    name = "megatron_sparse (ranks 0, 2, 4, 6, 8, 10, 12, 14, ... of 10)"
    assert list(nccl_errors.nccl_groups()) == [(name, backend)]
