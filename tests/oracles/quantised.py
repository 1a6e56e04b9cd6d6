"""Quantised differences, step by step in NumPy: the oracle of `formats.quantised`.

docs/quantised.md specifies the record. All arithmetic is fp32, each operation rounded to nearest
even; a scale is bf16.
"""

import struct

import numpy as np
import torch

from megatron_sparse.formats.header import Header
from megatron_sparse.reference.moves import checksum
from megatron_sparse.reference.rice_values import levels_of
from megatron_sparse.wire import FORMAT_QUANTISED, HEADER_BYTES, pad16

GROUP = 128
NAN_SCALE = 0x7FC0
TOO_LARGE = np.float32(2.0**127)
SUB_HEADER = struct.Struct("<IIQ")
"""Checksum, numbers of a group, zeros."""


def bf16(value: np.float32) -> int:
    """The bits of a finite number of fp32, rounded to bf16, ties to even."""
    return int(torch.tensor(value).bfloat16().view(torch.int16)) & 0xFFFF


def scale_value(scale: int) -> np.float32:
    return np.frombuffer(struct.pack("<I", scale << 16), "<f4")[0]


def quantise_group(values: np.ndarray, bits: int) -> tuple[int, np.ndarray]:
    """Quantises a group of fp32 numbers; returns the bits of its bf16 scale, and int64 codes.

    Example:
        >>> scale, codes = quantise_group(np.array([7, -3.4, 0.5, 0], np.float32), 4)
        >>> float(scale_value(scale)), codes.tolist()
        (1.0, [7, -3, 0, 0])
    """
    codes = np.zeros(values.size, np.int64)
    if not np.all(np.abs(values) < TOO_LARGE):  # NaN is not below it
        return NAN_SCALE, codes
    limit = levels_of(bits)
    scale = bf16(np.float32(np.abs(values).max() / np.float32(limit)))
    if scale != 0:
        quotients = values / scale_value(scale)
        codes = np.clip(np.rint(quotients), -limit, limit).astype(np.int64)
    return scale, codes


def dequantise(scale: int, codes: np.ndarray) -> np.ndarray:
    """The fp32 numbers that are added."""
    return codes.astype(np.float32) * scale_value(scale)


def pack(codes: np.ndarray, bits: int) -> bytes:
    """The bytes of a group's 128 codes; with 4 bits, byte j has code j (lower half) and j + 64."""
    if bits == 8:
        return codes.astype(np.int8).tobytes()
    low, high = codes.reshape(2, -1) & 15
    return (low | high << 4).astype(np.uint8).tobytes()


def unpack(data: bytes, bits: int) -> np.ndarray:
    """The codes that `pack` packed; those of 4 bits are in two's complement."""
    if bits == 8:
        return np.frombuffer(data, np.int8).astype(np.int64)
    both = np.frombuffer(data, np.uint8).astype(np.int64)
    codes = np.concatenate([both & 15, both >> 4])
    return np.where(codes > 7, codes - 16, codes)


def encode(new: np.ndarray, old: np.ndarray, bits: int, epoch: int) -> bytes:
    """The record of `new - old`: header, sub-header, a bf16 scale and the codes of each group.

    The sub-header begins with the checksum of all that follows the header, itself counted as 0.
    """
    difference = new - old
    groups = -(-new.size // GROUP)
    padded = np.zeros(groups * GROUP, np.float32)
    padded[: new.size] = difference
    scales, codes = b"", b""
    for group in padded.reshape(groups, GROUP):
        scale, found = quantise_group(group, bits)
        scales += struct.pack("<H", scale)
        codes += pack(found, bits)
    body = SUB_HEADER.pack(0, GROUP, 0) + scales.ljust(pad16(len(scales)), b"\0") + codes
    body = struct.pack("<I", checksum(body)) + body[4:]  # replaces the first field, so far 0
    header = Header(FORMAT_QUANTISED, 0, new.size, 0, len(body), 0, epoch, flags=bits)
    return header.pack() + body


def add(record: bytes, held: np.ndarray, bits: int) -> np.ndarray:
    """The numbers `held` plus the differences in a record, which must be right: it is unchecked."""
    groups = -(-held.size // GROUP)
    scales_at = HEADER_BYTES + SUB_HEADER.size
    codes_at, code_bytes = scales_at + pad16(2 * groups), GROUP * bits // 8
    added = [np.zeros(0, np.float32)]  # for a record without groups
    for group in range(groups):
        (scale,) = struct.unpack_from("<H", record, scales_at + 2 * group)
        begin = codes_at + group * code_bytes
        added.append(dequantise(scale, unpack(record[begin : begin + code_bytes], bits)))
    return held + np.concatenate(added)[: held.size]  # without what fills up the last group
