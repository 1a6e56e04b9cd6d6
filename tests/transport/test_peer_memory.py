"""Peer memory without a GPU: layouts, what is refused and how; and, marked gpu, on one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist

from megatron_sparse.bucket import Bucket, Form, ParameterSlice
from megatron_sparse.collectives.options import SchemeOptions
from megatron_sparse.collectives.peer_two_shot import with_peer_memory
from megatron_sparse.config import SchemeConfig
from megatron_sparse.cuda_ext.peer_ops import (
    CONTROL_BYTES,
    MAX_PEERS,
    Operation,
    PeerLayout,
    look_at,
)
from megatron_sparse.errors import (
    CommunicationError,
    ConfigError,
    ExtensionError,
    MegatronSparseError,
    WireFormatError,
)
from megatron_sparse.reference import peer
from megatron_sparse.transport import Transport
from megatron_sparse.transport.peer_memory import (
    CudaIpc,
    PeerMemory,
    SymmetricMemory,
    VirtualRanks,
    _map,
)

CPU = torch.device("cpu")
NONE = torch.zeros(2, dtype=torch.uint8)


def layout_of(numel: int, ranks: int) -> PeerLayout:
    """Equal shards of one segment each."""
    offsets = torch.arange(ranks + 1) * (numel // ranks)
    dense = torch.zeros(ranks, dtype=torch.uint8)
    return PeerLayout.of(offsets, dense, range(ranks + 1), 0)


def test_a_slot_has_room_for_a_dense_record() -> None:
    dense = torch.tensor([0, 1, 0], dtype=torch.uint8)
    layout = PeerLayout.of(torch.tensor([0, 8, 10, 11]), dense, (0, 2, 2, 3), 1)
    assert layout.slots.tolist() == [0, 64, 128, 192]  # 48 of header; 16, 4 and 2 of values
    assert layout.shard_offsets.tolist() == [0, 8, 10, 0, 0, 1]
    assert layout.shard_slots.tolist() == [0, 64, 128, 0, 0, 64]
    assert layout.shard_begins.tolist() == [0, 10, 10, 11]
    assert (layout.message_room, layout.sum_room) == (256, 256)
    assert layout.window_bytes() == CONTROL_BYTES + 1024
    assert layout.shard(2) == slice(10, 11)
    # RecordKind of csrc/record.h: adaptive, dense, adaptive.
    assert layout.segment_kinds.tolist() == [255, 0, 255]


@pytest.mark.parametrize(
    ("offsets", "shards", "dtype", "form", "what"),
    [
        ([0, 8, 4], (0, 1, 2), 0, 1, "segment_offsets"),
        ([0, 4, 8], (0, 1), 0, 1, "shard_segments does not cut"),
        ([0, 4, 8], (0, 2, 1, 2), 0, 1, "shard_segments does not cut"),
        ([0, 4, 8], (0,) * (MAX_PEERS + 1) + (2,), 0, 1, "too many ranks"),
        ([0, 4, 8], (0, 1, 2), 0, 3, "the format is unknown"),
        ([0, 4, 8], (0, 1, 2), 3, 1, "value_dtype is unknown"),
    ],
)
def test_wrong_cuts_are_refused(
    offsets: list[int], shards: tuple[int, ...], dtype: int, form: int, what: str
) -> None:
    with pytest.raises(ExtensionError, match=what):
        PeerLayout.of(torch.tensor(offsets), NONE, shards, dtype, form)


def test_without_a_gpu_every_provider_says_so() -> None:
    group = dist.group.WORLD
    for make in (
        lambda: VirtualRanks(2, CPU),
        lambda: SymmetricMemory(group, CPU),  # pyright: ignore[reportArgumentType]
        lambda: CudaIpc(group, CPU),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(ConfigError, match="peer memory is a GPU's") as caught:
            make()
        assert "scheme.name=direct" in str(caught.value)


def test_a_group_on_the_cpu_is_refused() -> None:
    bucket = Bucket("b", torch.zeros(8), [ParameterSlice("w", 0, 8)], Form.ALL_REDUCE, 2)
    transport = SimpleNamespace(world_size=2, device=CPU)
    options = SchemeOptions.of(SchemeConfig())

    class Provider(VirtualRanks):
        def __init__(self) -> None:
            self.world_size = 2

    with pytest.raises(ConfigError, match="peer_two_shot needs the memory of GPUs") as caught:
        with_peer_memory(cast("Transport", transport), Provider(), [bucket], "fp32", options, 1.0)
    assert caught.value.got == "2 ranks on cpu"


def test_scheme_name_does_not_offer_it() -> None:
    with pytest.raises(ConfigError, match="scheme"):
        SchemeConfig(name="peer_two_shot")


ERRORS = [
    ([1, 0, 0, 4, 2, 0, -1, 0, 0], CommunicationError, "all-reduce 4 .messages.: rank 2 did not"),
    ([1, 1, 0, 4, 2, 1, -1, 0, 0], CommunicationError, "reduce-scatter .*found by rank 1"),
    ([3, 2, 1, 4, 0, 0, 0, 0, 1], CommunicationError, "the host counted other operations"),
    ([2, 0, 0, 4, 1, 0, 1, 7, 9], WireFormatError, "rank 1"),
    ([2, 0, 1, 4, 1, 2, -1, 0, 0], WireFormatError, "rank 2 refused the records of rank 1"),
]


@pytest.mark.parametrize(("words", "kind", "what"), ERRORS)
def test_error_words_become_typed_errors(
    words: list[int], kind: type[MegatronSparseError], what: str
) -> None:
    layout = layout_of(24, 3)
    with pytest.raises(kind, match=what) as caught:
        look_at(torch.tensor(words), layout, 0, 2.5, "b3", 6)
    assert caught.value.expected is not None
    assert caught.value.remedy
    look_at(torch.zeros(9, dtype=torch.int64), layout, 0, 2.5, "b3", 6)  # all is well


def test_sums_are_waited_for_twice_as_long() -> None:
    """So that a rank which misses another in the first phase can say so in the second."""
    layout = layout_of(24, 3)
    for phase, expected in ((0, "within 2.5 s"), (1, "within 5 s")):
        with pytest.raises(CommunicationError, match=expected):
            look_at(torch.tensor([1, 0, phase, 1, 2, 0, -1, 0, 0]), layout, 0, 2.5, "b", 0)


def test_a_mapped_window_is_opened_on_the_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer passes its own device; a kernel here reaches only what this context has mapped."""
    import inspect

    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert names[6] == "storage_device"
    seen = []
    arguments = tuple(range(len(names)))
    _map(lambda *changed: seen.append(changed), arguments, torch.device("cuda", 3))
    assert seen == [(*arguments[:6], 3, *arguments[7:])]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("in_order_of_coming", [False, True])
