"""Over real gloo ranks: pairwise exchange, and the pool of process groups.

Members of a group may be in other groups; returned groups are reused.
"""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_sparse.errors import CommunicationError, ConfigError
from megatron_sparse.transport import ProcessGroupTransport, groups
from megatron_sparse.transport.groups import borrow_group, return_group
from megatron_sparse.transport.operation import Waiters
from tests.ranks import on_ranks
from tests.waiting import DEADLINE_S


@on_ranks(3)
def test_exchange_moves_the_given_tensors(rank):
    """Uneven sizes to all peers at once, every dtype, empty tensors, tags out of order."""
    transport = ProcessGroupTransport(dist.group.WORLD, 30, torch.device("cpu"))
    assert transport.nodes == (0, 0, 0), "all ranks of this test share a host"
    target, source = peers = [(rank + 1) % 3, (rank - 1) % 3]
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64):
        sends = [(peer, torch.full((1000 * rank + peer,), rank + 1, dtype=dtype)) for peer in peers]
        receives = [(peer, torch.zeros(1000 * peer + rank, dtype=dtype)) for peer in peers]
        work = transport.exchange(sends, receives, tag=7)
        while not work.ready():
            time.sleep(0.001)
        work.finish()
        for peer, values in receives:
            assert bool((values == peer + 1).all()), (dtype, peer)
    got = [torch.zeros(3), torch.zeros(5)]
    first = transport.exchange([(target, torch.full((3,), 1.0))], [(source, got[0])], tag=1)
    # Its messages are waited for before those of the other tag.
    second = transport.exchange([(target, torch.full((5,), 2.0))], [(source, got[1])], tag=2)
    for work in (second, first):
        work.finish()
    assert [values.tolist() for values in got] == [[1.0] * 3, [2.0] * 5]
    nothing = transport.exchange([(target, torch.zeros(0))], [(source, torch.zeros(0))], tag=3)
    assert nothing.ready()
    nothing.finish()
    transport.close()


def _sum_of_ones(group):
    values = torch.ones(1)
    dist.all_reduce(values, group=group)
    return values.item()


@on_ranks(2)
def test_members_of_different_numbers_of_groups_connect_and_a_returned_group_is_reused(rank):
    if rank == 0:  # Like a pipeline stage that is in more groups than the others.
        dist.new_group([0], use_local_synchronization=True)
    first, second = (borrow_group([0, 1], "gloo", 20.0) for _ in range(2))
    assert first is not second
    assert _sum_of_ones(first) == _sum_of_ones(second) == 2.0
    return_group(first)
    assert borrow_group([0, 1], "gloo", 20.0) is first


@on_ranks(3)
def test_ranks_that_do_not_come_are_named(rank):
    if rank == 1:
        return
    with pytest.raises(CommunicationError, match=r"got: +ranks \[1\] have not come"):
        borrow_group([0, 1, 2], "gloo", 1.0)


@on_ranks(2)
def test_groups_of_some_ranks_leave_the_names_of_later_groups_of_the_host_alone(rank):
    if rank == 0:  # Like a pipeline stage that trains parameters while the others are frozen.
        borrow_group([0], "gloo", 20.0)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=DEADLINE_S / 2))
    assert _sum_of_ones(group) == 2.0


def test_groups_of_a_default_group_that_has_ended_are_not_lent():
    """Even if the next default group has the same address, which is common."""
    addresses = set()
    for _ in range(20):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        addresses.add(id(dist.group.WORLD))
        group = borrow_group([0, 1], "fake", 20.0)
        assert dist.get_process_group_ranks(group) == [0, 1]
        return_group(group)
        del group
        dist.destroy_process_group()
    assert len(addresses) < 20


@on_ranks(2)
def test_a_group_in_which_an_operation_failed_is_not_lent_again(rank):
    broken = borrow_group([0, 1], "gloo", 20.0)
    return_group(broken, broken=True)
    assert borrow_group([0, 1], "gloo", 20.0) is not broken


def test_no_wait_stands_behind_another():
    waiters, event = Waiters(), threading.Event()
    behind = [waiters.submit(lambda: event.wait() and None) for _ in range(40)]
    waiters.submit(event.set).result(DEADLINE_S)
    for waiting in behind:
        waiting.result(DEADLINE_S)
    waiters.close()


@on_ranks(2)
def test_the_nccl_engine_is_refused_on_a_cpu_before_a_group_is_made(rank):
    with pytest.raises(ConfigError, match=r"scheme\.nccl_engine=true without NCCL"):
        ProcessGroupTransport(dist.group.WORLD, 30, torch.device("cpu"), nccl_engine=True)
    assert not groups._lent
