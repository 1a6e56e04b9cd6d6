"""Tables in a CUDA graph: the graph copies them itself, from memory that outlives its capture."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_sparse.cuda_ext import codec_cuda
from tests.cuda_emulator.device import GPU, OnDevice
from tests.cuda_emulator.emulator import EmulatedDevice

OFFSETS = torch.tensor([0, 5, 9, 2**40])
DENSE = torch.tensor([0, 1, 0], dtype=torch.uint8)
KEYS = torch.tensor([3, -7])


class Capture(TorchDispatchMode):
    """Records the copies to the GPU, as nodes of a graph that does not own their sources."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._monkeypatch = monkeypatch
        self._copies: list[tuple[weakref.ref[torch.Tensor], OnDevice]] = []

    def __enter__(self) -> Capture:
        self._monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        super().__exit__(*error)
        for _, copy in self._copies:  # a captured copy has not happened
            copy.inner.fill_(99)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and isinstance(result, OnDevice):
            self._copies.append((weakref.ref(args[0]), result))
        return result

    def replay(self) -> None:
        for source, copy in self._copies:
            memory = source()
            assert memory is not None, "the graph copies from memory that has been released"
            copy.inner.copy_(memory)


def test_a_graph_copies_its_tables_in_each_replay(
    emulated_gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec_cuda._device_copy.cache_clear()
    before = codec_cuda.on_device(OFFSETS, GPU)  # on the stream that is captured later
    capture = Capture(monkeypatch)
    with capture:
        captured = [
            codec_cuda.on_device(OFFSETS, GPU),
            codec_cuda.on_device(OFFSETS, GPU),
            codec_cuda.record_kinds(DENSE, 2, GPU),
            codec_cuda.to_device(KEYS.clone(), GPU),
        ]
    codec_cuda._device_copy.cache_clear()  # as other buckets' tables do
    gc.collect()
    capture.replay()
    expected = [OFFSETS, OFFSETS, torch.tensor([2, 0, 2], dtype=torch.uint8), KEYS]
    for copy, table in zip(captured, expected, strict=True):
        assert isinstance(copy, OnDevice)
        assert copy.dtype == table.dtype
        assert torch.equal(copy.inner, table)
    assert isinstance(before, OnDevice)
    assert torch.equal(before.inner, OFFSETS)


def test_a_captured_table_is_not_used_outside_of_its_graph(
    emulated_gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec_cuda._device_copy.cache_clear()
    with Capture(monkeypatch):
        codec_cuda.on_device(OFFSETS, GPU)
    after = codec_cuda.on_device(OFFSETS, GPU)
    assert isinstance(after, OnDevice)
    assert torch.equal(after.inner, OFFSETS)
