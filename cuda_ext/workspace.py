"""Bytes of device memory that the CUDA ops take while they run, as `csrc` lays them out.

Torch's allocator hands them out for each call and takes them back at its end. Calls on one stream
follow one another, so a stream needs no more than its largest call.
"""

from __future__ import annotations

from megatron_sparse.wire import PICI_TILE

_ALIGNMENT = 256
_SCAN_STATE, _OFFSET, _RECORD_PLAN = 8, 8, 80
_TILE_WORDS = PICI_TILE // 32
_SIGN_GROUPS = 8


def encode_bytes(numel: int, segments: int, value_bytes: int, room: int) -> int:
    """The workspace of an encoder (`encode_workspace.cuh`), not of blocks.

    Args:
        numel: elements of all segments.
        segments: their number.
        value_bytes: of an element in the records.
        room: bytes of the output buffer.

    Example:
        >>> encode_bytes(2**20, 1, 4, 2**14) / 2**20  # bitmaps of values and signs, kept values
        0.27001953125
    """
    tiles = numel // PICI_TILE + segments
    return _carved(
        tiles * _SCAN_STATE,
        3 * 4,
        (segments + 1) * _OFFSET,
        segments * _RECORD_PLAN,
        tiles * _TILE_WORDS * 4,
        tiles * _TILE_WORDS * 4,
        tiles * _SIGN_GROUPS,
        min(numel, room // value_bytes) * value_bytes,
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
