"""The op that adds up messages, typed and checked. `ops` passes it on; shape suffixes are its."""

from __future__ import annotations

import torch

from megatron_sparse.cuda_ext import codec_cuda
from megatron_sparse.cuda_ext.arguments import call, check_code, check_device, check_flat
from megatron_sparse.cuda_ext.codec_checks import check_slots
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.wire import wrong_field

MESSAGE_FIELDS = (
    "size",
    "magic",
    "version",
    "checksum",
    "format",
    "dtype",
    "flags",
    "epoch",
    "offset",
    "numel",
    "nnz",
    "payload_bytes",
    "indices",
    "prefix",
    "words",
    "block_size",
    "n_blocks",
    "block padding",
)
"""The field codes of `decode_add_`'s status (`csrc/decode_records.h`)."""


def decode_add_(
    acc_M: torch.Tensor,
    message: torch.Tensor,
    segment_offsets: torch.Tensor,
    value_dtype: int,
    epoch: int,
    base: int,
    *,
    rank: int,
    fresh: bool = False,
    slots_S: torch.Tensor | None = None,
    reports: Reports | None = None,
) -> None:
    """Adds the records of one peer's message to an fp32 accumulator, whatever their formats.

    Nothing in the message is trusted: every header field, index, prefix sum and bit is checked
    before the first addition, and a bad message leaves `acc_M` as it was.

    Args:
        acc_M: fp32 on the CPU or a CUDA device; element 0 is the bucket's element `base`. Mutated.
        message: uint8 on the same device, exactly the records of these segments; on CUDA aligned
            to 16 bytes, as all records of a message are whose first one is.
        segment_offsets: offsets in the bucket of the segments that the message must hold.
        value_dtype: dtype code that the values must have.
        epoch: the step that the records must be of.
        base: the bucket's element that `acc_M` begins with.
        rank: the sender, for the error's text.
        fresh: take the segments' part of `acc_M` for zero, whatever it holds: the first message
            then needs no pass of its own that clears it.
        slots_S: where the records begin, as `encode` was given it; the message is as long as all
            slots. What lies behind a record in its slot is not looked at. None for back to back.
        reports: takes the call's status, which then is not waited for: what is wrong with the
            message is raised when they are read.

    Raises:
        WireFormatError: names the rank and the field of the message that is wrong.
        ExtensionError: the other arguments do not fit together.
    """
    check_flat("decode_add_", "acc", acc_M, (torch.float32,))
    check_flat("decode_add_", "message", message, (torch.uint8,), device=acc_M.device)
    check_code("decode_add_", "value_dtype", value_dtype)
    on_cuda = check_device("decode_add_", "acc", acc_M) == "cuda"
    offsets, slots = segment_offsets, slots_S
    if on_cuda:
        check_slots("decode_add_", slots_S, segment_offsets.numel() - 1, None)
        offsets, slots = (
            codec_cuda.on_device(table, acc_M.device) for table in (segment_offsets, slots_S)
        )
    status = call("decode_add_", acc_M, message, offsets, value_dtype, epoch, base, fresh, slots)

    def look(words: torch.Tensor) -> None:
        if on_cuda:
            codec_cuda.check_status(words, segment_offsets, base, acc_M.numel())
        refuse_message(words, segment_offsets, value_dtype, epoch, rank, slots_S is not None)

    if reports is None:
        look(status.cpu())
    else:
        reports.add(status, look)


def refuse_message(
    status: torch.Tensor,
    segment_offsets: torch.Tensor,
    value_dtype: int,
    epoch: int,
    rank: int,
    has_slots: bool,
) -> None:
    """Raises what the decoder's status says of a message, if anything."""
    code, segment, field, value = status.tolist()
    if code == 0:
        return
    name = MESSAGE_FIELDS[field]
    first, last = (*segment_offsets.tolist(), 0)[segment : segment + 2]
    numel = last - first
    expected: dict[str, object] = {
        "size": "as many bytes as its records announce"
        if not has_slots
        else "records that fit their slots",
        "magic": "MSPG",
        "version": 1,
        "checksum": "the CRC-32 of the header",
        "format": "0 (dense), 1 (COO), 2 (Pici) or 3 (blocks)",
        "dtype": value_dtype,
        "flags": "0, or 1 for Pici in linear order",
        "epoch": epoch % 2**32,
        "offset": first,
        "numel": numel,
        "nnz": f"at most {numel}",
        "payload_bytes": f"what its format, nnz and {numel} elements demand",
        "indices": "strictly ascending, inside the segment",
        "prefix": "sums of the bits set in each tile's words, from 0 to nnz",
        "words": f"no bits behind element {numel - 1}",
        "block_size": "above 0, with zeros behind n_blocks",
        "n_blocks": f"enough for nnz and at most those of {numel} elements",
        "block padding": f"zeros behind element {numel - 1}",
    }
    raise wrong_field(rank, name, expected[name], f"{value} in segment {segment}")
