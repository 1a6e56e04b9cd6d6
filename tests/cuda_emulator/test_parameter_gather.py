"""The exact gather of parameters on a GPU, and on the emulated one."""

import pytest
import torch

from megatron_sparse.errors import ReplicaError
from megatron_sparse.parameters import price
from megatron_sparse.planner.link_timing import complete
from megatron_sparse.transport import VirtualCluster
from tests.cuda_emulator import device
from tests.cuda_emulator.device import GPU, Place
from tests.cuda_emulator.emulator import EmulatedDevice
from tests.parameters.gather_cases import DTYPES, Group


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rank_gets_the_bits_of_a_raw_gather(place: Place, dtype: torch.dtype) -> None:
    group = Group(dtype, verify_every=2, n=3, shard=500, device=GPU)
    for size in (1e-4, 1e-4, 10.0, 0.0):
        group.check()
        assert all(values.is_cuda for values in group.values)
        group.move(size)
    assert {record.method for record in group.last} == {"exact"}


def test_once_per_node(place: Place) -> None:
    group = Group(n=3, shard=500, nodes=(2, 1), device=GPU)
    for _ in range(3):
        group.check()
        group.move()


def test_more_records_are_not_waited_for_more_often(
    emulated_gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host reads all headers of a gather at once, and all outcomes at once."""
    waits: list[str] = []
    monkeypatch.setattr(device, "_waits", waits.append)
    monkeypatch.setattr(device, "_waiting_is_an_error", lambda: True)

    def waits_of_a_rank(n: int) -> float:
        group = Group.started(n=n, shard=500, verify_every=100, device=GPU)
        group.move()
        waits.clear()
        group.gather()
        return len(waits) / n

    assert waits_of_a_rank(2) == waits_of_a_rank(4) > 0


def test_a_replica_that_was_written_to_is_named(place: Place) -> None:
    group = Group(n=2, shard=500, device=GPU)
    group.check()
    group.values[0].view(2, -1)[1][3] += 1
    with pytest.raises(ReplicaError, match="owner, rank 1"):
        group.gather()


def test_the_coder_is_timed_on_the_device(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: set[str] = set()
    encode = price.encode_moves

    def encode_there(old, new, **options):
        devices.add(old.device.type)
        return encode(old, new, **options)

    def alone(own, transport):
        yield from ()
        return torch.tensor([own])

    monkeypatch.setattr(price, "SAMPLE_NUMEL", 256)
    monkeypatch.setattr(price, "encode_moves", encode_there)
    monkeypatch.setattr(price, "gather_rows", alone)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    transport = VirtualCluster(1, device=GPU).transports[0]
    speed = complete(price.measure_coder(transport, torch.bfloat16))
    assert devices == {"cuda"}
    assert speed.encode_s > 0
    assert speed.decode_s > 0
