"""The headers of a message, one after the other, as tests look at them."""

from megatron_sparse.formats.header import Header
from megatron_sparse.wire import HEADER_BYTES


def read_headers(message: bytes, rank: int) -> list[Header]:
    """The headers of all records of a message that is right, by following their sizes."""
    headers, position = [], 0
    while position < len(message):
        header = Header.unpack(message[position : position + HEADER_BYTES], rank)
        headers.append(header)
        position += HEADER_BYTES + header.payload_bytes
    return headers
