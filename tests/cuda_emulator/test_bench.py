"""`bench codecs --device cuda`: its calls of the ops, emulated; and its table, on a GPU."""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.bench.codec import hashing, records
from megatron_sparse.bench.codec.frame import Case
from megatron_sparse.bench.codec.options import BUCKET_FORMS, RICE_FORMS, CodecSweep
from megatron_sparse.errors import ConfigError
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
    return GPU


@pytest.mark.parametrize("form", ["hash_bitmap", "pairs", "row_sparse"])
def test_hashing_and_row_tasks_run_the_named_operations(
    bench_device: torch.device, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(hashing, "SMALL_NUMEL", 2**10)
    ops = set()
    for task in hashing.MAKERS[form](Case(2**14, 0.05, "fp32", form, bench_device)):
        assert task.wrong == 0
        assert task.bytes_moved > 0
        task.run()
        for peer in task.peers.values():
            peer()
        ops.add(task.op)
    assert ("encode" if form == "row_sparse" else "decode_add") in ops


@pytest.mark.parametrize("form", [*BUCKET_FORMS, *RICE_FORMS])
def test_every_task_runs_the_named_operation(
    bench_device: torch.device, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(records, "ORACLE_NUMEL", 2**12)
    case = Case(2**15, 1.0 if form == "dense_q4" else 0.05, "fp32", form, bench_device)
    wanted = ["prune_encode", "prune", "encode", "decode_add", "place", "seal", "verify"]
    wanted.append("decode_sum")
    if form in RICE_FORMS:
        wanted.remove("encode")
    for op, task in zip(wanted, records.make_tasks(case), strict=True):
        assert (task.op, task.wrong) == (op, 0)
        record = {"auto": "pici", "blocks": "dense"}.get(form, form)
        assert task.format == ("-" if op == "prune" else record)
        nbytes = task.run()
        if op == "encode":  # bytes read and written: the gradient and the record
            assert nbytes is not None
            assert task.bytes_moved == 2**15 + int(nbytes)
        if op == "prune_encode":
            assert nbytes is not None
            # Few bits leave a residual, which the second call sends.
            more = 0 if form in ("rice_q3", "rice_q2") else int(nbytes)
            assert task.bytes_moved >= 3 * 2**15 + more
        for peer in task.peers.values():
            peer()


def test_a_machine_without_a_gpu_is_one_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        CodecSweep(device="cuda")
    with pytest.raises(ConfigError, match="device is out of range"):
        CodecSweep(device="tpu")
