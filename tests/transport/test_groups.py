"""The pool of process groups: members may be in other groups; returned groups are reused."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_sparse.transport.groups import borrow_group, return_group
from tests.ranks import run_ranks


def _lend(rank, world_size):
    if rank == 0:  # Like a pipeline stage that is in more groups than the others.
        dist.new_group([0], use_local_synchronization=True)
    first, second = (borrow_group([0, 1], "gloo", 20.0) for _ in range(2))
    sums = []
    for group in (first, second):
        values = torch.ones(1)
        dist.all_reduce(values, group=group)
        sums.append(values.item())
    return_group(first)
    return sums, borrow_group([0, 1], "gloo", 20.0) is first, first is second


def test_members_of_different_numbers_of_groups_connect_and_a_returned_group_is_reused():
    assert run_ranks(_lend, 2) == [([2.0, 2.0], True, False)] * 2


def _host_makes_one_afterwards(rank, world_size):
    if rank == 0:  # Like a pipeline stage that trains parameters while the others are frozen.
        borrow_group([0], "gloo", 20.0)
    values = torch.ones(1)
    dist.all_reduce(values, group=dist.new_group([0, 1], timeout=timedelta(seconds=5)))
    return values.item()


def test_groups_of_some_ranks_leave_the_names_of_later_groups_of_the_host_alone():
    assert run_ranks(_host_makes_one_afterwards, 2) == [2.0, 2.0]


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
