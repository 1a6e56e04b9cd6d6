"""The message codec's ops, typed and checked. `ops` passes them on; shape suffixes are its.

A message is one record for each segment, back to back (docs/wire-format.md). What a record becomes
is asked for by a format code of `formats.header`, `FORMAT_ADAPTIVE` among them; where the sparse
form would not be smaller the record is dense, so a message never exceeds `message_capacity`.

The bytes do not depend on the device, nor do errors. Tables of offsets and flags, and what comes
back, are always on the CPU; a CUDA call therefore waits once for the device (`codec_cuda`).
"""

from __future__ import annotations

import torch

from megatron_sparse.cuda_ext import codec_cuda
from megatron_sparse.cuda_ext.arguments import (
    GRAD_DTYPES,
    RESIDUAL_DTYPES,
    call,
    check_code,
    check_device,
    check_flat,
    check_offsets,
    refusal,
)
from megatron_sparse.formats.header import (
    FORMAT_ADAPTIVE,
    FORMAT_BLOCKS,
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_HASH_BITMAP,
    FORMAT_PICI,
    HEADER_BYTES,
    RECORD_ALIGNMENT,
    VALUE_BYTES,
    wrong_field,
)
from megatron_sparse.formats.slots import Slots

MESSAGE_FIELDS = (
    "size", "magic", "version", "checksum", "format", "dtype", "flags", "epoch", "offset",
    "numel", "nnz", "payload_bytes", "indices", "prefix", "words", "block_size", "n_blocks",
    "block padding",
)  # fmt: skip
"""The field codes of `decode_add_`'s status (`csrc/decode_records.h`)."""

DEFAULT_BLOCK_SIZE = 256
"""Elements of a block; OmniReduce's own choice."""

_CPU = torch.device("cpu")
_TILE, _CHUNK = 4096, 8 * 4096
_PAPER_ORDER = 16  # beside the format code, for the native op


def message_capacity(segment_offsets: torch.Tensor, value_dtype: int) -> int:
    """The most bytes that a message of these segments takes: dense values, headers, padding.

    Example:
        >>> message_capacity(torch.tensor([0, 5, 8]), 0)  # 48 + 32 and 48 + 16
        144
    """
    check_code("message_capacity", "value_dtype", value_dtype)
    padded = (segment_offsets.diff() * VALUE_BYTES[value_dtype] + 15) // 16 * 16
    return int(padded.sum()) + HEADER_BYTES * padded.numel()


def scratch_capacity(segment_offsets: torch.Tensor, value_dtype: int) -> int:
    """Bytes of `encode`'s and `prune_encode`'s scratch on the CPU, whatever the density.

    Two bitmaps and the packed values; memory is touched only where there are values.

    Example:
        >>> scratch_capacity(torch.tensor([0, 5, 8]), 0)  # twice 1024 + 64, and 20 + 12 of values
        2208
    """
    check_code("scratch_capacity", "value_dtype", value_dtype)
    numel_S = segment_offsets.diff()
    bitmaps = (numel_S + _TILE - 1) // _TILE * (2 * _TILE // 8)
    values = numel_S * VALUE_BYTES[value_dtype] + (numel_S + _CHUNK - 1) // _CHUNK * 64
    return int((bitmaps + values).sum())


def record_kind(form: int, paper_order: bool) -> int:
    """What the native ops call a format: `RecordKind` of `csrc/record.h`, -1 for adaptive."""
    return form | _PAPER_ORDER if form == FORMAT_PICI and paper_order else form


