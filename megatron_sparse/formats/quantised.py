"""Records of quantised differences: the codec of `parameters.method=lossy`.

The difference of two fp32 vectors, in groups of 128 numbers with a common bf16 scale and a code of
4 or 8 bits for each number: 4.125 or 8.125 bits a number. docs/quantised.md specifies the record.

    scale = bf16(max |difference| / limit)      limit is 7 or 127
    code  = round(difference / scale)           to nearest even, within the limit
    added = code * scale

A group with NaN, infinity or a magnitude of 2^127 has the scale NaN, so all its numbers become NaN.
The native part runs in torch's thread pool; the result does not depend on the number of threads or
on the instruction set.
"""

import torch

from megatron_sparse.cuda_ext.arguments import call, overload, refusing
from megatron_sparse.formats.header import check_fields, read_head
from megatron_sparse.wire import FORMAT_QUANTISED, HEADER_BYTES, QUANTISED_BITS, wrong_field

_FIELDS = ("", "payload checksum", "group size", "zeros of the sub-header", "scale")
"""What the decoder's status may blame; `QuantisedField` of `cuda_ext/csrc/quantised.cpp`."""


def encode_difference(
    new: torch.Tensor, old: torch.Tensor, *, bits: int, epoch: int
) -> torch.Tensor:
    """The record of `new - old`, rounded once to fp32 and then quantised.

    Args:
        new: 1-D, contiguous, fp32, on the CPU; only read.
        old: like `new`, and of the same length; only read.
        bits: for each code, one of `wire.QUANTISED_BITS`.
        epoch: a number that both sides know; taken modulo 2^32.

    Returns:
        A 1-D uint8 tensor of `record_bytes`.

    Raises:
        ExtensionError: the tensors or the bits do not fit.

    Example:
        >>> old = torch.zeros(256)
        >>> record = encode_difference(torch.linspace(0, 7, 256), old, bits=4, epoch=3)
        >>> record.numel()  # 64 of headers, 2 scales padded to 16, 128 of codes
        208
        >>> add_difference_(record, old, epoch=3)
        >>> float(old[255]), float(old[254])  # the scale of the second group is 1
        (7.0, 7.0)
    """
    out = torch.empty(record_bytes(new.numel(), bits), dtype=torch.uint8)
    call("quantise", new, old, bits, epoch % 2**32, out)
    return out


def add_difference_(
    record: torch.Tensor, held: torch.Tensor, *, epoch: int, rank: int | None = None
) -> None:
    """Adds a record's difference to `held`, in fp32 and in place: the same bits everywhere.

    Args:
        record: 1-D uint8, from `encode_difference`; not trusted.
        held: 1-D, contiguous, fp32, on the CPU. Mutated.
        epoch: the sender's.
        rank: the sender, for the error's text, if the caller knows it.

    Raises:
        WireFormatError: the record is damaged, truncated, of another epoch or length; names the
            field. `held` is then unchanged.
        ExtensionError: `held` is no such tensor.
    """
    header, _ = read_head(record, HEADER_BYTES, rank)
    check_fields(rank, ("format", FORMAT_QUANTISED, header.format))
    bits = header.flags  # this format stores the bits of a code in the field flags
    if bits not in QUANTISED_BITS:
        raise wrong_field(rank, "flags", " or ".join(map(str, QUANTISED_BITS)), bits)
    header.check_whole(held.numel(), 0, epoch, record.numel(), rank)  # 0 is the code of fp32
    check_fields(rank, ("size", record_bytes(held.numel(), bits), record.numel()))
    field, where = call("add_quantised_", held, record, bits).tolist()
    if field:  # number of the wrong field, 0 for a right record
        expected, got = "as docs/quantised.md specifies", f"damage at {where}"
        raise wrong_field(rank, _FIELDS[field], expected, got)


def record_bytes(numel: int, bits: int) -> int:
    """The bytes of a record of `numel` numbers with codes of `bits` bits.

    Example:
        >>> record_bytes(1_000_000, 4) * 8 / 1_000_000
        4.125824
    """
    return refusing(overload("quantised_bytes"), numel, bits)
