"""The ops of records of quantised differences, typed: what `formats.quantised` calls.

Both run in torch's thread pool; the result does not depend on the number of threads or on the
instruction set. Arguments that do not fit together are an `ExtensionError` with what was expected
and what came.
"""

from __future__ import annotations

import torch

from megatron_sparse.cuda_ext.arguments import call, overload, refusing

FIELDS = ("", "payload checksum", "group size", "zeros of the sub-header", "scale")
"""Names of the fields that the decoder's status may blame; `QuantisedField` of
csrc/quantised.cpp."""


def record_bytes(numel: int, bits: int) -> int:
    """The bytes of a record, header included."""
    return refusing(overload("quantised_bytes"), numel, bits)


def encode(new_N: torch.Tensor, old_N: torch.Tensor, bits: int, step: int) -> torch.Tensor:
    """The record of `new_N - old_N`.

    Args:
        new_N: fp32, contiguous, on the CPU. Only read.
        old_N: likewise, as long.
        bits: of a code, 4 or 8.
        step: for the header, taken modulo 2^32.

    Returns:
        uint8, as long as the record.
    """
    out = torch.empty(record_bytes(new_N.numel(), bits), dtype=torch.uint8)
    call("quantise", new_N, old_N, bits, step % 2**32, out)
    return out


def add_(held_N: torch.Tensor, record: torch.Tensor, bits: int) -> tuple[str, int] | None:
    """Adds what a record says; checks everything behind its header.

    Args:
        held_N: fp32, contiguous, on the CPU. Mutated if the record is right.
        record: uint8, as long as a record of so many numbers; its header was checked.
        bits: of the header.

    Returns:
        None, or the field that is wrong and its value or number; `held_N` is then as it was.
    """
    field, where = call("add_quantised_", held_N, record, bits).tolist()
    return (FIELDS[field], where) if field else None