def encode(
    grad_N: torch.Tensor,
    segment_offsets: torch.Tensor,
    segment_dense: torch.Tensor,
    nnz_S: torch.Tensor | None,
    value_dtype: int,
    epoch: int,
    out: torch.Tensor,
    scratch: torch.Tensor | None = None,
    *,
    form: int = FORMAT_COO,
    paper_order: bool = False,
    block_size: int = DEFAULT_BLOCK_SIZE,
    slots_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes the wire message of a pruned bucket, reading the gradient once.

    Values are converted to `value_dtype`, to nearest even where they do not fit, which pruned ones
    do. Wire cost: 48 bytes and the padding of each record; beside its values, COO takes 4 bytes an
    entry, Pici 516 for each 4096 elements, blocks 4 and the zeros for each block.

    Args:
        grad_N: on the CPU or a CUDA device; only read.
        segment_offsets: S+1 offsets from 0 to N; a segment has fewer than 2^31 elements.
        segment_dense: uint8, 1 for segments that are dense whatever they hold.
        nnz_S: int64, the non-zero elements of each segment, as `prune_` counts them. May be None
            for a gradient on a CUDA device, where the encoder counts.
        value_dtype: dtype code of the values.
        epoch: the step; its lower 32 bits travel.
        out: uint8, at least as long as the message (`message_capacity` always is), on the
            gradient's device; aligned to 16 bytes if that is CUDA. Mutated; what lies behind the
            message is left alone.
        scratch: uint8, `scratch_capacity` bytes, aligned to 8. Mutated. None allocates it, which
            costs more than the encoding of a small bucket. None for CUDA, whose allocator is fast.
        form: `FORMAT_DENSE`, `FORMAT_COO`, `FORMAT_PICI`, `FORMAT_BLOCKS`, or `FORMAT_ADAPTIVE` for
            the smallest of dense, COO and Pici in each segment, where COO wins a tie.
        paper_order: bits and values of Pici in the order of its paper instead of linear order.
        block_size: elements of a block: a power of two from 64 to 4096.
        slots_S: int64 on the CPU, S+1 bytes at which records begin and the last one's place ends:
            ascending multiples of 16 from 0 on. What a record leaves of its place is cleared. None
            puts them back to back.

    Returns:
        int64 bytes of each record, on the CPU. The bytes do not depend on the number of threads.

    Raises:
        ExtensionError: arguments that do not fit together, `out` or a slot too small, or counts
            that are not what the gradient holds.
    """
    check_flat("encode", "grad", grad_N, GRAD_DTYPES)
    kind = _check_encode(
        "encode", grad_N, segment_offsets, segment_dense, value_dtype, epoch, out, form,
        paper_order, block_size,
    )  # fmt: skip
    if nnz_S is not None:
        check_flat("encode", "nnz", nnz_S, (torch.int64,), segment_dense.numel())
    if check_device("encode", "grad", grad_N) == "cuda":
        _refuse_scratch("encode", scratch)
        out = _check_slots("encode", slots_S, segment_dense.numel(), out)
        report = codec_cuda.launch(
            "encode_records", grad_N,
            *_device_tables(grad_N.device, segment_offsets, segment_dense, kind), value_dtype,
            epoch, _blocks_only(form, block_size), out, _optional(slots_S, grad_N.device),
        )  # fmt: skip
        sizes, found_S = codec_cuda.read_report("encode", report, segment_offsets)
        _compare_counts(found_S, found_S if nnz_S is None else nnz_S.cpu())
        return sizes
    if nnz_S is None:
        raise refusal("encode", "nnz is missing", "the counts of a gradient on the CPU", nnz_S)
    check_flat("encode", "nnz", nnz_S, (torch.int64,), device=_CPU)
    scratch = _check_scratch("encode", scratch, segment_offsets, value_dtype)
    return call(
        "encode", grad_N, segment_offsets, segment_dense, nnz_S, value_dtype, epoch, out, scratch,
        kind, block_size, slots_S,
    )  # fmt: skip


def prune_encode(
    grad_N: torch.Tensor,
    residual_N: torch.Tensor,
    range_offsets: torch.Tensor,
    thresholds_R: torch.Tensor,
    segment_offsets: torch.Tensor,
    segment_dense: torch.Tensor,
    leak: float,
    wire_dtype: int,
    key: int,
    epoch: int,
    out: torch.Tensor,
    scratch: torch.Tensor | None = None,
    *,
    form: int = FORMAT_COO,
    paper_order: bool = False,
    block_size: int = DEFAULT_BLOCK_SIZE,
    capacity_S: torch.Tensor | None = None,
    slots_S: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Error feedback, pruning and encoding in one pass, without a pruned gradient in between.

    Message and residual are byte for byte those of `prune_` followed by `encode` (arguments as
    there), but the gradient is left as it was. Gradient and residual are read once, residual and
    message are written once.

    With `capacity_S` a segment sends its first non-zero elements up to that count. The others were
    not selected: their residual becomes leak * (value + residual), which is leak * x bit for bit
    where values are not narrowed (else to within the rounding of the residual). Infinity and NaN
    among them are not held back: the segment's last value becomes NaN.

    Args:
        grad_N: on the CPU or a CUDA device; only read.
        residual_N: fp32 or bf16, on the gradient's device. Mutated.
        range_offsets: R+1 offsets of consecutive ranges from 0 to N.
        thresholds_R: fp32, on the gradient's device; below 0 keeps all of a range, NaN too.
        segment_offsets: S+1 offsets from 0 to N; a segment has fewer than 2^31 elements.
        segment_dense: uint8, 1 for segments that are dense whatever they hold.
        leak: factor on what is dropped, 0 to 1.
        wire_dtype: dtype code in which values travel.
        key: of the random bits of stochastic rounding; negative for rounding to nearest.
        epoch: the step; its lower 32 bits travel.
        out: uint8, `message_capacity` bytes (with a capacity or slots, as many as those need),
            otherwise as in `encode`. Mutated.
        scratch: as in `encode`.
        form: as in `encode`.
        paper_order: as in `encode`.
        block_size: as in `encode`.
        capacity_S: int64 on the CPU, the most non-zero elements of each segment; None for no limit.
        slots_S: as in `encode`; each must have room for what its segment may send.

    Returns:
        int64 bytes of each record and int64 nnz_S, on the CPU. Neither they nor the bytes depend on
        the number of threads.

    Raises:
        ExtensionError: arguments that do not fit together; the residual is as it was.

    Example:
        >>> g, e, whole = torch.tensor([3.0, 1.0] * 8), torch.zeros(16), torch.tensor([0, 16])
        >>> out, no = torch.zeros(112, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        >>> prune_encode(g, e, whole, torch.tensor([2.0]), whole, no, 1.0, 1, 0, 0, out)
        (tensor([80]), tensor([8]))
    """
    device, numel = grad_N.device, grad_N.numel()
    check_flat("prune_encode", "grad", grad_N, GRAD_DTYPES)
    check_flat("prune_encode", "residual", residual_N, RESIDUAL_DTYPES, numel, device)
    check_offsets("prune_encode", "range_offsets", range_offsets, numel)
    ranges = range_offsets.numel() - 1
    check_flat("prune_encode", "thresholds", thresholds_R, (torch.float32,), ranges, device)
    kind = _check_encode(
        "prune_encode", grad_N, segment_offsets, segment_dense, wire_dtype, epoch, out, form,
        paper_order, block_size,
    )  # fmt: skip
    if check_device("prune_encode", "grad", grad_N) == "cuda":
        _refuse_scratch("prune_encode", scratch)
        out = _check_slots("prune_encode", slots_S, segment_dense.numel(), out)
        _check_capacity(segment_offsets, segment_dense, wire_dtype, form, out, capacity_S, slots_S)
        report = codec_cuda.launch(
            "prune_encode_records", grad_N, residual_N, codec_cuda.on_device(range_offsets, device),
            thresholds_R, leak, key, *_device_tables(device, segment_offsets, segment_dense, kind),
            wire_dtype, epoch, _blocks_only(form, block_size), out, _optional(capacity_S, device),
            _optional(slots_S, device),
        )  # fmt: skip
        return codec_cuda.read_report("prune_encode", report, segment_offsets)
    scratch = _check_scratch("prune_encode", scratch, segment_offsets, wire_dtype)
    return call(
        "prune_encode", grad_N, residual_N, range_offsets, thresholds_R, segment_offsets,
        segment_dense, leak, wire_dtype, key, epoch, out, scratch, kind, block_size, capacity_S,
        slots_S,
    )  # fmt: skip


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

    Raises:
        WireFormatError: names the rank and the field of the message that is wrong.
        ExtensionError: the other arguments do not fit together.
    """
    check_flat("decode_add_", "acc", acc_M, (torch.float32,))
    check_flat("decode_add_", "message", message, (torch.uint8,), device=acc_M.device)
    check_code("decode_add_", "value_dtype", value_dtype)
    if check_device("decode_add_", "acc", acc_M) == "cuda":
        offsets = codec_cuda.on_device(segment_offsets, acc_M.device)
        _check_slots("decode_add_", slots_S, segment_offsets.numel() - 1, None)
        status = codec_cuda.launch(
            "decode_add_", acc_M, message, offsets, value_dtype, epoch, base, fresh,
            _optional(slots_S, acc_M.device),
        )  # fmt: skip
        status = codec_cuda.read_status(status, segment_offsets, base, acc_M.numel())
    else:
        status = call(
            "decode_add_", acc_M, message, segment_offsets, value_dtype, epoch, base, fresh,
            slots_S,
        )  # fmt: skip
    code, segment, field, value = status.tolist()
    if code == 0:
        return
    name = MESSAGE_FIELDS[field]
    first, last = (*segment_offsets.tolist(), 0)[segment : segment + 2]
    numel = last - first
    expected: dict[str, object] = {
        "size": "as many bytes as its records announce"
        if slots_S is None
        else "records that fit their slots",
        "magic": "MSPG", "version": 1, "checksum": "the CRC-32 of the header",
        "format": "0 (dense), 1 (COO), 2 (Pici) or 3 (blocks)", "dtype": value_dtype,
        "flags": "0, or 1 for Pici in linear order",
        "epoch": epoch % 2**32, "offset": first, "numel": numel, "nnz": f"at most {numel}",
        "payload_bytes": f"what its format, nnz and {numel} elements demand",
        "indices": "strictly ascending, inside the segment",
        "prefix": "sums of the bits set in each tile's words, from 0 to nnz",
        "words": f"no bits behind element {numel - 1}",
        "block_size": "above 0, with zeros behind n_blocks",
        "n_blocks": f"enough for nnz and at most those of {numel} elements",
        "block padding": f"zeros behind element {numel - 1}",
    }  # fmt: skip
    raise wrong_field(rank, name, expected[name], f"{value} in segment {segment}")


def _check_encode(
    op: str,
    grad_N: torch.Tensor,
    segment_offsets: torch.Tensor,
    segment_dense: torch.Tensor,
    value_dtype: int,
    epoch: int,
    out: torch.Tensor,
    form: int,
    paper_order: bool,
    block_size: int,
) -> int:
    """Checks what both encoders take; returns the native op's kind."""
    check_offsets(op, "segment_offsets", segment_offsets, grad_N.numel())
    segments = segment_offsets.numel() - 1
    check_flat(op, "segment_dense", segment_dense, (torch.uint8,), segments, _CPU)
    check_flat(op, "out", out, (torch.uint8,), device=grad_N.device)
    check_code(op, "value_dtype", value_dtype)
    if epoch < 0:
        raise refusal(op, "epoch is out of range", "0 or more", epoch)
    if not FORMAT_ADAPTIVE <= form < FORMAT_HASH_BITMAP:
        raise refusal(op, "form is unknown", "-1 (adaptive) or a format code from 0 to 3", form)
    if not (64 <= block_size <= _TILE and block_size.bit_count() == 1):
        raise refusal(op, "block_size does not fit", "a power of two from 64 to 4096", block_size)
    return record_kind(form, paper_order)


def _check_scratch(
    op: str, scratch: torch.Tensor | None, segment_offsets: torch.Tensor, value_dtype: int
) -> torch.Tensor:
    if scratch is None:
        return torch.empty(scratch_capacity(segment_offsets, value_dtype), dtype=torch.uint8)
    check_flat(op, "scratch", scratch, (torch.uint8,), device=_CPU)
    return scratch


def _device_tables(
    device: torch.device, segment_offsets: torch.Tensor, segment_dense: torch.Tensor, kind: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets of the segments and what each is to become, on the device."""
    kinds = codec_cuda.record_kinds(segment_dense, kind, device)
    return codec_cuda.on_device(segment_offsets, device), kinds


def _optional(table: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if table is None else codec_cuda.on_device(table, device)


def _check_slots[T: (torch.Tensor, None)](
    op: str, slots_S: torch.Tensor | None, segments: int, out: T
) -> T:
    """Checks what the kernels rely on, as the CPU's bindings do; returns as much as slots take."""
    if slots_S is None:
        return out
    check_flat(op, "slots", slots_S, (torch.int64,), segments + 1, _CPU)
    if bool((slots_S.diff() < 0).any()):
        raise refusal(op, "slots is not ascending", "ascending bytes", slots_S.tolist()[:8])
    if int(slots_S[0]) != 0 or bool((slots_S % RECORD_ALIGNMENT != 0).any()):
        raise refusal(
            op, "slots are no places of records", "multiples of 16, from 0 on", slots_S.tolist()[:8]
        )
    if out is None:
        return out
    _check_room(op, int(slots_S[-1]), out)
    return out[: int(slots_S[-1])]


def _check_room(op: str, needed: int, out: torch.Tensor) -> None:
    if out.numel() < needed:
        raise refusal(op, "the output buffer is too small", f"{needed} bytes", out.numel())


def _check_capacity(
    segment_offsets: torch.Tensor,
    segment_dense: torch.Tensor,
    wire_dtype: int,
    form: int,
    out: torch.Tensor,
    capacity_S: torch.Tensor | None,
    slots_S: torch.Tensor | None,
) -> None:
    """Refuses what may turn out not to fit: the residual changes before the sizes are known."""
    op, most_S = "prune_encode", segment_offsets.diff()
    if capacity_S is None and slots_S is None:
        return _check_room(op, message_capacity(segment_offsets, wire_dtype), out)
    if capacity_S is not None:
        check_flat(op, "capacity", capacity_S, (torch.int64,), segment_dense.numel(), _CPU)
        if bool((capacity_S < 0).any()):
            raise refusal(op, "capacity is out of range", "0 or more", capacity_S.tolist()[:8])
        if form == FORMAT_BLOCKS:
            raise refusal(op, "blocks have no capacity on CUDA", "another format", "blocks")
        most_S = capacity_S
    most = Slots.of(
        segment_offsets, segment_dense, most_S, wire_dtype,
        FORMAT_DENSE if form == FORMAT_BLOCKS else form,
    )  # fmt: skip
    if slots_S is None:
        return _check_room(op, int(most.offsets[-1]), out)
    for segment, (needed, there) in enumerate(
        zip(most.sizes(), slots_S.diff().tolist(), strict=False)
    ):
        if needed > there:
            what = f"the slot of segment {segment} is too small"
            raise refusal(op, what, f"{needed} bytes", there)
    return None


def _blocks_only(form: int, block_size: int) -> int:
    """The block size for the CUDA encoders, which count blocks where it is not 0."""
    return block_size if form == FORMAT_BLOCKS else 0


def _refuse_scratch(op: str, scratch: torch.Tensor | None) -> None:
    if scratch is not None:
        raise refusal(op, "scratch is not used on CUDA", None, f"{scratch.numel()} bytes")


def _compare_counts(found_S: torch.Tensor, given_S: torch.Tensor) -> None:
    """Refuses counts that are not what the encoder found, in the words of the CPU's."""
    for segment, (found, given) in enumerate(zip(found_S.tolist(), given_S.tolist(), strict=True)):
        if found != given:
            what = f"nnz of segment {segment} is not what the gradient holds"
            raise refusal("encode", what, found, given)
