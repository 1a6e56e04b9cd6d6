"""The CUDA ops of the codec, emulated: `ops` takes chosen CPU tensors for tensors of a GPU.

`EmulatedDevice.place` marks a tensor; what `ops` then would launch on the GPU runs in the emulator.
Everything above the launchers is the code that a GPU sees: checks, dispatch, tables, reports and
errors. The C++ bindings between the two are not reached.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_sparse.cuda_ext import codec_cuda, codec_ops
from tests.cuda_emulator.emulated import DTYPE_CODES, Codecs

DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


class EmulatedDevice:
    """Stands in for a GPU."""

    def __init__(self, codecs: Codecs, monkeypatch: pytest.MonkeyPatch) -> None:
        self._codecs = codecs
        self._held: dict[int, torch.Tensor] = {}
        self._on_cpu = codec_ops.check_device
        monkeypatch.setattr(codec_ops, "check_device", self._check_device)
        monkeypatch.setattr(codec_cuda, "load", lambda part: None)
        monkeypatch.setattr(codec_cuda, "on_device", lambda table, device: table)
        monkeypatch.setattr(codec_cuda, "call", self._call)

    def place(self, tensor: torch.Tensor, shift: int = 0) -> torch.Tensor:
        """A copy "on the device", `shift` elements behind an aligned address."""
        storage = torch.empty(tensor.numel() + shift + 1, dtype=tensor.dtype)
        self._held[storage.data_ptr()] = storage  # so that no other tensor gets this address
        return storage[shift : shift + tensor.numel()].copy_(tensor)

    def _check_device(self, op: str, name: str, tensor: torch.Tensor) -> str:
        on_device = tensor.untyped_storage().data_ptr() in self._held
        return "cuda" if on_device else self._on_cpu(op, name, tensor)

    def _call(self, name: str, *arguments: Any) -> torch.Tensor:
        return {
            "encode_records": self._encode,
            "prune_encode_records": self._prune_encode,
            "decode_add_": self._decode_add,
        }[name](*arguments)

    def _encode(
        self, grad, offsets, kinds, value_dtype, epoch, block_size, out, slots=None, prune=None,
        most_nnz=None,
    ):  # fmt: skip
        encoded = self._codecs.encode(
            grad, offsets.tolist(), kinds.tolist(), DTYPES[value_dtype], capacity=out.numel(),
            epoch=epoch, block_size=block_size, shift=_shift(grad), prune=prune,
            slots=_numbers(slots), most_nnz=_numbers(most_nnz),
        )  # fmt: skip
        message = b"".join(encoded.records)
        if message:
            out[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if prune is not None:
            prune["residual"].copy_(encoded.residual)
        return torch.tensor([*encoded.status, *encoded.segment_bytes, *encoded.nnz])

    def _prune_encode(
        self, grad, residual, ranges, thresholds, leak, key, offsets, kinds, value_dtype, epoch,
        block_size, out, capacity=None, slots=None,
    ):  # fmt: skip
        prune = {
            "residual": residual, "ranges": ranges.tolist(), "thresholds": thresholds.tolist(),
            "leak": leak, "key": key, "residual_shift": _shift(residual),
        }  # fmt: skip
        return self._encode(
            grad, offsets, kinds, value_dtype, epoch, block_size, out, slots, prune, capacity
        )

    def _decode_add(self, acc, message, offsets, value_dtype, epoch, base, fresh, slots=None):
        assert message.data_ptr() % 16 == 0, "the binding refuses such a message"
        found, status = self._codecs.decode_add(
            acc, message.numpy().tobytes(), offsets.tolist(), DTYPES[value_dtype], epoch=epoch,
            base=base, fresh=fresh, shift=_shift(acc), slots=_numbers(slots),
        )  # fmt: skip
        acc.copy_(found)
        return torch.tensor(status)


def _numbers(table: torch.Tensor | None) -> list[int] | None:
    return None if table is None else table.tolist()


def _shift(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() % 16 // tensor.element_size()
