"""The least time that a synchronisation can take: its bytes at the machine's own rates.

Wire: what the busiest rank sends, at the rate of its link. Codec: what all ranks of a machine must
read and write in memory, at the rate at which as many ranks copy at once. What is counted:

- selection: gradient and residual are read, residual and message are written;
- sending nothing: the sum is written once;
- adding a message: it is read, and the cache lines that it touches are read and written;
- `direct` and its kin: the sum's records, as many as were sent, are written once and read once.

For dense schemes it is the wire alone: their reductions go on while bytes arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sparse.bench.collective_sweep import Case
from megatron_sparse.collectives import SCHEMES, Input
from megatron_sparse.formats.message import VALUE_DTYPES

LINE_BYTES = 64
PAYLOAD_SHARE = 1448 / 1514
"""Of the bytes that a port of Ethernet carries at an MTU of 1500: without the headers."""


@dataclass(frozen=True)
class Rates:
    """What the machine does, in bytes a second.

    Attributes:
        wire: payload that a rank can send.
        copy: read and written by all ranks of a machine together when each copies.
        ranks_per_machine: ranks that share the machine.
    """

    wire: float
    copy: float
    ranks_per_machine: int


def floor_us(case: Case, scheme: str, wire_bytes: int, nnz: int, n: int, rates: Rates) -> float:
    """Microseconds that the case takes at least.

    Args:
        case: what is synchronised.
        scheme: the one that carried it.
        wire_bytes: sent by the busiest rank.
        nnz: elements that a rank selected.
        n: ranks.
        rates: of this machine.
    """
    codec = codec_bytes(case, scheme, wire_bytes, nnz, n) * rates.ranks_per_machine
    return 1e6 * (wire_bytes / rates.wire + codec / rates.copy)


def codec_bytes(case: Case, scheme: str, wire_bytes: int, nnz: int, n: int) -> float:
    """Bytes that one rank's codec reads and writes at least."""
    if SCHEMES[scheme].takes is Input.DENSE:
        return 0.0
    grad, density = case.nbytes, nnz / case.numel
    residual = 4 * case.numel
    message = nnz * (4 + VALUE_DTYPES[case.dtype].itemsize)
    lines = 4 * case.numel * (1 - (1 - density) ** (LINE_BYTES / 4))
    # Of n messages wholly, or of n n-ths of messages: as many bytes as a message each.
    added = n if scheme == "agsparse" else 1
    total = grad + 2 * residual + message + grad + added * (message + 2 * lines)
    return total if scheme == "agsparse" else total + 2 * max(wire_bytes - message, 0)
