"""The package on the emulated GPU: its ops' launchers run in the emulator.

Everything above the launchers is the code that a GPU sees: checks, dispatch, tables, reports and
errors. The C++ bindings between the two are not reached.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_sparse.cuda_ext import (
    arguments,
    codec_cuda,
    decode_ops,
    encode_ops,
    hash_ops,
    moves_ops,
    nccl_ops,
    ops,
    rice_ops,
    row_sparse_ops,
    threshold_triton,
)
from megatron_sparse.formats import codec_choice
from megatron_sparse.triton_kernels import prune as triton_prune
from megatron_sparse.wire import RICE_BITS
from tests.cuda_emulator.arguments import Rice
from tests.cuda_emulator.device import dispatcher, to_gpu
from tests.cuda_emulator.emulated import DTYPE_CODES, Codecs, Expecting
from tests.cuda_emulator.emulated_hash import HashOps
from tests.cuda_emulator.emulated_moves import MovesOps
from tests.cuda_emulator.emulated_nccl import NcclOps

DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


class EmulatedDevice:
    """Replaces a GPU, under `device.EmulatedGpu`."""

    place = staticmethod(to_gpu)

    def __init__(self, codecs: Codecs, monkeypatch: pytest.MonkeyPatch) -> None:
        self._codecs = codecs
        self.ops = {
            "encode_records": self._encode,
            "prune_encode_records": self._prune_encode,
            "encode_rice_records": self._encode_rice,
            "prune_encode_rice_records": self._prune_encode_rice,
            "decode_add_": self._decode_add,
            "decode_sum_": self._decode_sum,
            # Triton's kernel has tests of its own; here the CPU's makes the numbers.
            "prune_": partial(arguments.call, "prune_"),
            "nccl_sparse_sum": NcclOps(codecs),
            "sample_threshold": codecs.sample_threshold,
            **HashOps(codecs).ops(),
            **MovesOps(codecs).ops(),
        }
        self.call = dispatcher(self.ops, arguments.call)
        monkeypatch.setattr(triton_prune, "prune_", self._prune_in_triton)
        monkeypatch.setattr(threshold_triton, "sample_threshold", ops.sample_threshold)
        for module in (encode_ops, decode_ops, rice_ops, hash_ops, moves_ops, nccl_ops):
            monkeypatch.setattr(module, "call", self.call)
        for module in (row_sparse_ops, ops):
            monkeypatch.setattr(module, "call", self.call)
        monkeypatch.setattr(codec_choice, "_is_compiled", lambda device, wanted: True)
        monkeypatch.setattr(codec_cuda, "_stream", lambda device: -1)

    def _prune_in_triton(self, grad, residual, ranges, limits, leak, wire_dtype, key):
        return self.call(
            "prune_", grad, residual, ranges, limits[0], leak, wire_dtype, key, limits[1]
        )

    def _encode(
        self,
        grad,
        offsets,
        kinds,
        value_dtype,
        step,
        block_size,
        out,
        slots=None,
        prune=None,
        most_nnz=None,
        rice=None,
    ):
        encoded = self._codecs.encode(
            grad,
            offsets.tolist(),
            kinds.tolist(),
            DTYPES[value_dtype],
            capacity=out.numel(),
            step=step,
            block_size=block_size,
            shift=_shift(grad),
            prune=prune,
            slots=_numbers(slots),
            most_nnz=_numbers(most_nnz),
            rice=rice,
        )
        message = b"".join(encoded.records)
        if message:
            out[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        residual = prune["residual"] if prune is not None else rice.residual if rice else None
        if residual is not None:
            residual.copy_(encoded.residual)
        return torch.tensor([*encoded.status, *encoded.segment_bytes, *encoded.nnz])

    def _prune_encode(
        self,
        grad,
        residual,
        ranges,
        thresholds,
        leak,
        key,
        offsets,
        kinds,
        value_dtype,
        step,
        block_size,
        out,
        capacity=None,
        slots=None,
        tie_chances=None,
        rice=None,
    ):
        prune = {
            "residual": residual,
            "ranges": ranges.tolist(),
            "thresholds": thresholds.tolist(),
            "tie_chances": None if tie_chances is None else tie_chances.tolist(),
            "leak": leak,
            "key": key,
            "residual_shift": _shift(residual),
        }
        return self._encode(
            grad, offsets, kinds, value_dtype, step, block_size, out, slots, prune, capacity, rice
        )

    def _encode_rice(
        self,
        grad,
        offsets,
        kinds,
        value_dtype,
        step,
        log2_span,
        without_indices,
        out,
        residual=None,
        slots=None,
    ):
        rice = Rice(value_dtype, log2_span, without_indices, residual)
        staged = DTYPE_CODES[torch.float32] if value_dtype in RICE_BITS else value_dtype
        return self._encode(grad, offsets, kinds, staged, step, 0, out, slots, rice=rice)

    def _prune_encode_rice(self, *arguments):
        (*pruning, value_dtype, step, log2_span, without_indices, out) = arguments[:13]
        rice = Rice(value_dtype, log2_span, without_indices)
        staged = DTYPE_CODES[torch.float32] if value_dtype in RICE_BITS else value_dtype
        return self._prune_encode(*pruning, staged, step, 0, out, *arguments[13:], rice=rice)

    def _decode_add(self, acc, message, offsets, value_dtype, step, base, fresh, slots=None):
        assert message.data_ptr() % 16 == 0, "the binding refuses such a message"
        found, status = self._codecs.decode_add(
            acc,
            message.numpy().tobytes(),
            offsets.tolist(),
            value_dtype,
            step=step,
            base=base,
            fresh=fresh,
            shift=_shift(acc),
            slots=_numbers(slots),
        )
        acc.copy_(found)
        return torch.tensor(status)

    def _decode_sum(self, acc, messages, offsets, value_dtype, step, base, fresh=True, slots=None):
        assert fresh, "the binding refuses to keep acc's content"
        assert all(each.data_ptr() % 16 == 0 for each in messages), "the binding refuses them"
        expecting = Expecting(offsets.tolist(), value_dtype, step, base, _numbers(slots))
        found, states = self._codecs.decode_sum(
            acc,
            [each.numpy().tobytes() for each in messages],
            [expecting] * len(messages),
            shift=_shift(acc),
        )
        acc.copy_(found)
        return torch.tensor(states).flatten()


def _numbers(table: torch.Tensor | None) -> list[int] | None:
    return None if table is None else table.tolist()


def _shift(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() % 16 // tensor.element_size()
