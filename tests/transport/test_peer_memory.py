"""Peer memory without a GPU: layouts and refusals; and, marked gpu, on one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import peer_windows
from megatron_sparse.collectives.peer_two_shot import peer_layout
from megatron_sparse.collectives.peer_windows import ProcessRanks, check_domain, open_windows
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.cuda_ext import codec_cuda
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
    HostError,
    MegatronSparseError,
    WireFormatError,
)
from megatron_sparse.reduction.job import DEADLINE_FACTOR, DEADLINE_SLACK_S
from megatron_sparse.reference import peer
from megatron_sparse.transport.peer_memory import (
    CudaIpc,
    PeerMemory,
    PeerWindows,
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
        with pytest.raises(ConfigError, match="peer memory needs a GPU") as caught:
            make()
        assert "scheme.name=direct" in str(caught.value)


def ranks_on(device: str, nodes: tuple[int, ...], rank: int = 0) -> ProcessRanks:
    """A group with the attributes that windows read."""
    place = torch.device(device)
    found = SimpleNamespace(rank=rank, world_size=len(nodes), device=place, nodes=nodes, group=None)
    return cast("ProcessRanks", found)


@pytest.mark.parametrize(
    ("ranks", "got"),
    [
        (ranks_on("cpu", (0, 0)), "2 ranks on cpu"),
        (ranks_on("cuda:0", (0, 0, 2)), "3 ranks on 2 machines"),
        (ranks_on("cuda:0", (0,) * (MAX_PEERS + 1)), f"a group of {MAX_PEERS + 1} ranks"),
    ],
)
def test_a_group_that_is_no_nvlink_domain_is_refused(ranks: ProcessRanks, got: str) -> None:
    with pytest.raises(ConfigError, match="peer_two_shot needs the memory of GPUs") as caught:
        open_windows(ranks, [], SchemeConfig(), in_order_of_coming=False)
    assert str(caught.value.got).endswith(got)
    assert "scheme.name=direct" in str(caught.value.remedy)
    check_domain(ranks_on("cuda:0", (0,) * MAX_PEERS))


BUCKET = Bucket("b", torch.zeros(8), [ParameterSlice("w", 0, 8)], CollectiveOp.ALL_REDUCE, 2)


class Provider(VirtualRanks):
    """Windows in CPU memory, or none."""

    def __init__(self, group: object, device: torch.device) -> None:
        self.world_size, self.first_rank, self.local_ranks = 2, 0, 1
        self.device = CPU

    def open(self, nbytes: int) -> PeerWindows:
        own = torch.zeros(nbytes, dtype=torch.uint8)
        return PeerWindows((own,), (own.data_ptr(),) * 2)


class Unreachable(Provider):
    """No windows."""

    def open(self, nbytes: int) -> PeerWindows:
        raise HostError("no way by this one", got="no peer access")


def test_auto_takes_the_first_provider_that_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = ranks_on("cuda:0", (0, 0))
    config = SchemeConfig(timeout_s=30, wire_dtype="bf16", format="coo")
    for first, expected in ((Provider, []), (Unreachable, ["no peer access"])):
        caplog.clear()
        found = {"symmetric_memory": first, "cuda_ipc": Provider}
        monkeypatch.setattr(peer_windows, "PROVIDERS", found)
        peers = open_windows(ranks, [BUCKET], config, in_order_of_coming=True)
        # Both waits together, 3 times this, end before the progress thread's 1.5 timeouts.
        assert peers.domain.deadline_s == 15
        assert peers.in_order_of_coming
        layout = peer_layout(BUCKET, "bf16", "coo")
        assert peers.layouts["b"].value_dtype == layout.value_dtype == 1
        assert torch.equal(peers.layouts["b"].segment_kinds, layout.segment_kinds)
        told = [record.message for record in caplog.records]
        assert len(told) == len(expected)
        assert all(word in line for word, line in zip(expected, told, strict=True))


@pytest.mark.parametrize("wanted", ["auto", "cuda_ipc"])
def test_no_provider_that_works_is_the_last_ones_error(
    monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    found = {"symmetric_memory": Provider, "cuda_ipc": Unreachable}
    if wanted == "auto":
        found["symmetric_memory"] = Unreachable
    monkeypatch.setattr(peer_windows, "PROVIDERS", found)
    with pytest.raises(HostError, match="no way by this one"):
        open_windows(
            ranks_on("cuda:0", (0, 0)),
            [BUCKET],
            SchemeConfig(peer_windows=wanted),
            in_order_of_coming=False,
        )


@pytest.mark.parametrize("own", [None, RuntimeError("peer access is not supported\nat line 3")])
def test_one_unreachable_rank_is_an_error_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, own: RuntimeError | None
) -> None:
    """Otherwise the others would wait for it."""
    there = "peer access is not supported"

    def gather(found: list[str | None], got: str | None, group: object) -> None:
        assert got == (None if own is None else there)
        found[:] = [None, there, None]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    provider = CudaIpc.__new__(CudaIpc)
    provider._group, provider.device, provider.world_size = cast("Any", None), CPU, 3
    with pytest.raises(HostError, match="cannot reach one another's GPU memory by x") as caught:
        provider._meet("x", own)
    assert caught.value.got == f"rank 1 of 3: {there}"


def test_one_wait_is_no_longer_than_the_progress_threads() -> None:
    """A rank that is missing is named by the windows, not found by the thread's own deadline."""
    for timeout_s in (0.1, 300.0, 1e5):
        messages_s = peer_windows.DEADLINE_FACTOR * timeout_s
        sums_s = 2 * messages_s
        assert messages_s + sums_s < timeout_s * DEADLINE_FACTOR + DEADLINE_SLACK_S


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
    look_at(torch.zeros(9, dtype=torch.int64), layout, 0, 2.5, "b3", 6)  # no error


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
    """Four times as many blocks as are resident, and the host never waits."""
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
@pytest.mark.parametrize("warm", [False, True])
def test_two_steps_in_a_graph(warm: bool) -> None:
    """Also if no table of the layout was on the device before the capture."""
    device = torch.device("cuda")
    layout = layout_of((1 << 16) + 1024 * warm, 2)
    peers = PeerMemory(VirtualRanks(2, device), {"b": layout}, 5)
    given = [torch.rand(layout.numel, device=device) for _ in range(2)]
    outs = [torch.empty_like(grad) for grad in given]
    for _ in range(2 if warm else 0):
        peers.run(Operation.ALL_REDUCE, "b", given, outs, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            peers.run(Operation.ALL_REDUCE, "b", given, outs, 0)
    codec_cuda._device_copy.cache_clear()
    scraps = [torch.full((n,), 2**40, device=device) for n in (1, 2, 3, 1024) for _ in range(64)]
    scraps += [torch.full((n,), 2**40).pin_memory() for n in (1, 2, 3, 1024) for _ in range(64)]
    for seed in range(3):
        for grad in given:
            grad.uniform_(generator=torch.Generator(device).manual_seed(seed))
        graph.replay()
        peers.check("b", 0)
        expected = peer.all_reduce([grad.cpu() for grad in given], torch.float32)
        assert all(torch.equal(out.cpu(), expected) for out in outs)
