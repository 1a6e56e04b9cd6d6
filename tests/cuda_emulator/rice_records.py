"""Messages of Rice records for CUDA's decoder, made and decoded by the CPU's ops."""

from __future__ import annotations

import struct
import zlib

import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.arguments import call
from megatron_sparse.cuda_ext.record_spec import RecordSpec, Segments
from megatron_sparse.wire import FORMAT_RICE, HEADER_BYTES
from tests.cuda_emulator.codec_cases import STEP, gradient

FORMS = [*((code, False) for code in range(7)), (3, True), (4, True)]
"""Dtype codes, and whether every element has a value."""
NAMES = ["fp32", "bf16", "fp16", "q8", "q4", "q3", "q2", "q8-whole", "q4-whole"]
SEGMENTS = [0, 0, 1, 4098, 24578, 24700, 30001]
"""Empty, one element, a tile and one more, five tiles, one that is always dense, another end."""
KEEP = torch.tensor([0, 0, 0, 0, 1, 0], dtype=torch.uint8)
NUMEL = SEGMENTS[-1]
TABLE = HEADER_BYTES + 16


def values_of(density: float, seed: int = 0) -> torch.Tensor:
    """With NaN, infinities, subnormal numbers and -0.0, but not everywhere."""
    values_N = torch.cat(
        [
            gradient(4098, density, torch.float32, seed),
            gradient(NUMEL - 4098, density, torch.float32, seed + 1).nan_to_num(1, 2, -2),
        ]
    )
    assert values_N.numel() == NUMEL
    return values_N


def encode(
    values_N: torch.Tensor,
    form: tuple[int, bool],
    log2_span: int = 12,
    segments: list[int] = SEGMENTS,
    keep: torch.Tensor = KEEP,
) -> bytes:
    """The CPU's message."""
    offsets = torch.tensor(segments)
    out = torch.zeros(ops.rice_capacity(offsets, form[0]) + 4096, dtype=torch.uint8)
    spec = RecordSpec(form[0], STEP, FORMAT_RICE, log2_span=log2_span, without_indices=form[1])
    sizes, _ = ops.rice_encode(values_N, Segments(offsets, keep), spec, out)
    return out[: int(sizes.sum())].numpy().tobytes()


def decode(
    acc_M: torch.Tensor, message: bytes, code: int, segments: list[int], *, fresh: bool = False
) -> list[int]:
    """Adds to `acc_M` on the CPU; returns the status."""
    data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    offsets = torch.tensor(segments)
    return call("decode_add_", acc_M, data, offsets, code, STEP, 0, fresh, None).tolist()


def sealed(data: bytearray, at: int = 0) -> bytearray:
    """Makes a header's checksum right again."""
    data[at + 44 : at + 48] = struct.pack("<I", zlib.crc32(bytes(data[at : at + 44])))
    return data


def assert_same_numbers(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same bits, but any NaN for a NaN."""
    assert torch.equal(found.isnan(), wanted.isnan())
    numbers = ~wanted.isnan()
    assert torch.equal(found[numbers].view(torch.int32), wanted[numbers].view(torch.int32))


SMALL = 10_000
"""Elements of `small_message`: three chunks of 4096, the last one of 1808."""


def small_message(form: tuple[int, bool]) -> bytes:
    """5 entries in the first chunk, none in the second, 45 in the third, its last among them."""
    values_N = torch.zeros(SMALL)
    values_N[[7, 8, 1000, 1001, 4000]] = torch.tensor([1.0, -2.0, 3.0, 4.0, -5.0])
    values_N[8192:] = torch.arange(1808) % 41 == 3
    values_N[-1] = 6.0
    return encode(values_N, form, 12, [0, SMALL], torch.zeros(1, dtype=torch.uint8))


def damages(good: bytes, form: tuple[int, bool]) -> list[bytes]:
    """`small_message` with one thing wrong each, under a valid checksum; a few are still right."""
    damaged = []

    def put(at: int, value: int, width: int = 4) -> None:
        data = bytearray(good)
        data[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
        damaged.append(bytes(sealed(data)))

    for at in range(4, 44, 3):
        put(at, good[at] ^ 0x5A, 1)
    for code in range(8):
        put(6, code, 1)
    for at, value in ((0, 2), (0, form[1]), (1, 11), (1, 13), (1, 25), (2, 1), (3, 1)):
        put(HEADER_BYTES + at, value, 1)
    for value in (0, 2, 4, 2**32 - 1):
        put(HEADER_BYTES + 4, value)
    for value in (0, 1, 10**6, 2**32, 2**62, 2**63, 2**64 - 1):
        put(HEADER_BYTES + 8, value, 8)
    put(16, 49, 8)
    damaged += [good[:-16], good[:48], good[:60], good[:64], good + bytes(16)]
    if form[1]:
        return damaged
    rows = struct.unpack_from("<8I", good, TABLE)
    assert rows[::2] == (0, 5, 5, 50)
    for number, row in enumerate(rows):
        for value in (row - 1, row + 1, 0, 4097, 2**31, 2**32 - 1):
            put(TABLE + 4 * number, value)
    words = TABLE + 32
    # The index words of the third chunk end the record: remainders of two times 32, r being 5.
    end = words + 4 * rows[7]
    for at in range(words, end, 4):
        if words + 4 * 20 <= at < end - 4 * 16:
            continue  # values of the third chunk
        (word,) = struct.unpack_from("<I", good, at)
        for value in (word ^ 1, word ^ 1 << 12, word ^ 1 << 31, 0, 2**32 - 1, word << 1):
            put(at, value)
    return damaged
