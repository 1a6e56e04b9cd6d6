"""`nccl_sparse_sum` in the emulator, over the NCCL whose ranks are threads (`tests/fake_nccl`)."""

from __future__ import annotations

import ctypes

import torch

from tests.cuda_emulator.arguments import Buffer
from tests.cuda_emulator.emulated import Codecs

MARKS = 6


class NcclSum(ctypes.Structure):
    """Mirrors the struct of nccl_sum_launch.h."""

    _fields_ = (
        ("group_start", ctypes.c_void_p),
        ("group_end", ctypes.c_void_p),
        ("send", ctypes.c_void_p),
        ("recv", ctypes.c_void_p),
        ("comm", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        ("world", ctypes.c_int),
        ("shards", ctypes.c_void_p),
        ("shard_count", ctypes.c_int64),
        ("segment_offsets", ctypes.c_void_p),
        ("segment_kinds", ctypes.c_void_p),
        ("shard_offsets", ctypes.c_void_p),
        ("message_slots", ctypes.c_void_p),
        ("sum_slots", ctypes.c_void_p),
        ("gathers", ctypes.c_bool),
        ("acc", ctypes.c_void_p),
        ("message", ctypes.c_void_p),
        ("received", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("value_dtype", ctypes.c_int),
        ("step", ctypes.c_uint32),
        ("sum_steps", ctypes.c_void_p),
        ("earlier", ctypes.c_void_p),
        ("earlier_count", ctypes.c_int64),
        ("report", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("events", ctypes.c_void_p * MARKS),
    )


class NcclOps:
    """The op, called as `cuda_ext.arguments.call`, on the CPU memory of emulated tensors."""

    def __init__(self, codecs: Codecs) -> None:
        self._codecs, self._library = codecs, codecs.library
        self._library.nccl_sum.restype = ctypes.c_char_p
        for name in ("report_words_of_nccl_sum", "workspace_of_nccl_sum", "size_of_nccl_sum"):
            getattr(self._library, name).restype = ctypes.c_int64
        assert self._library.size_of_nccl_sum() == ctypes.sizeof(NcclSum)

    def __call__(
        self,
        acc,
        received,
        sums,
        message,
        communicator,
        shards,
        tables,
        kinds,
        earlier,
        sum_steps,
        events,
        value_dtype,
        step,
        gathers,
    ) -> tuple[torch.Tensor, int]:
        """As the binding does; device buffers lie between guards while kernels run."""
        rank, world, comm, *functions = communicator.tolist()
        segments, count = kinds.numel(), shards.numel() // 8
        entries = segments + count
        shift = acc.data_ptr() % 16 // 4
        mutated = [
            (each, Buffer.of(each, at)) for each, at in ((acc, shift), (received, 0), (sums, 0))
        ]
        given = [Buffer.of(each) for each in (message, tables, kinds, earlier)]
        into, coming, gathered = (buffer.pointer for _, buffer in mutated)
        sent, table, kind, statuses = (buffer.pointer for buffer in given)
        behind = table + 8 * (segments + 1)
        call = NcclSum(
            *functions,
            comm,
            rank,
            world,
            shards.data_ptr(),
            count,
            table,
            kind,
            behind,
            behind + 8 * entries,
            behind + 16 * entries,
            gathers,
            into,
            sent,
            coming,
            gathered,
            value_dtype,
            step,
            sum_steps.data_ptr(),
            statuses,
            earlier.numel(),
            None,
            None,
            (ctypes.c_void_p * MARKS)(*events.tolist()),
        )
        report = Buffer(8 * self._library.report_words_of_nccl_sum(ctypes.byref(call)))
        workspace = Buffer(self._library.workspace_of_nccl_sum(ctypes.byref(call)))
        call.report, call.workspace = report.pointer, workspace.pointer
        result = ctypes.c_int(-1)
        self._codecs.run(
            "nccl_sum",
            [*(buffer for _, buffer in mutated), *given, report, workspace],
            ctypes.byref(call),
            ctypes.byref(result),
        )
        for tensor, buffer in mutated:
            tensor.copy_(buffer.read(tensor.dtype))
        return report.read(torch.int64), result.value
