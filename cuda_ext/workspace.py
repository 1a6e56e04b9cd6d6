"""Bytes of device memory that the CUDA ops take while they run, as `csrc` lays them out.

Torch's allocator hands them out for each call and takes them back at its end. Calls on one stream
follow one another, so a stream needs no more than its largest call.
"""

from __future__ import annotations

from megatron_sparse.cuda_ext.record_spec import RecordSpec
from megatron_sparse.wire import PICI_TILE, RICE_BITS, RICE_SPANS, VALUE_BYTES

_ALIGNMENT = 256
_SCAN_STATE, _OFFSET, _RECORD_PLAN = 8, 8, 80
_TILE_WORDS = PICI_TILE // 32
_SIGN_GROUPS = 8
_FP32 = 0


def encode_bytes(numel: int, segments: int, value_bytes: int, room: int) -> int:
    """The workspace of an encoder (`encode_workspace.cuh`), not of blocks.

    Args:
        numel: elements of all segments.
        segments: their number.
        value_bytes: of an element in the records.
        room: bytes of the output buffer.

    Example:
        >>> encode_bytes(2**20, 1, 4, 2**14) / 2**20  # bitmaps of values and signs, kept values
        0.271728515625
    """
    values = min(numel, room // value_bytes)
    return _carved(*_staging(numel, segments, value_bytes, values))


def rice_encode_bytes(numel: int, segments: int, spec: RecordSpec, room: int) -> int:
    """The workspace of an encoder of messages of kind Rice (`rice_encode.cu`).

    Args:
        numel: elements of all segments.
        segments: their number.
        spec: of `FORMAT_RICE`.
        room: bytes of the output buffer.

    Example:
        >>> from megatron_sparse.wire import FORMAT_RICE
        >>> rice_encode_bytes(2**20, 1, RecordSpec(4, 0, FORMAT_RICE, log2_span=15), 2**14) / 2**20
        4.382080078125
    """
    if spec.without_indices:
        return _carved(*_staging(0, segments, 0, 0))
    quantised = spec.value_dtype in RICE_BITS
    value_bytes = VALUE_BYTES[_FP32 if quantised else spec.value_dtype]
    values = numel if quantised else min(numel, room // value_bytes)
    staging = _staging(numel, segments, value_bytes, values)
    tiles = numel // PICI_TILE + segments
    slots = (tiles >> (spec.log2_span - RICE_SPANS[0])) + segments
    return _carved(*staging, slots * _SCAN_STATE, tiles * _TILE_WORDS * 4)


def _staging(numel: int, segments: int, value_bytes: int, values: int) -> tuple[int, ...]:
    """The parts that all encoders have, with room for so many values."""
    tiles = numel // PICI_TILE + segments
    return (
        tiles * _SCAN_STATE,
        4 * 4,
        (segments + 1) * _OFFSET,
        segments * _RECORD_PLAN,
        tiles * _TILE_WORDS * 4,
        tiles * _TILE_WORDS * 4,
        tiles * _SIGN_GROUPS,
        values * value_bytes,
    )


def threshold_bytes(ranges: int, numel: int, samples: int) -> int:
    """The workspace of `sample_threshold` (`threshold.cu`): its samples' magnitudes.

    Example:
        >>> threshold_bytes(3, 2**20, 1000)
        12000
    """
    each = min(samples, numel)
    return 4 * (each * ranges if each * ranges <= numel else numel)


def _carved(*parts: int) -> int:
    return sum(-(-part // _ALIGNMENT) * _ALIGNMENT for part in parts)
