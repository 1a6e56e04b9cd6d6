"""Pairwise exchange over real gloo ranks."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch

from megatron_sparse.errors import CommunicationError
from megatron_sparse.transport import ProcessGroupTransport
from tests.ranks import run_ranks
from tests.waiting import DEADLINE_S


def _transport(timeout_s=30):
    import torch.distributed as dist

    return ProcessGroupTransport(dist.group.WORLD, timeout_s, torch.device("cpu"))


def _exchanges(rank, world_size):
    """Uneven sizes to all peers at once, every dtype, empty tensors, tags out of order."""
    transport = _transport()
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


def _unanswered(rank, world_size):
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    transport = _transport(timeout_s=2)
    if rank == 1:
        store.wait(["gave up"], timedelta(seconds=DEADLINE_S))
        transport.close()
        return None
    start_s = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        transport.exchange([], [(1, torch.zeros(4))], tag=0).finish()
    spent_s = time.monotonic() - start_s
    store.set("gave up", "")
    transport.close(broken=True)
    return str(caught.value), spent_s


def test_a_peer_that_does_not_answer_is_an_error_within_the_timeout():
    (text, seconds), _ = run_ranks(_unanswered, 2)
    assert "exchange with ranks [1] failed" in text
    assert 1.5 < seconds < DEADLINE_S
