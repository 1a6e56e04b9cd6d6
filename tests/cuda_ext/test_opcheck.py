"""Every op obeys its schema and its fake; torch.compile and the dispatcher rely on both."""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import RecordSpec, Segments
from tests.cuda_ext import cases


def arguments_of(name):
    offsets = torch.tensor([0, 40, 100])
    grad = cases.pruned_grad(100, 0.1, torch.float32)
    nnz = cases.count_nonzero(grad, offsets)
    out = torch.zeros(ops.message_capacity(offsets, 0), dtype=torch.uint8)
    limits = torch.tensor([0.5, -1.0]), torch.tensor([0.5, 0.0])
    if name == "prune_":
        return torch.randn(100), torch.zeros(100), offsets, *limits[:1], 0.9, 1, 4, limits[1]
    if name == "sample_threshold":
        densities, keys = torch.tensor([0.1, 0.2]), torch.tensor([1, 2])
        return torch.randn(100), torch.zeros(100), offsets, densities, 30, keys
    dense = torch.tensor([0, 1], dtype=torch.uint8)
    scratch = torch.zeros(ops.scratch_capacity(offsets, 0), dtype=torch.uint8)
    if name == "encode":
        return grad, offsets, dense, nnz, 0, 5, out, scratch, 1, 256
    if name == "prune_encode":
        return (
            torch.randn(100),
            torch.zeros(100),
            offsets,
            limits[0],
            offsets,
            dense,
            0.9,
            0,
            4,
            5,
            out,
            scratch,
            -1,
            256,
            None,
            None,
            limits[1],
        )
    used = int(ops.encode(grad, Segments(offsets, dense), nnz, RecordSpec(0, 5), out).sum())
    message = out[:used].clone()
    if name == "decode_sum_":
        return torch.zeros(100), [message, message.clone()], offsets, 0, 5, 0
    return torch.zeros(100), message, offsets, 0, 5, 0


@pytest.mark.parametrize(
    "name",
    ["prune_", "sample_threshold", "encode", "prune_encode", "decode_add_", "decode_sum_"],
)
def test_opcheck(name):
    arguments = arguments_of(name)
    torch.library.opcheck(getattr(torch.ops.megatron_sparse, name).default, arguments)


def test_the_residual_of_a_sample_is_optional():
    arguments = list(arguments_of("sample_threshold"))
    arguments[1] = None
    torch.library.opcheck(torch.ops.megatron_sparse.sample_threshold.default, tuple(arguments))


def test_opcheck_of_moves():
    old = torch.randn(300).bfloat16()
    room = torch.zeros(torch.ops.megatron_sparse.moves_room(300, 1, 1), dtype=torch.uint8)
    encode = torch.ops.megatron_sparse.moves_encode.default
    torch.library.opcheck(encode, (old, old * 1.01, 1, 5, room))
    size = int(encode(old, old * 1.01, 1, 5, room))
    decode = torch.ops.megatron_sparse.moves_decode_.default
    torch.library.opcheck(decode, (old, room[:size].clone(), int(room[7])))


@pytest.mark.parametrize("bits", [4, 8])
def test_opcheck_of_quantised_differences(bits):
    new, old = torch.randn(300), torch.randn(300)
    out = torch.zeros(torch.ops.megatron_sparse.quantised_bytes(300, bits), dtype=torch.uint8)
    encode = torch.ops.megatron_sparse.quantise.default
    torch.library.opcheck(encode, (new, old, bits, 5, out))
    encode(new, old, bits, 5, out)
    add = torch.ops.megatron_sparse.add_quantised_.default
    torch.library.opcheck(add, (old, out, bits))
