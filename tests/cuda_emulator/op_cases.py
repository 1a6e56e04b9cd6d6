"""Messages that the tests of `ops` encode, damage and decode."""

from __future__ import annotations

from itertools import pairwise

import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import RecordSpec, Segments
from megatron_sparse.wire import (
    FORMAT_ADAPTIVE,
    FORMAT_BLOCKS,
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_PICI,
    HEADER_BYTES,
)
from tests.cuda_emulator.codec_cases import STEP, gradient
from tests.cuda_emulator.emulated import DTYPE_CODES

FORMS = {
    "dense": {"record_format": FORMAT_DENSE},
    "coo": {"record_format": FORMAT_COO},
    "pici": {"record_format": FORMAT_PICI},
    "pici_paper": {"record_format": FORMAT_PICI, "paper_order": True},
    "blocks": {"record_format": FORMAT_BLOCKS, "block_size": 64},
    "auto": {"record_format": FORMAT_ADAPTIVE},
}
# Empty, one element, a tile and one more, a tile and three less, a shard that is always dense.
SEGMENTS = torch.tensor([0, 0, 1, 4098, 8191, 8300, 9001])
KEEP = torch.tensor([0, 0, 0, 0, 1, 0], dtype=torch.uint8)
NUMEL = int(SEGMENTS[-1])
FILL = 0xEE


def counts(grad_N: torch.Tensor) -> torch.Tensor:
    return torch.tensor([int((grad_N[a:b] != 0).sum()) for a, b in pairwise(SEGMENTS.tolist())])


def room(code: int) -> torch.Tensor:
    """The buffer of the message, and 32 bytes behind it that nothing may touch."""
    capacity = ops.message_capacity(SEGMENTS, code)
    return torch.full((capacity + 32,), FILL, dtype=torch.uint8)


def assert_same_message(
    got: torch.Tensor, got_sizes: torch.Tensor, wanted: torch.Tensor, wanted_sizes: torch.Tensor
) -> None:
    assert got_sizes.tolist() == wanted_sizes.tolist()
    used, got = int(wanted_sizes.sum()), got.cpu()
    assert torch.equal(got[:used], wanted[:used])
    assert bool((got[used:] == FILL).all()), "bytes behind the message were written"


def message_of(form: str, code: int, density: float = 0.05) -> torch.Tensor:
    grad_N, out = gradient(NUMEL, density, list(DTYPE_CODES)[code], seed=code), room(code)
    nnz = counts(grad_N)
    sizes = ops.encode(
        grad_N, Segments(SEGMENTS, KEEP), nnz, RecordSpec(code, STEP, **FORMS[form]), out[:-32]
    )
    return out[: int(sizes.sum())].clone()


def damages(message: torch.Tensor) -> list[torch.Tensor]:
    """Messages with one byte changed, and with bytes missing or too many."""
    damaged = []
    for at in (*range(HEADER_BYTES), HEADER_BYTES + 1, len(message) - 60):
        other = message.clone()
        other[at] ^= 0x5A
        damaged.append(other)
    return [*damaged, message[:-16], message[:40], torch.cat([message, message[:16]])]
