"""The c10d calls of an exchange with NCCL, on torch's fake process group."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_sparse.errors import CommunicationError
from megatron_sparse.transport import ProcessGroupTransport

N, RANK = 4, 1


@pytest.fixture
def transport(monkeypatch):
    # The fake group delivers nothing.
    monkeypatch.setattr(ProcessGroupTransport, "_find_nodes", lambda self: (0,) * N)
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=N)
    made = ProcessGroupTransport(dist.group.WORLD, 30, torch.device("cpu"), liveness=False)
    made.device = torch.device("cuda")  # posts as with NCCL, tensors stay on the CPU
    yield made
    made.close()
    dist.destroy_process_group()


@pytest.fixture
def calls(monkeypatch):
    """The posted calls: (call, its arguments)."""
    posted = []

    class Done:
        def wait(self) -> None: ...

    def all_to_all(outputs, inputs, group, async_op):
        posted.append(("all_to_all", outputs, inputs))
        return Done()

    def batch(operations):
        posted.append(("batch", operations))
        return [Done()]

    monkeypatch.setattr(dist, "all_to_all", all_to_all)
    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    return posted


def pieces(sizes, dtype=torch.float32):
    return [(peer, torch.full((numel,), peer, dtype=dtype)) for peer, numel in sizes]


def test_an_exchange_with_everyone_is_one_call_with_bytes_by_rank(transport, calls):
    sends = pieces([(3, 2), (0, 5), (2, 0)])
    receives = pieces([(0, 1), (2, 7), (3, 0)], torch.bfloat16)
    transport.exchange(sends, receives, tag=1).finish()
    ((call, outputs, inputs),) = calls
    assert call == "all_to_all"
    assert [each.numel() for each in outputs] == [2, 0, 14, 0]
    assert [each.numel() for each in inputs] == [20, 0, 0, 8]
    assert all(each.dtype == torch.uint8 for each in [*outputs, *inputs])
    for placed, given in ((inputs, sends), (outputs, receives)):
        for peer, values in given:
            assert not values.numel() or placed[peer].data_ptr() == values.data_ptr()


def test_a_rank_may_receive_nothing(transport, calls):
    sends, receives = pieces([(0, 2), (2, 2), (3, 2)]), pieces([(0, 0), (2, 0), (3, 0)])
    transport.exchange(sends, receives, tag=1).finish()
    ((_, outputs, inputs),) = calls
    assert [each.numel() for each in outputs] == [0, 0, 0, 0]
    assert [each.numel() for each in inputs] == [8, 0, 8, 8]


@pytest.mark.parametrize(
    ("sends", "receives"),
    [
        ([(2, 4)], [(0, 4)]),
        ([(0, 4), (2, 4), (3, 4)], [(0, 4), (2, 4)]),
        ([(0, 4), (2, 4), (2, 3)], [(0, 4), (2, 4), (3, 4)]),
        ([], [(0, 4), (2, 4), (3, 4)]),
    ],
)
def test_any_other_exchange_is_a_batch(transport, calls, sends, receives):
    transport.exchange(pieces(sends), pieces(receives), tag=1).finish()
    ((call, operations),) = calls
    assert call == "batch"
    assert len(operations) == len(sends) + len(receives)


def test_its_failure_is_typed(transport, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("NCCL communicator was aborted")

    monkeypatch.setattr(dist, "all_to_all", fail)
    everyone = pieces([(0, 1), (2, 1), (3, 1)])
    with pytest.raises(CommunicationError, match=r"exchange with ranks \[0, 2, 3\] failed"):
        transport.exchange(everyone, everyone, tag=1)
