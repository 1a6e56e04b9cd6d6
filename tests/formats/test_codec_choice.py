"""The codec of a device, the log line about it, and equal messages of both codecs."""

import logging

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, Pruning, RecordSpec, Segments
from megatron_sparse.errors import ConfigError, DependencyError, ExtensionError
from megatron_sparse.formats import codec_choice, message
from megatron_sparse.formats.message import WIRE_CODES, MessageBuffers, record_spec

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_chosen_yet(monkeypatch):
    monkeypatch.delenv(codec_choice.CODEC, raising=False)
    codec_choice._is_compiled.cache_clear()
    yield
    codec_choice._is_compiled.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with a given compute capability, and a CUDA part that loads."""

    def of(major, minor):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        monkeypatch.setattr(codec_choice, "load", lambda part: None)

    return of


def no_nvcc(part):
    raise DependencyError("there is no nvcc", remedy="install nvcc")


def test_the_cpu_never_asks(monkeypatch):
    monkeypatch.setenv(codec_choice.CODEC, "torch")
    monkeypatch.setattr(codec_choice, "load", no_nvcc)
    assert codec_choice.is_compiled(torch.device("cpu"))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3)])
def test_a_gpu_that_runs_the_machine_code(gpu, capability):
    gpu(*capability)
    assert codec_choice.is_compiled(GPU)


@pytest.mark.parametrize("capability", [(7, 5), (12, 0)])
def test_a_gpu_that_cannot_run_it_is_named_once(gpu, capability, caplog):
    gpu(*capability)
    with caplog.at_level(logging.WARNING):
        assert not codec_choice.is_compiled(GPU)
        assert not codec_choice.is_compiled(GPU)
    assert len(caplog.records) == 1
    assert "made by torch operations" in caplog.text
    assert "not compiled for cuda:0" in caplog.text


def test_without_the_cuda_part_the_log_says_why_and_what_to_do(monkeypatch, caplog):
    monkeypatch.setattr(codec_choice, "load", no_nvcc)
    with caplog.at_level(logging.WARNING):
        assert not codec_choice.is_compiled(GPU)
    assert "there is no nvcc (install nvcc)" in caplog.text


def test_the_compiled_codec_can_be_demanded(monkeypatch, gpu):
    monkeypatch.setenv(codec_choice.CODEC, "cuda")
    gpu(7, 5)
    with pytest.raises(ExtensionError, match="not compiled for cuda:0"):
        codec_choice.is_compiled(GPU)
    monkeypatch.setattr(codec_choice, "load", no_nvcc)
    with pytest.raises(DependencyError, match="no nvcc"):
        codec_choice.is_compiled(GPU)


def test_torch_operations_can_be_asked_for(monkeypatch, gpu):
    gpu(9, 0)
    monkeypatch.setenv(codec_choice.CODEC, "torch")
    assert not codec_choice.is_compiled(GPU)
    monkeypatch.setenv(codec_choice.CODEC, "cupy")
    with pytest.raises(ConfigError, match="MEGATRON_SPARSE_CODEC is unknown"):
        codec_choice.is_compiled(GPU)


def messages(device, form="coo", wire="fp32"):
    """A message selected on a device, its decoded values, and the residual."""
    grad_N = torch.randn(9001, generator=torch.Generator().manual_seed(2))
    parameters = [ParameterSlice("w", 0, 8000), ParameterSlice("b", 8000, 9001, keep=True)]
    bucket = Bucket("0", grad_N.to(device), parameters, CollectiveOp.REDUCE_SCATTER, 1)
    layout, buffers = bucket.layout(False), MessageBuffers()
    residual_N = torch.zeros(9001, dtype=torch.bfloat16, device=device)
    thresholds_R = torch.tensor([2.0, -1.0], device=device)
    made = message.prune_encode(
        bucket,
        layout,
        Pruning(residual_N, layout.range_offsets, thresholds_R, 0.9, 7),
        record_spec(wire, 3, form, 64),
        buffers,
    )
    records = made.buffer[: made.nbytes]
    total_N = torch.full((9001,), torch.nan, device=device)
    message.decode_add_(
        total_N, records, Expected(layout.segment_offsets, WIRE_CODES[wire], 3, rank=0), fresh=True
    )
    room = ops.message_capacity(layout.segment_offsets, WIRE_CODES[wire])
    again = torch.zeros(room, dtype=torch.uint8, device=device)
    sizes = message.encode_segments(
        total_N,
        Segments(layout.segment_offsets, layout.segment_keep),
        None,
        RecordSpec(WIRE_CODES[wire], 3, record_format=1),
        again,
    )
    return made, total_N.cpu(), residual_N.cpu(), again[: int(sizes.sum())].cpu()


def assert_same(got, expected):
    assert got[0].segment_bytes == expected[0].segment_bytes
    assert got[0].nnz == expected[0].nnz
    used = expected[0].nbytes
    assert torch.equal(got[0].buffer[:used].cpu(), expected[0].buffer[:used])
    for mine, wanted in zip(got[1:], expected[1:], strict=True):
        assert torch.equal(mine.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_both_codecs_make_the_same_message(monkeypatch, wire):
    expected = messages("cpu", wire=wire)
    monkeypatch.setattr(message, "is_compiled", lambda device: False)
    assert_same(messages("cpu", wire=wire), expected)
    with pytest.raises(ExtensionError, match="torch operations do not write"):
        messages("cpu", form="pici")
    with pytest.raises(ConfigError, match="need the compiled codec"):
        messages("cpu", form="rice", wire="q4")


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["cuda", "torch"])
@pytest.mark.parametrize("form", ["coo", "pici", "dense", "auto"])
def test_the_same_message_on_a_gpu(monkeypatch, form, codec):
    if codec == "torch" and form == "pici":
        pytest.skip("torch operations do not write Pici")
    expected = messages("cpu", "coo" if codec == "torch" and form == "auto" else form)
    monkeypatch.setenv(codec_choice.CODEC, codec)
    assert_same(messages("cuda", form), expected)
