"""The ops that decode peers' messages and add them to an accumulator `acc_M`, typed and checked.

`ops`, which exports them, defines the shape suffixes, and `Expected` what a message must state. The
accumulator holds a part of the bucket, from the bucket's element `base` on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from megatron_sparse.cuda_ext import codec_cuda
from megatron_sparse.cuda_ext.arguments import call, refusal
from megatron_sparse.cuda_ext.checksum_ops import payload_sums
from megatron_sparse.cuda_ext.codec_checks import check_slots
from megatron_sparse.cuda_ext.record_spec import Expected
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.wire import VERSION, wrong_field


def decode_add_(
    acc_M: torch.Tensor,
    message: torch.Tensor,
    expected: Expected,
    base: int,
    *,
    fresh: bool = False,
    reports: Reports | None = None,
) -> None:
    """Adds the records of one peer's message to an fp32 accumulator, whatever their formats.

    Nothing in the message is trusted: every header field, index, prefix sum and bit is checked
    before the first addition, and a bad message leaves `acc_M` as it was.

    Args:
        acc_M: fp32 on the CPU or a CUDA device; element 0 is the bucket's element `base`. Mutated.
        message: uint8 on the same device, the records of `expected.segment_offsets` and nothing
            else; on CUDA aligned to 16 bytes, as all its records then are.
        expected: the header values that the records must have.
        base: the bucket's element that `acc_M` begins with.
        fresh: treat the segments' part of `acc_M` as zero and ignore its content. The first message
            of a sum then needs no separate pass that clears `acc_M`.
        reports: takes the call's status, so that the call need not wait for the device; its `read`
            raises the message's error.

    Raises:
        WireFormatError: names the rank and the field of the message that is wrong.
        ExtensionError: the other arguments do not fit together.
    """
    status = _decode_(acc_M, [message], expected, base, fresh=fresh, is_sum=False)
    check = partial(_check_status, acc_M, base, expected)
    if reports is None:
        check(status.cpu())
    else:
        reports.add(status, check)


def decode_sum_(
    acc_M: torch.Tensor,
    messages: Sequence[torch.Tensor],
    expected: Expected,
    base: int,
    ranks: Sequence[int],
    *,
    fresh: bool = True,
    reports: Reports | None = None,
) -> None:
    """Adds several ranks' messages in one pass: bit for bit like one `decode_add_` after another.

    On the CPU all messages are checked before the first addition. Then each element is written
    once: a piece of `acc_M` stays in the cache while all messages are added to it. On CUDA a batch
    of 16 messages takes two kernels, and writes every element. Every header, index, prefix sum and
    bit is checked before its use, but some only after the first elements have been written.

    Args:
        acc_M: fp32 on the CPU or a CUDA device; element 0 is the bucket's element `base`. Mutated:
            the segments' part becomes the sum, in the order of the messages. After an error it is
            undefined on CUDA, and on the CPU it is the sum of the other messages. Elements outside
            the segments are kept.
        messages: at least one uint8 message on the same device, each of them as `decode_add_`'s.
        expected: the header values that all records must have; its rank is not read.
        base: the bucket's element that `acc_M` begins with.
        ranks: the sender of each message, for errors.
        fresh: treat the segments' part of `acc_M` as zero, whatever it holds; must be true on CUDA.
        reports: takes the call's statuses, so that the call need not wait; its `read` raises the
            error of the first bad message.

    Raises:
        WireFormatError: names the rank and the field of the first message that is wrong.
        ExtensionError: the other arguments do not fit together.
    """
    if not messages or len(messages) != len(ranks):
        got = f"{len(messages)} messages of {len(ranks)} ranks"
        raise refusal("decode_sum_", "a message is missing", "one of each rank", got)
    statuses = _decode_(acc_M, messages, expected, base, fresh=fresh, is_sum=True)
    if reports is None:
        statuses = statuses.cpu()  # one copy, of a row for each message
    for rank, status in zip(ranks, statuses.view(len(ranks), -1), strict=True):
        check = partial(_check_status, acc_M, base, replace(expected, rank=rank))
        if reports is None:
            check(status)
        else:
            reports.add(status, check)


def _decode_(
    acc_M: torch.Tensor,
    messages: Sequence[torch.Tensor],
    expected: Expected,
    base: int,
    *,
    fresh: bool,
    is_sum: bool,
) -> torch.Tensor:
    """Calls the native op; returns its statuses, one after the other for each message.

    They are on the device of `acc_M`. Only `slots` are checked here, and only on CUDA.
    """
    offsets, slots, device = expected.segment_offsets, expected.slots, acc_M.device
    records = offsets.numel() - 1
    if acc_M.is_cuda:  # the CUDA op does not read the slots' content before the launch
        check_slots("decode_sum_" if is_sum else "decode_add_", slots, records, None)
    slots = codec_cuda.on_device(slots, device)
    sums = payload_sums(messages, records, slots) if expected.checksum else None
    return call(
        "decode_",
        acc_M,
        list(messages),
        codec_cuda.on_device(offsets, device),
        expected.value_dtype,
        expected.step,
        base,
        fresh,
        is_sum,
        slots,
        sums,
    )


def _check_status(acc_M: torch.Tensor, base: int, expected: Expected, status: torch.Tensor) -> None:
    """Raises the error that a decoder's status, on the CPU, reports for a message, if any."""
    if acc_M.is_cuda:
        codec_cuda.check_status(status, expected.segment_offsets, base, acc_M.numel())
    refuse_message(status, expected, has_slots=expected.slots is not None)


def refuse_message(status: torch.Tensor, wanted: Expected, *, has_slots: bool) -> None:
    """Raises the `WireFormatError` of a decoder's status, if any; it names rank and field.

    `status` is on the CPU: error code (0: none), segment, number of the wrong field, its value.
    """
    code, segment, field, value = status.tolist()
    if code == 0:
        return
    # For bytes after the last record the status names segment S, which does not exist. The 0
    # appended here is its end, so that the look-up of its length does not fail.
    offsets = [*wanted.segment_offsets.tolist(), 0]
    first, numel = offsets[segment], offsets[segment + 1] - offsets[segment]
    size = "records that fit their slots" if has_slots else "as many bytes as its records announce"
    sealed = " and the payload's sum" if wanted.checksum else ""
    # The place of a field in this dict is its number in the status (`csrc/record_check.h`).
    fields: dict[str, object] = {
        "size": size,
        "magic": "MSPG",
        "version": VERSION,
        "checksum": f"the CRC-32 of the header{sealed}",
        "format": "0 (dense), 1 (COO), 2 (Pici), 3 (blocks) or 8 (Rice)",
        "dtype": wanted.value_dtype,
        "flags": "0, or 1 for Pici in linear order",
        "step": wanted.step % 2**32,
        "offset": first,
        "numel": numel,
        "nnz": f"at most {numel}",
        "payload_bytes": f"what its format, nnz and {numel} elements demand",
        "indices": "strictly ascending, inside the segment",
        "prefix": "sums of the bits set in each tile's words, from 0 to nnz",
        "words": f"no bits after element {numel - 1}",
        "block_size": "above 0, with zeros after n_blocks",
        "n_blocks": f"enough for nnz and at most those of {numel} elements",
        "block padding": f"zeros after element {numel - 1}",
        "chunk": "Rice's sub-header: indices or none, chunks of 2^12 to 2^24 elements",
        "table": "rows that lead from nothing to all entries and words",
        "rice": "the words that a chunk's entries demand, each entry inside the chunk",
    }
    name, expected = list(fields.items())[field]
    raise wrong_field(wanted.rank, name, expected, f"{value} in segment {segment}")
