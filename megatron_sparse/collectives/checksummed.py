"""Sizes with a checksum, in the bits that a size does not need.

A size decides how long a receive buffer is, and gloo ends the process when a message is longer than
its buffer. So a damaged size must be found before a receive of that size is posted. The check costs
no bytes.
"""

import struct
import zlib
from collections.abc import Sequence

from megatron_sparse.wire import wrong_field

SIZE_BITS = 48
"""Sizes are below 2^48; the 15 bits above hold the check, and the sign stays clear."""
COUNT_BITS = 32


def checksummed_size(size: int) -> int:
    """Packs a size and its 15-bit checksum into one non-negative int64 word.

    Example:
        >>> verified_size(checksummed_size(4096), rank=1)
        4096
    """
    check = _check([size]) % 2**15
    return check << SIZE_BITS | size


def verified_size(word: int, rank: int) -> int:
    """Unpacks a word that `rank` has made with `checksummed_size`.

    Raises:
        WireFormatError: the size does not fit its checksum.
    """
    size = word % 2**SIZE_BITS
    if checksummed_size(size) != word:
        bits = word % 2**64  # without a sign, which damage may set
        raise wrong_field(rank, "size", hex(checksummed_size(size)), hex(bits))
    return size


def checksummed_row(fingerprint: int, sizes: Sequence[int]) -> list[int]:
    """The words that carry a fingerprint and some sizes: two more than there are sizes."""
    check = _check([fingerprint, *sizes]) % 2**31
    return [fingerprint, check << COUNT_BITS | len(sizes), *sizes]


def verified_row(words: Sequence[int], rank: int) -> tuple[int, list[int]]:
    """Checks a row from `rank`: fingerprint, count with a checksum, sizes, and unused words.

    Returns (fingerprint, sizes).

    Raises:
        WireFormatError: the words do not fit their checksum.
    """
    fingerprint, count = words[0], words[1] % 2**COUNT_BITS
    sizes = list(words[2 : 2 + count])
    # A damaged count may be larger than the row is long.
    if len(sizes) != count or checksummed_row(fingerprint, sizes)[1] != words[1]:
        raise wrong_field(rank, "agreement", "words that fit their check", f"{count} sizes")
    return fingerprint, sizes


def _check(words: Sequence[int]) -> int:
    return zlib.crc32(struct.pack(f"<{len(words)}q", *words))
