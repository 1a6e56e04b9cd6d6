"""The least time that a synchronisation can take: its bytes at the rates measured beside it.

Wire: the busiest rank's bytes, at the rate of its link. Codec, for sparse schemes: the bytes
that each rank must read and write in memory, at the rate at which all ranks of the machine copy at
once. The floor counts the passes that every codec needs:

- selection: gradient and residual are read, the residual is written;
- the sum is written once;
- a message is written once, and as many bytes as are sent are read.

Scattered additions are not counted: a codec that merges messages tile by tile has none outside of
the cache. For dense schemes only the wire counts: they add while bytes arrive.
"""

from __future__ import annotations

from megatron_sparse.bench.collectives.case import Case
from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES, Input
from megatron_sparse.formats.message import VALUE_DTYPES
from megatron_sparse.pricing.records import record_bytes

RESIDUAL_BYTES = 4
PAYLOAD_SHARE = 1448 / 1514
"""Payload fraction of the bytes that Ethernet carries at an MTU of 1500."""


def payload_rate(mbit: float) -> float:
    """Payload bytes a second of a link."""
    return mbit * 1e6 / 8 * PAYLOAD_SHARE


def codec_bytes(
    case: Case, scheme: str, wire_bytes: float, nnz: float, n: int, *, prune: bool
) -> float:
    """Bytes that one rank's codec reads and writes at least.

    Args:
        case: what is synchronised.
        scheme: the one that carried it.
        wire_bytes: sent by the busiest rank.
        nnz: elements that a rank selected.
        n: ranks.
        prune: count selection.

    Example:
        >>> case = Case(Form.ALL_REDUCE, "agsparse", "fp32", 0.01, 100)
        >>> codec_bytes(case, "agsparse", 8, 1, 2, prune=True)  # 400 + 800 + 400 + 8 + 8
        1616.0
    """
    if SCHEMES[scheme].takes is Input.DENSE:
        return 0.0
    owned = case.nbytes if case.op is CollectiveOp.ALL_REDUCE else case.nbytes / n
    value_bytes = VALUE_DTYPES[case.dtype].itemsize
    message = case.numel * record_bytes(nnz / case.numel, value_bytes, "coo", case.value_bits)
    selection = case.nbytes + 2 * RESIDUAL_BYTES * case.numel + message if prune else 0
    return float(selection + owned + wire_bytes)
