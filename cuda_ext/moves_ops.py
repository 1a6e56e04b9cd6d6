"""The ops of records of moves, typed: what `formats.moves` calls.

All tensors of a call are on one device. On a CPU both run in torch's thread pool; on CUDA they are
launched on the current stream, and the host waits for a few words at the end of encoding, and in
`fault`. The bytes are the same on every device and instruction set and for every number of threads.
Arguments that do not fit together are an `ExtensionError` with what was expected and what came.
"""

from __future__ import annotations

import torch

from megatron_sparse.cuda_ext.arguments import call, overload

FIELDS = (
    "",
    "payload checksum",
    "size",
    "chunks",
    "frequency table",
    "chunk offsets",
    "chunk",
    "zeros of the sub-header",
)
"""Names of the fields that the decoder's status may blame; `MovesField` of csrc/moves_record.h."""


def encode(old_N: torch.Tensor, new_N: torch.Tensor, coder: int, step: int) -> torch.Tensor:
    """The record that turns the old numbers into the new ones.

    Takes memory for the call: as much as the numbers, on CUDA with `rans` twice as much.

    Args:
        old_N: fp32, bf16 or fp16, contiguous. Only read.
        new_N: the same dtype and length. Only read.
        coder: 0 raw, 1 rans, 2 packed.
        step: for the header, taken modulo 2^32.

    Returns:
        uint8, as long as the record.
    """
    room = overload("moves_room")(new_N.numel(), _DTYPE_CODES.get(new_N.dtype, -1), coder)
    out = torch.empty(room, dtype=torch.uint8, device=new_N.device)
    size = call("moves_encode", old_N, new_N, coder, step % 2**32, out)
    # A copy: a view would keep the room alive, which is as large as the numbers.
    return out[: int(size)].clone()


def decode_(held_N: torch.Tensor, record: torch.Tensor, coder: int) -> torch.Tensor:
    """Turns the old numbers into the new ones; checks everything behind the record's header.

    A `rans` record needs as much memory again as `held_N` for the call. A record on CUDA at an
    address that 16 does not divide is copied first.

    Args:
        held_N: fp32, bf16 or fp16, contiguous. Mutated if the record is right.
        record: uint8, not trusted; its header was checked.
        coder: of the header.

    Returns:
        int64 [2], for `fault`.
    """
    if record.is_cuda and record.data_ptr() % 16:
        record = record.clone()
    return call("moves_decode_", held_N, record, coder)


def fault(status: torch.Tensor) -> tuple[str, int] | None:
    """The field of a record that is wrong and its number (of the context, offset or chunk).

    What was held is then as it was. None if nothing is wrong.
    """
    field, where = status.tolist()
    return (FIELDS[field], where) if field else None


_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