def test_virtual_ranks_on_a_gpu(ranks: int, in_order_of_coming: bool) -> None:
    """Larger than what is resident, four times over, without a wait of the host."""
    device = torch.device("cuda")
    numel = 3_000_000 // ranks * ranks
    layout = layout_of(numel, ranks)
    peers = PeerMemory(
        VirtualRanks(ranks, device), {"b": layout}, 5, in_order_of_coming=in_order_of_coming
    )
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        grads = [
            torch.randn(numel, generator=generator) * (torch.rand(numel, generator=generator) < d)
            for d in (0.01, 0.3, 1.0, 0.0, 0.02, 0.5, 0.1, 0.05)[:ranks]
        ]
        given = [grad.to(device) for grad in grads]
        outs = [torch.full_like(grad, torch.nan) for grad in given]
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # tables are copied once
        try:
            peers.run(Operation.ALL_REDUCE, "b", given, outs, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        peers.check("b", step)
        expected = peer.all_reduce(grads, torch.float32)
        for out in outs:
            assert torch.equal(out.cpu().view(torch.int32), expected.view(torch.int32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_two_steps_in_a_graph() -> None:
    device = torch.device("cuda")
    layout = layout_of(1 << 16, 2)
    peers = PeerMemory(VirtualRanks(2, device), {"b": layout}, 5)
    given = [torch.rand(layout.numel, device=device) for _ in range(2)]
    outs = [torch.empty_like(grad) for grad in given]
    for _ in range(2):
        peers.run(Operation.ALL_REDUCE, "b", given, outs, 0)  # tables are copied
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            peers.run(Operation.ALL_REDUCE, "b", given, outs, 0)
    for seed in range(3):
        for grad in given:
            grad.uniform_(generator=torch.Generator(device).manual_seed(seed))
        graph.replay()
        peers.check("b", 0)
        expected = peer.all_reduce([grad.cpu() for grad in given], torch.float32)
        assert all(torch.equal(out.cpu(), expected) for out in outs)
