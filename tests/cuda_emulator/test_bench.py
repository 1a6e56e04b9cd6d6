"""`bench codecs --device cuda`: its calls of the ops, emulated; and its table, on a GPU."""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.bench.codecs import cases, cub_peer, cuda, hash_cases
from megatron_sparse.bench.codecs import command as bench
from megatron_sparse.cuda_ext import build
from megatron_sparse.errors import ConfigError, DependencyError
from tests.cuda_emulator.device import GPU
from tests.cuda_emulator.emulator import EmulatedDevice


class HostGenerator(torch.Generator):
    """A generator on the CPU for any device; a class, because torch's annotations name it."""

    def __new__(cls, device: object = None) -> HostGenerator:
        return super().__new__(cls)


@pytest.fixture
def bench_device(emulated_gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The emulated GPU, with the further functions that the benchmark needs."""
    monkeypatch.setattr(torch, "Generator", HostGenerator)
    monkeypatch.setattr(cuda, "load", lambda part: None)
    monkeypatch.setattr(cuda, "overload", emulated_gpu.overload)
    monkeypatch.setattr(cub_peer, "action", lambda values_N: None)
    return GPU


@pytest.mark.parametrize("form", ["hash_bitmap", "pairs", "row_sparse"])
def test_hashing_and_row_tasks_run_the_named_operations(
    bench_device: torch.device, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(hash_cases, "SMALL_NUMEL", 2**10)
    ops = set()
    for task in hash_cases.make_tasks(2**14, 0.05, "fp32", form, bench_device):
        assert task.wrong == 0
        assert task.bytes_moved > 0
        task.run()
        for peer in task.peers.values():
            peer()
        ops.add(task.op)
    assert "row_expand" in ops if form == "row_sparse" else "decode_add" in ops


@pytest.mark.parametrize("form", cases.FORMS)
def test_every_task_runs_the_named_operation(
    bench_device: torch.device, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(cases, "ORACLE_NUMEL", 2**12)
    tasks = cuda.make_tasks(2**15, 0.05, "fp32", form, bench_device)
    for op, task in zip(("prune_encode", "encode", "decode_add"), tasks, strict=True):
        assert (task.op, task.wrong) == (op, 0)
        assert task.format == {"auto": "pici", "blocks": "dense"}.get(form, form)
        report = task.run()
        assert isinstance(report, torch.Tensor)
        assert report[:4].tolist() == [0, 0, 0, 0]
        if op == "encode":  # bytes read and written: the gradient and the record
            assert task.bytes_moved == 2**15 + int(report[4])
        if op == "prune_encode":
            assert {"Triton prune_", "Triton selection"} < task.peers.keys()
            assert task.bytes_moved == 3 * 2**15 + int(report[4])
        for peer in task.peers.values():
            peer()


def test_a_machine_without_a_gpu_is_one_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="there is no CUDA device"):
        bench.Sweep(device="cuda")
    with pytest.raises(ConfigError, match="device is out of range"):
        bench.Sweep(device="tpu")


def can_compile() -> bool:
    try:
        build.find_cuda()
    except DependencyError:
        return False
    return True


@pytest.mark.slow  # ten seconds of nvcc
@pytest.mark.skipif(not can_compile(), reason="nvcc is nowhere: not in CUDA_HOME, PATH or PyPI's")
def test_cub_compiles(tmp_path) -> None:
    cub_peer.compile_for((9, 0), tmp_path / "cub_select.so")
    assert b"sm_90" in (tmp_path / "cub_select.so").read_bytes()
