"""Sums of mixed words, and sealed records: the oracle of `cuda_ext.checksum_ops`."""

import struct

import numpy as np

from megatron_sparse.wire import HEADER_BYTES

_SIZE_AT, _CHECKSUM_AT = 24, 44
"""Bytes of a header at which the payload's size and the checksum stand."""


def mixed_sum(data: bytes, first: int = 0) -> int:
    """The sum, modulo 2^32, of 32-bit words that are each mixed with their number.

    Products are taken in uint64 and cut to 32 bits. The factors are known odd constants: the
    golden ratio's, and the two of murmur3's finaliser.

    Args:
        data: a multiple of 4 bytes.
        first: the number of its first word.
    """
    words = np.frombuffer(data, "<u4").astype(np.uint64)
    mask = np.uint64(0xFFFFFFFF)
    number = np.arange(first, first + words.size, dtype=np.uint64)
    key = (number * np.uint64(0x9E3779B9)) & mask
    mixed = ((words ^ key) * np.uint64(0x85EBCA6B)) & mask
    mixed = ((mixed ^ (mixed >> np.uint64(15))) * np.uint64(0xC2B2AE35)) & mask
    return int(mixed.sum()) & 0xFFFFFFFF


def sealed(message: bytes) -> bytes:
    """The message with the sum of each record's payload added to its header's checksum."""
    return _with_sums(message, 1)


def opened(message: bytes) -> bytes:
    """The inverse of `sealed`; stops at a record of impossible size."""
    return _with_sums(message, -1)


def _with_sums(message: bytes, sign: int) -> bytes:
    """The message with each payload's sum added to its header's checksum; `sign` -1 subtracts."""
    data, position = bytearray(message), 0
    while position + HEADER_BYTES <= len(data):
        (size,) = struct.unpack_from("<Q", data, position + _SIZE_AT)
        begin, end = position + HEADER_BYTES, position + HEADER_BYTES + size
        if end > len(data) or size % 16:  # a damaged size: where the next record begins is unknown
            break
        (checksum,) = struct.unpack_from("<I", data, position + _CHECKSUM_AT)
        checksum += sign * mixed_sum(message[begin:end])
        struct.pack_into("<I", data, position + _CHECKSUM_AT, checksum % 2**32)
        position = end
    return bytes(data)
