"""A failed NCCL group as a typed error: the watchdog's settings, and a health check of all groups.

By default torch's watchdog ends the process when an operation of NCCL fails or times out. With
`scheme.nccl_errors=typed` it only aborts the group's communicator (`ENVIRONMENT`), and
`HealthCheck` asks every NCCL group of the process, Megatron's too, for errors: before the optimizer
steps, and before a checkpoint is saved.

The check relies on the order in which the watchdog of torch's `ProcessGroupNCCL` acts (its source
was read in torch 2.11 to 2.13; 2.14 declares the same): it sets the group's
error; with TORCH_NCCL_PROPAGATE_ERROR it tells the group's other members, whose watchdogs set
theirs; it sleeps four times TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC; it aborts the communicator. Only
then does a stream that waits for the operation go on, with undefined values in its buffers. So the
group's error is always set before such values can be read.

Other NCCL backends are refused, here and by the engine. torch 2.14 adds two that are written anew,
`nccl2` and `nccl-lazy`, and can make `nccl` an alias of the former (`TORCH_DIST_USE_NCCL2=1`).
Their thread aborts the communicator, and as a rule the process with it, as soon as it finds an
error, and tells no other rank. So an error could not be typed, and a checkpoint could hold the
results of an aborted operation.

The host runs ahead of the device, so a step that was queued before the error may still change
weights with such values, and, through groups that are healthy, other ranks' weights too. The
weights in memory are therefore invalid after an error, and no checkpoint may be written after one:
`HealthCheck.agree` waits for the device, checks all groups of this process, and lets no rank go on
before all ranks have done so. A rank reports that it is healthy only after all its sends are done.

Costs: a check takes one lock for each group; an agreement one device synchronisation and two words
to the store, for each save. With propagation each watchdog polls the store ten times a second.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.errors import CommunicationError, ConfigError

TYPED_ERRORS = "scheme.nccl_errors=typed"
ENGINE = "scheme.nccl_engine=true"
SUPPORTED = "the backend nccl, as torch's ProcessGroupNCCL"
SWITCH = "TORCH_DIST_USE_NCCL2"

ENVIRONMENT = {
    # Abort communicators, leave the process alone (CleanUpOnly of ProcessGroupNCCL.hpp).
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_PROPAGATE_ERROR": "1",
    # The watchdog sleeps four times this before it aborts: 60 s by default.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000",
}
"""For the ranks, before the first group is made. The heartbeat monitor stays on: it ends a process
whose watchdog is stuck, and one that still runs 8 minutes after an error."""
_NEEDED = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_PROPAGATE_ERROR")

REMEDY = "look at that rank's log, and restart from the last checkpoint"
_WHAT = {
    "TIMEOUT": "an operation of this rank did not finish in time",
    "COMM_ERROR": "NCCL has reported an error to this rank",
    "REMOTE_ERROR": "another rank of the group has reported an error",
}
_agreements = itertools.count()
"""Numbers the agreements; all ranks save in the same order, so the numbers match."""


def nccl_groups() -> Iterator[tuple[str, Any]]:
    """The name, for errors, and the backend of every NCCL group of this process.

    Groups whose CUDA tensors gloo serves are left out: its errors are exceptions.

    Raises:
        ConfigError: another backend serves a group, so its errors cannot be asked for.
    """
    world = dist.distributed_c10d._world
    gloo = getattr(dist, "ProcessGroupGloo", ())
    for group in list(world.pg_map):
        backend = cuda_backend(group)
        if backend is None or isinstance(backend, gloo):
            continue
        ranks = dist.get_process_group_ranks(group)
        name = f"{group.group_desc or world.pg_names[group]} (ranks {_listed(ranks)})"
        require_supported(TYPED_ERRORS, group, name)
        yield name, backend


def check_switch(setting: str, environment: Mapping[str, str]) -> None:
    """Refuses an environment in which torch's backend `nccl` is another one.

    Args:
        setting: `TYPED_ERRORS` or `ENGINE`.
        environment: of the ranks.

    Raises:
        ConfigError: `TORCH_DIST_USE_NCCL2` is 1.
    """
    if environment.get(SWITCH) == "1":
        raise ConfigError(
            f"{setting} with {SWITCH}=1",
            expected=SUPPORTED,
            got="nccl2 under the name nccl",
            remedy=f"unset {SWITCH}, or leave {setting.partition('=')[0]} out",
        )


def cuda_backend(group: dist.ProcessGroup) -> Any | None:
    """The backend that serves a group's CUDA tensors; None for a group of the CPU alone."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch checks each operation in a wrapper.
    return getattr(backend, "wrapped_pg", backend)


