"""From the windows to the typed error, above the peer kernels: the package on an emulated GPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import SCHEMES, Exchange, Steps
from megatron_sparse.collectives.peer_two_shot import peer_layout
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.cuda_ext import peer_ops
from megatron_sparse.cuda_ext.peer_ops import MAX_PEERS, Operation
from megatron_sparse.cuda_ext.record_spec import Pruning
from megatron_sparse.errors import CommunicationError, ConfigError, ExtensionError
from megatron_sparse.formats.capacity import segment_capacity
from megatron_sparse.formats.message import Message, MessageBuffers, prune_encode, record_spec
from megatron_sparse.recording import StageTimer
from megatron_sparse.reference import peer
from megatron_sparse.transport import Transport
from megatron_sparse.transport.peer_memory import PeerMemory, PeerWindows, VirtualRanks
from tests.cuda_emulator.device import GPU, EmulatedGpu, OnDevice
from tests.cuda_emulator.emulated import DTYPE_CODES, IN_ORDER, Codecs
from tests.cuda_emulator.emulated_peer import PeerCall, PeerDomain, PeerRank, PeerTables
from tests.cuda_emulator.op_calls import EmulatedDevice
from tests.cuda_emulator.peer_cases import gradients, same_bits, uneven_layout


class EmulatedPeerOp:
    """`peer_collective`, as its binding makes the call."""

    def __init__(self, codecs: Codecs) -> None:
        self._library = codecs.library
        self._library.workspace_of_peer.restype = ctypes.c_int64
        self._library.peer_collective.restype = ctypes.c_char_p

    def __call__(
        self,
        name: str,
        out: torch.Tensor,
        more_outs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        operation: int,
        domain: torch.Tensor,
        tables: Sequence[torch.Tensor],
        cuts: torch.Tensor,
        message_slots: torch.Tensor | None,
        value_dtype: int,
        step: int,
        message_density: float,
        sum_density: float,
        in_order_of_coming: bool,
    ) -> None:
        assert name == "peer_collective"
        assert all(isinstance(t, OnDevice) for t in (out, *more_outs, *inputs, *tables))
        words = domain.tolist()
        ranks = (PeerRank * len(inputs))()
        for rank, given, result in zip(ranks, inputs, (out, *more_outs), strict=True):
            rank.out = result.data_ptr()
            if given.dtype == torch.uint8:
                rank.message, rank.message_bytes = given.data_ptr(), given.numel()
                rank.message_slots = None if message_slots is None else message_slots.data_ptr()
            else:
                rank.grad = given.data_ptr()
        call = PeerCall(
            operation,
            PeerDomain((ctypes.c_void_p * MAX_PEERS)(*words[8:]), *words[:6]),
            PeerTables(*(table.data_ptr() for table in tables)),
            int(cuts[0, -1]),
            cuts.data_ptr(),
            cuts.data_ptr() + 8 * cuts.shape[1],
            ctypes.addressof(ranks),
            DTYPE_CODES[out.dtype],
            value_dtype,
            step,
            message_density,
            sum_density,
            in_order_of_coming,
            (ctypes.c_int * 2)(*words[6:8]),
        )
        nbytes = self._library.workspace_of_peer(ctypes.byref(call))
        workspace = (ctypes.c_uint8 * (nbytes + 256))()
        call.workspace = -(-ctypes.addressof(workspace) // 256) * 256
        assert self._library.peer_collective(ctypes.byref(call)) is None


@pytest.fixture
def gpu(
    emulated_gpu: EmulatedDevice, codecs: Codecs, monkeypatch: pytest.MonkeyPatch
) -> EmulatedDevice:
    codecs.schedule(IN_ORDER, 0, resident_blocks=4, multiprocessors=4)
    monkeypatch.setattr(peer_ops, "call", EmulatedPeerOp(codecs))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return emulated_gpu


def test_operations_follow_one_another_in_the_same_windows(gpu: EmulatedDevice) -> None:
    layout = uneven_layout(3)
    peers = PeerMemory(VirtualRanks(3, GPU), {"b": layout}, 60)
    assert peers.nbytes == 3 * layout.window_bytes()
    for step in range(2):
        grads = gradients(layout, (0.05, 0.5), torch.float32, seed=step)
        given = [gpu.place(grad) for grad in grads]
        if step == 0:
            peers.run(Operation.ALL_REDUCE, "b", given, given, step)
            found = [out.cpu() for out in given]
            assert all(same_bits(out, peer.all_reduce(grads, torch.float32)) for out in found)
        else:
            shards = [layout.shard(rank) for rank in range(3)]
            outs = [gpu.place(torch.empty(s.stop - s.start)) for s in shards]
            peers.run(Operation.REDUCE_SCATTER, "b", given, outs, step)
            for shard, out in zip(shards, outs, strict=True):
                assert same_bits(out.cpu(), peer.reduce_scatter(grads, torch.float32, shard))
        peers.check("b", step)


class OneRank:
    """A provider of windows that were made before: this process runs one of the ranks."""

    def __init__(self, windows: Sequence[torch.Tensor], rank: int) -> None:
        self.world_size, self.first_rank, self.local_ranks = len(windows), rank, 1
        self.device = GPU
        self._windows = windows

    def open(self, nbytes: int) -> PeerWindows:
        assert all(window.numel() == nbytes for window in self._windows)
        pointers = tuple(window.data_ptr() for window in self._windows)
        return PeerWindows((self._windows[self.first_rank],), pointers)


def selected(bucket: Bucket, threshold: float, capacity: float | None) -> Message:
    """A message that selection encodes; the residual is discarded."""
    layout = bucket.layout(sharded=True)
    residual_N = torch.zeros(bucket.numel, device=GPU)
    keep_R = layout.segment_keep[layout.range_segment].bool()
    thresholds_R = torch.where(keep_R, -1.0, threshold).to(GPU)
    capacity_S = None
    if capacity is not None:
        capacity_S = segment_capacity(layout, capacity)
    return prune_encode(
        bucket,
        layout,
        Pruning(residual_N, layout.range_offsets, thresholds_R, 1.0, 0, capacity_S),
        record_spec("fp32", 5, "auto", 256),
        MessageBuffers(),
    )


def exchange(bucket: Bucket, message: Message, windows: PeerMemory | None) -> Steps:
    """The registered collective; its transport moves nothing."""
    nobody = cast("Transport", SimpleNamespace(device=GPU))
    exchange = Exchange(
        bucket, nobody, MessageBuffers(), StageTimer(GPU), SchemeConfig(), windows=windows
    )
    return SCHEMES["peer_two_shot"].run(exchange, message)


@pytest.mark.parametrize("op", list(CollectiveOp))
@pytest.mark.parametrize("capacity", [None, 0.5])
def test_the_collective_sums_what_selection_made(
    gpu: EmulatedDevice, op: CollectiveOp, capacity: float | None
) -> None:
    """Two ranks in threads of their own, as the scheme is registered; messages with slots or not.

    The threshold of 1.5 keeps 13 % of normal values: within the capacity of one half.
    """
    numel, threshold = 5000, 1.5
    parameters = [ParameterSlice("w", 0, 4700), ParameterSlice("n", 4700, numel, keep=True)]
    grads = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    buckets = [Bucket("b", gpu.place(grad), parameters, op, 2) for grad in grads]
    layout = peer_layout(buckets[0], "fp32", "auto")
    windows = [gpu.place(torch.zeros(layout.window_bytes(), dtype=torch.uint8)) for _ in range(2)]
    messages = [selected(bucket, threshold, capacity) for bucket in buckets]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with EmulatedGpu():
                peers = PeerMemory(OneRank(windows, rank), {"b": layout}, 60)
                steps = exchange(buckets[rank], messages[rank], peers)
                for _ in steps:
                    pass
        except BaseException as error:  # for the test's own thread
            errors.append(error)

    in_threads([lambda: run(0), lambda: run(1)])
    assert not errors, errors
    kept = [torch.where((g.abs() <= threshold) & (torch.arange(numel) < 4700), 0, g) for g in grads]
    for rank, bucket in enumerate(buckets):
        here = bucket.shard(rank) if op is CollectiveOp.REDUCE_SCATTER else slice(0, numel)
        assert same_bits(bucket.grad_N.cpu()[here], peer.all_reduce(kept, torch.float32)[here])


def in_threads(calls: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_silent_rank_is_a_typed_error_of_the_collective(gpu: EmulatedDevice) -> None:
    bucket = Bucket(
        "b7", gpu.place(torch.ones(600)), [ParameterSlice("w", 0, 600)], CollectiveOp.ALL_REDUCE, 2
    )
    layout = peer_layout(bucket, "fp32", "auto")
    windows = [gpu.place(torch.zeros(layout.window_bytes(), dtype=torch.uint8)) for _ in range(2)]
    peers = PeerMemory(OneRank(windows, 0), {"b7": layout}, 0.1)
    message = selected(bucket, 0.5, None)
    with pytest.raises(CommunicationError, match=r"bucket b7: .*rank 1 did not come"):
        for _ in exchange(bucket, message, peers):
            pass


def test_windows_of_other_buckets_are_refused(gpu: EmulatedDevice) -> None:
    bucket = Bucket(
        "new", gpu.place(torch.ones(600)), [ParameterSlice("w", 0, 600)], CollectiveOp.ALL_REDUCE, 1
    )
    peers = PeerMemory(VirtualRanks(1, GPU), {"old": uneven_layout(1)}, 1)
    message = selected(bucket, 0.5, None)
    with pytest.raises(ConfigError, match="the windows were made for other buckets"):
        next(exchange(bucket, message, peers))
    with pytest.raises(ConfigError, match="without windows of peer memory"):
        next(exchange(bucket, message, None))
    bucket.name = "old"  # of another size
    with pytest.raises(ConfigError, match="the windows were made for other buckets"):
        next(exchange(bucket, message, peers))


def test_wrong_arguments_are_refused_before_anything_is_launched(gpu: EmulatedDevice) -> None:
    layout = uneven_layout(2)
    peers = PeerMemory(VirtualRanks(2, GPU), {"b": layout, "large": layout}, 1)
    grads = [gpu.place(torch.zeros(layout.numel)) for _ in range(2)]
    short = [grads[0], grads[1][:-1]]
    halves = [gpu.place(torch.zeros(layout.numel, dtype=torch.bfloat16)) for _ in range(2)]
    cases = [
        ("inputs are missing", grads[:1], grads),
        ("outs are missing", grads, grads[:1]),
        ("inputs has the wrong length", short, grads),
        ("outs has the wrong length", grads, short),
        ("inputs has the wrong dtype", halves, grads),
        ("outs has the wrong dtype", grads, [grads[0], halves[1]]),
        ("outs are on the wrong device", grads, [torch.zeros(layout.numel)] * 2),
    ]
    for what, inputs, outs in cases:
        with pytest.raises(ExtensionError, match=what):
            peers.run(Operation.ALL_REDUCE, "b", inputs, outs, 0)
    wide = torch.tensor([0, 50_000])
    peers.layouts["large"] = peer_ops.PeerLayout.of(
        wide, torch.zeros(1, dtype=torch.uint8), (0, 1, 1), 0
    )
    large = [gpu.place(torch.zeros(50_000)) for _ in range(2)]
    with pytest.raises(ExtensionError, match="the windows are too small"):
        peers.run(Operation.ALL_REDUCE, "large", large, large, 0)
    # None of these counted as operations: the first operation still uses the first areas.
    peers.run(Operation.ALL_REDUCE, "b", grads, grads, 0)
    peers.check("b", 0)
