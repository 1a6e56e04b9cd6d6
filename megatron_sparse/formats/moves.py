"""Records of how far parameters moved: the codec of `parameters.method=exact`.

Every rank holds the parameters of the step before, so a shard's owner sends only the *move* of each
number: the difference of the old and the new bit pattern as ordered integers. Nothing is lost, NaN
payloads and the sign of zero included. docs/parameters.md specifies the record, and has a table of
bits by learning rate.

A number mostly moves where it moved before, because Adam's momentum moves it. So all ranks note for
each number whether its last move was *down*, in one bit: `down`, a 1-D int32 tensor of `down_words`
words; bit i % 32 of word i // 32 is number i's. All bits are 0 at first.

| coder | on the wire |
|---|---|
| rans | near the entropy of the moves given the old exponent and the direction of the last move |
| raw | the new numbers, where rans would not be smaller |

On a CPU the native part runs in torch's thread pool, on CUDA on the current stream. The bytes are
the same on every device and instruction set and for every number of threads.
"""

from collections.abc import Sequence

import torch

from megatron_sparse.cuda_ext.arguments import (
    GRAD_DTYPES,
    call,
    check_device,
    check_flat,
    overload,
    refusing,
)
from megatron_sparse.cuda_ext.reports import Copies, on_cpu, waiting_for
from megatron_sparse.formats.header import Header, check_fields, heads_of
from megatron_sparse.wire import FORMAT_MOVES, HEADER_BYTES, MOVES_CODERS, pad16, wrong_field

SUB_HEADER_BYTES = 16
_FIELDS = (
    *("", "payload checksum", "size", "chunks", "frequency table", "chunk offsets", "chunk"),
    "zeros of the sub-header",
)
"""What the decoder's status may blame; `MovesField` of `cuda_ext/csrc/moves_record.h`."""