def require_supported(setting: str, group: dist.ProcessGroup, name: str) -> None:
    """Refuses a group whose CUDA tensors another backend than `ProcessGroupNCCL` serves.

    Args:
        setting: `TYPED_ERRORS` or `ENGINE`.
        group: of this process.
        name: of the group, for the error.

    Raises:
        ConfigError: names the backend.
    """
    backend = cuda_backend(group)
    if not isinstance(backend, getattr(dist, "ProcessGroupNCCL", ())):  # a torch may have none
        raise ConfigError(
            f"{setting} with the group {name}",
            expected=SUPPORTED,
            got=f"{dist.get_backend(group)} ({type(backend).__name__})",
            remedy="initialise torch.distributed with the backend nccl and without "
            f"{SWITCH}, or leave {setting.partition('=')[0]} out",
        )


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuses a process that the watchdog would end, or that would not learn of others' errors.

    Raises:
        ConfigError: a variable is not as in `ENVIRONMENT`, or `nccl` is another backend.
    """
    check_switch(TYPED_ERRORS, environment)
    for name in _NEEDED:
        if environment.get(name) != ENVIRONMENT[name]:
            raise ConfigError(
                f"scheme.nccl_errors=typed with {name}={environment.get(name)}",
                expected=f"{name}={ENVIRONMENT[name]} before torch.distributed is initialised",
                got=environment.get(name, "not set"),
                remedy="start with `megatron-sparse train`, which sets it; else export it for "
                "every rank, or leave scheme.nccl_errors out",
            )


class HealthCheck:
    """Asks the process's NCCL groups whether an operation has failed.

    Args:
        timeout_s: seconds that an agreement may take.
        gone: returns, in words, which rank is known to be gone; None while no rank is.
        device: the device; an agreement waits for its work.
        groups: returns the groups to check.

    Raises:
        ConfigError: the environment leaves errors to torch's own handling, or a group's backend is
            not supported.
    """

    def __init__(
        self,
        timeout_s: float,
        gone: Callable[[], str | None],
        device: torch.device,
        groups: Callable[[], Iterator[tuple[str, Any]]] = nccl_groups,
    ) -> None:
        check_environment(os.environ)
        self._timeout_s = timeout_s
        self._gone = gone
        self._device = device
        self._groups = groups
        for _ in groups():  # refuses backends that cannot be asked, before the first step
            pass

    def check(self, before: str) -> None:
        """Raises if a group has failed so far. The host does not wait.

        Args:
            before: the action that must not follow an error, for the message.

        Raises:
            CommunicationError: names the group, and the rank that is gone where that is known.
        """
        for name, backend in self._groups():
            error = backend.get_error()  # SUCCESS, or what its watchdog found first; never blocks
            if error.name != "SUCCESS":
                gone = self._gone()
                what = f"NCCL group {name} has failed before {before}"
                code = str(error.name)
                got = gone or _WHAT.get(code, code)
                raise _failed(what + (f": {gone}" if gone else ""), got)

    def agree(self, before: str, store: Any, rank: int, world_size: int) -> None:
        """Returns on all ranks when all groups of all ranks are healthy; else raises on all ranks.

        Collective. Waits for the device, which a failed operation blocks until its timeout.

        Args:
            before: the action that must not follow an error, for the message.
            store: shared by all ranks.
            rank: of this process.
            world_size: ranks that share the store.

        Raises:
            CommunicationError: a group has failed, here or on another rank, or a rank did not
                arrive in time.
        """
        key = f"megatron_sparse/nccl_is_well/{next(_agreements)}"
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        try:
            self.check(before)
        except CommunicationError as error:
            store.set(f"{key}/all", f"rank {rank}: {error.what}")
            raise
        if store.add(key, 1) == world_size:
            store.set(f"{key}/all", "")
        try:
            store.wait([f"{key}/all"], timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            gone = self._gone()
            raise CommunicationError(
                f"not all ranks have reached {before}" + (f": {gone}" if gone else ""),
                expected=f"{world_size} ranks within {self._timeout_s:g} s",
                got=f"{store.add(key, 0)} ranks",
                remedy=REMEDY,
            ) from error
        found = store.get(f"{key}/all").decode()
        if found:
            raise _failed(f"NCCL has failed before {before} on {found}", "see that rank's log")


@contextmanager
def as_typed() -> Iterator[None]:
    """Turns torch's error for an operation on an aborted communicator into a typed one.

    Raises:
        CommunicationError: in place of torch's `DistBackendError`.
    """
    try:
        yield
    except dist.DistBackendError as error:
        got = (str(error) or repr(error)).split("\n", 1)[0]
        raise _failed("an operation of NCCL failed", got) from error


def _failed(what: str, got: str) -> CommunicationError:
    expected = "every operation of every group to finish"
    return CommunicationError(what, expected=expected, got=got, remedy=REMEDY)


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    """The first ranks of a group, in words.

    Example:
        >>> _listed(range(16), most=2)
        '0, 1, ... of 16'
    """
    text = ", ".join(map(str, ranks[:most]))
    return text if len(ranks) <= most else f"{text}, ... of {len(ranks)}"
