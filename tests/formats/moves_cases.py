"""Numbers before and after a step, and damaged records, for the tests of moves."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import torch

from megatron_sparse.reference import moves as oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPOCH = 7


def bits(numbers):
    """As unsigned integers of NumPy, without a copy."""
    signed = {2: torch.int16, 4: torch.int32}[numbers.element_size()]
    return numbers.view(signed).numpy().view(f"<u{numbers.element_size()}")


def from_bits(integers, dtype):
    signed = {2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(integers.astype(f"<u{dtype.itemsize}").view(signed)).view(dtype)


def adam_like(numel, dtype, lr=3e-4, seed=0):
    """Weights as a GPT's, and an update as Adam's."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(numel, generator=generator) * 0.02
    update = torch.randn(numel, generator=generator) * 0.3 * lr
    return weights.to(dtype), (weights + update).to(dtype)


def any_bits(numel, dtype, seed=0):
    """Any bit patterns: NaN of every payload, infinities, both zeros; moves of every length."""
    rng = np.random.default_rng(seed)
    top = 1 << 8 * dtype.itemsize
    return tuple(from_bits(rng.integers(0, top, numel), dtype) for _ in range(2))


def mixed(numel, dtype):
    """All kinds of moves in one record: none, small, all bits; whole chunks of each."""
    old, new = adam_like(numel, dtype)
    wild = any_bits(numel, dtype)
    third = numel // 3
    old[:third], new[:third] = wild[0][:third], wild[1][:third]
    new[third : 2 * third] = old[third : 2 * third]
    new[-1:] = float("nan")
    old[-2:-1], new[-2:-1] = 0.0, -0.0
    return old, new


def repaired(record):
    """With right checksums: of the header, and of the words behind it."""
    data = bytearray(record)
    data[48:52] = struct.pack("<I", oracle.checksum(bytes(data[48:])))
    data[44:48] = struct.pack("<I", zlib.crc32(data[:44]))
    return torch.frombuffer(data, dtype=torch.uint8)
