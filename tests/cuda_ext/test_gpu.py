"""GPUs that the compiled kernels do not serve; on a GPU: the CPU's messages, and timed stages."""

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.cuda_ext import gpu, ops
from megatron_sparse.cuda_ext.record_spec import Expected, Pruning, RecordSpec, Segments
from megatron_sparse.errors import DependencyError, ExtensionError
from megatron_sparse.formats import message
from megatron_sparse.formats.message import WIRE_CODES, MessageBuffers, record_spec
from megatron_sparse.recording import StageTimer
from megatron_sparse.reduction import host_state
from megatron_sparse.reduction.host_state import check_kernels_of_all

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu_of(monkeypatch):
    """Makes a GPU with a given compute capability, and a CUDA part that loads."""

    def of(major, minor):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        monkeypatch.setattr(gpu, "load", lambda part: None)

    gpu.check_kernels.cache_clear()
    yield of
    gpu.check_kernels.cache_clear()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3)])
def test_a_gpu_that_runs_the_machine_code(gpu_of, capability):
    gpu_of(*capability)
    gpu.check_kernels(GPU)


@pytest.mark.parametrize("capability", [(7, 5), (12, 0)])
def test_a_gpu_that_cannot_run_it_is_refused(gpu_of, capability):
    gpu_of(*capability)
    with pytest.raises(ExtensionError, match="not compiled for cuda:0"):
        gpu.check_kernels(GPU)


def test_a_rank_without_kernels_stops_all_ranks(gpu_of, monkeypatch):
    """Each with an error of its own; only ranks on GPUs ask the others."""
    monkeypatch.setattr(host_state, "on_every_rank", lambda own, device, group: False)
    gpu_of(9, 0)
    with pytest.raises(ExtensionError, match="another rank's GPU has no compiled kernels"):
        check_kernels_of_all(GPU)
    gpu.check_kernels.cache_clear()

    def no_nvcc(part):
        raise DependencyError("there is no nvcc", remedy="install nvcc")

    monkeypatch.setattr(gpu, "load", no_nvcc)
    with pytest.raises(DependencyError, match="no nvcc"):
        check_kernels_of_all(GPU)
    check_kernels_of_all(torch.device("cpu"))


def messages(device, form):
    """A message selected on a device, its decoded values, the residual, and the sum encoded."""
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
        record_spec("fp32", 3, form, 64),
        buffers,
    )
    records = made.records()
    total_N = torch.full((9001,), torch.nan, device=device)
    expected = Expected(layout.segment_offsets, WIRE_CODES["fp32"], 3, rank=0)
    message.decode_add_(total_N, records, expected, fresh=True)
    room = ops.message_capacity(layout.segment_offsets, WIRE_CODES["fp32"])
    again = torch.zeros(room, dtype=torch.uint8, device=device)
    sizes = message.encode_segments(
        total_N,
        Segments(layout.segment_offsets, layout.segment_keep),
        None,
        RecordSpec(WIRE_CODES["fp32"], 3, record_format=1),
        again,
    )
    return made, records, total_N, residual_N, again[: int(sizes.sum())]


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["coo", "pici", "dense", "auto"])
def test_the_same_message_on_a_gpu(form):
    (got, *tensors), (expected, *wanted) = messages("cuda", form), messages("cpu", form)
    assert got.segment_bytes == expected.segment_bytes
    assert got.nnz == expected.nnz
    for mine, others in zip(tensors, wanted, strict=True):
        assert torch.equal(mine.cpu().view(torch.uint8), others.view(torch.uint8))


@pytest.mark.gpu
def test_a_stage_is_timed_by_events():
    timer = StageTimer(torch.device("cuda"))
    with timer.stage("prune"):
        torch.cuda._sleep(20_000_000)
    # 20 million cycles: 10 ms at 2 GHz, and no GPU runs at 20 GHz.
    assert timer.times_us()["prune"] > 1000