def down_words(numel: int) -> int:
    """The int32 words of `down` for so many numbers."""
    return -(-numel // 32)


def encode_moves(
    old: torch.Tensor, new: torch.Tensor, *, epoch: int, down: torch.Tensor | None = None
) -> torch.Tensor:
    """Encodes the moves by which each number of `old` becomes that of `new`.

    The record is raw where "rans" would not be smaller; in a "rans" record each chunk may again be
    raw. The call needs as much memory as the numbers, on CUDA twice as much.

    Args:
        old: 1-D, contiguous, fp32, bf16 or fp16, on a CPU or a GPU; only read. Any number of
            elements to 2^34.
        new: of the same dtype, length and device; only read.
        epoch: a number that both sides know, such as the step; taken modulo 2^32.
        down: the directions of the last moves, see the module; only read. None: all 0. The sender
            notes the new ones by `keep_moves_`.

    Returns:
        A 1-D uint8 tensor on the same device, at most `most_bytes` long, a multiple of 16. Its
        bytes are the same on a CPU and a GPU. On CUDA the CPU waits for its length.

    Raises:
        ExtensionError: the tensors do not fit.

    Example:
        >>> old = torch.ones(4096, dtype=torch.bfloat16)
        >>> record = encode_moves(old, old * 1.0078125, epoch=3)
        >>> record.numel(), most_bytes(4096, torch.bfloat16)  # every number moves by one
        (240, 8256)
        >>> decode_moves_([record], [old], epoch=3)
        >>> float(old[5])
        1.0078125
    """
    check_device("encode_moves", "new", new)
    check_flat("encode_moves", "new", new, GRAD_DTYPES)
    check_flat("encode_moves", "old", old, (new.dtype,), new.numel(), new.device)
    down = _checked_down("encode_moves", new, down)
    room_bytes = refusing(overload("moves_room"), new.numel(), GRAD_DTYPES.index(new.dtype))
    out = torch.empty(room_bytes, dtype=torch.uint8, device=new.device)
    # The record takes the first `size` bytes of `out`.
    size = call("moves_encode", old, new, down, epoch % 2**32, out)
    # A copy: a view would keep all of `out` alive, which is as large as the numbers.
    return out[: int(size)].clone()


def _checked_down(op: str, numbers: torch.Tensor, down: torch.Tensor | None) -> torch.Tensor:
    """Refuses directions that do not fit `numbers`; zeros for None."""
    words = down_words(numbers.numel())
    if down is None:
        return torch.zeros(words, dtype=torch.int32, device=numbers.device)
    check_flat(op, "down", down, (torch.int32,), words, numbers.device)
    return down


def keep_moves_(held: torch.Tensor, new: torch.Tensor, down: torch.Tensor) -> None:
    """Turns `held` into `new`, and notes in `down` which numbers fell and which rose.

    A sender calls it when its record is with the others, who do the same when they decode. On CUDA
    it only queues the work.

    Args:
        held: 1-D, contiguous, fp32, bf16 or fp16, on a CPU or a GPU. Mutated.
        new: of the same dtype, length and device; only read.
        down: see the module. Mutated: bits of numbers that stay are as before.

    Raises:
        ExtensionError: the tensors do not fit.

    Example:
        >>> held, down = torch.ones(3), torch.zeros(1, dtype=torch.int32)
        >>> keep_moves_(held, torch.tensor([1.0, 0.9, 1.1]), down)
        >>> int(down[0])  # of the second number
        2
    """
    check_device("keep_moves_", "held", held)
    check_flat("keep_moves_", "held", held, GRAD_DTYPES)
    check_flat("keep_moves_", "new", new, (held.dtype,), held.numel(), held.device)
    call("moves_keep_", held, new, _checked_down("keep_moves_", held, down))


def decode_moves_(
    records: Sequence[torch.Tensor],
    held: Sequence[torch.Tensor],
    *,
    epoch: int,
    ranks: Sequence[int | None] | None = None,
    down: Sequence[torch.Tensor] | None = None,
) -> None:
    """Applies each record's moves to the old numbers in `held`, which become the new ones in place.

    A "rans" record needs as much memory again as its numbers: it is decoded into a buffer and then
    copied, because damage may show only at a chunk's end. On CUDA all records are decoded at once,
    and the CPU waits twice: for all headers, and for all statuses.

    Args:
        records: 1-D uint8 tensors from `encode_moves`; not trusted.
        held: for each record a 1-D, contiguous tensor: bit for bit the sender's old numbers. All
            of one dtype on the records' device; none overlaps another. Mutated.
        epoch: the senders'.
        ranks: the sender of each, for the error's text, if the caller knows it.
        down: for each record the sender's `down` of `encode_moves`. Mutated, as by `keep_moves_`.
            None: all 0.

    Raises:
        WireFormatError: a record is damaged, truncated, of another epoch, dtype or length; names
            the wrong field of the first such record. Its numbers are then unchanged. So are those
            of other records if a header is wrong; if a payload is, they may be new already.
        ExtensionError: an argument is no such tensor.
    """
    if ranks is None:
        ranks = [None] * len(records)
    coders = waiting_for(coders_of(records, held, epoch=epoch, ranks=ranks))
    if down is None:
        down = [_checked_down("decode_moves_", numbers, None) for numbers in held]
    waiting_for(check_applied(apply_moves_(records, held, coders, down), ranks))


def coders_of(
    records: Sequence[torch.Tensor],
    held: Sequence[torch.Tensor],
    *,
    epoch: int,
    ranks: Sequence[int | None],
) -> Copies[list[int]]:
    """Checks the headers of `decode_moves_`; returns of each record a position in `MOVES_CODERS`.

    Arguments and errors as there. A job calls this, `apply_moves_` and `check_applied` instead, to
    let its thread work for other buckets while the copies come in.
    """
    for record, old in zip(records, held, strict=True):
        check_device("decode_moves_", "held", old)
        check_flat("decode_moves_", "held", old, GRAD_DTYPES, device=held[0].device)
        check_flat("decode_moves_", "record", record, (torch.uint8,), device=old.device)
    coders = []
    heads = yield from heads_of(records)
    for head, record, old, rank in zip(heads, records, held, ranks, strict=True):
        header = Header.unpack(head, rank)
        check_fields(rank, ("format", FORMAT_MOVES, header.format))
        if header.flags >= len(MOVES_CODERS):
            raise wrong_field(rank, "flags", f"0 to {len(MOVES_CODERS) - 1}", header.flags)
        dtype = GRAD_DTYPES.index(old.dtype)  # in the order of the wire's codes
        header.check_whole(old.numel(), dtype, epoch, record.numel(), rank)
        coders.append(header.flags)
    return coders


def apply_moves_(
    records: Sequence[torch.Tensor],
    held: Sequence[torch.Tensor],
    coders: Sequence[int],
    down: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Decodes the payloads of records that `coders_of` has checked; returns their statuses.

    On CUDA it only queues the work.
    """
    aligned = [  # the kernels need addresses that are multiples of 16
        record.clone() if record.is_cuda and record.data_ptr() % 16 else record
        for record in records
    ]
    directions = [
        _checked_down("decode_moves_", numbers, bits)
        for numbers, bits in zip(held, down, strict=True)
    ]
    return call("moves_decode_", list(held), directions, aligned, list(coders))


def check_applied(statuses: torch.Tensor, ranks: Sequence[int | None]) -> Copies[None]:
    """Raises the `WireFormatError` of `decode_moves_` if a payload was damaged."""
    found = yield from on_cpu(statuses.view(-1))
    for (field, where), rank in zip(found.view(-1, 2).tolist(), ranks, strict=True):
        if field:  # number of the wrong field, 0 for a right record
            expected, got = "as docs/parameters.md specifies", f"damage at {where}"
            raise wrong_field(rank, _FIELDS[field], expected, got)


def most_bytes(numel: int, dtype: torch.dtype) -> int:
    """The most bytes that a record of `numel` numbers can have: those of a raw one.

    Example:
        >>> most_bytes(3, torch.float32)  # 64 of headers, 12 of numbers, padded to 16
        80
    """
    return HEADER_BYTES + SUB_HEADER_BYTES + pad16(numel * dtype.itemsize)
