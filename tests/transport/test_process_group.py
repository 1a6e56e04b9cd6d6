"""Over real gloo ranks: pairwise exchange, and the pool of process groups.

Members of a group may be in other groups; returned groups are reused.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_sparse.transport import ProcessGroupTransport
from megatron_sparse.transport.groups import borrow_group, return_group
from tests.ranks import run_ranks
from tests.waiting import DEADLINE_S


def _exchanges(rank, world_size):
    """Uneven sizes to all peers at once, every dtype, empty tensors, tags out of order."""
    transport = ProcessGroupTransport(dist.group.WORLD, 30, torch.device("cpu"))
    peers = [peer for peer in range(world_size) if peer != rank]
    results = {}
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64):
        sends = [(peer, torch.full((1000 * rank + peer,), rank + 1, dtype=dtype)) for peer in peers]
        receives = [(peer, torch.zeros(1000 * peer + rank, dtype=dtype)) for peer in peers]
        work = transport.exchange(sends, receives, tag=7)
        while not work.ready():
            time.sleep(0.001)
        work.finish()
        results[str(dtype)] = {peer: tensor.unique().tolist() for peer, tensor in receives}
    target, source = (rank + 1) % world_size, (rank - 1) % world_size
    got = [torch.zeros(3), torch.zeros(5)]
    first = transport.exchange([(target, torch.full((3,), 1.0))], [(source, got[0])], tag=1)
    # The other tag's messages are posted in another order on odd ranks.
    second = transport.exchange([(target, torch.full((5,), 2.0))], [(source, got[1])], tag=2)
    for work in (second, first):
        work.finish()
    nothing = transport.exchange([(target, torch.zeros(0))], [(source, torch.zeros(0))], tag=3)
    assert nothing.ready()
    nothing.finish()
    transport.close()
    return results, [tensor.tolist() for tensor in got], transport.nodes


def test_exchange_moves_the_given_tensors():
    for rank, (results, got, nodes) in enumerate(run_ranks(_exchanges, 3)):
        for by_peer in results.values():
            for peer, values in by_peer.items():
                assert values == ([peer + 1] if 1000 * peer + rank else [])
        assert got == [[1.0] * 3, [2.0] * 5]
        assert nodes == (0, 0, 0), "all ranks of this test share a host"


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
    dist.all_reduce(values, group=dist.new_group([0, 1], timeout=timedelta(seconds=DEADLINE_S / 2)))
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
