"""Messages of Rice records: the oracle of `encode` and `prune_encode` with this format.

The values to quantise are x = fl32(v + e): v is what pruning selects, e the residual afterwards,
which holds the rounding error of a narrow gradient. The quantisation error of x becomes the new e.
Raw (not quantised) values v are sent alone, in a dense record where that is not larger.
`reference.message.decode_add_` reads the messages.
"""

from itertools import pairwise

import torch

from megatron_sparse.cuda_ext.record_spec import Pruning, RecordSpec, Segments
from megatron_sparse.formats.header import Header
from megatron_sparse.reference import message, padded
from megatron_sparse.reference.checksum import sealed
from megatron_sparse.reference.prune import (
    BF16,
    FP32,
    grid_of,
    prune,
    prune_limited,
    residual_in,
    round_to,
    with_one_nan,
)
from megatron_sparse.reference.rice import encode
from megatron_sparse.wire import FORMAT_DENSE, RICE_BITS


def prune_encode(
    grad_N: torch.Tensor, pruning: Pruning, segments: Segments, spec: RecordSpec
) -> tuple[list[bytes], torch.Tensor]:
    """Prunes and encodes; returns each segment's record, and the new residual. Mutates nothing.

    Args are those of `cuda_ext.ops.prune_encode`.
    """
    # To be quantised: FP32, so that `prune` rounds only to the gradient's dtype.
    wire_dtype = FP32 if spec.value_dtype in RICE_BITS else spec.value_dtype
    if pruning.capacity_S is None:
        values_N, rest_N, _ = prune(grad_N, pruning, wire_dtype)
    else:
        values_N, rest_N = prune_limited(grad_N, pruning, wire_dtype, segments.offsets)
    return encode_segments(values_N, rest_N, segments, spec, pruning.key)


def encode_segments(
    values_N: torch.Tensor,
    residual_N: torch.Tensor,
    segments: Segments,
    spec: RecordSpec,
    key: int = -1,
) -> tuple[list[bytes], torch.Tensor]:
    """Encodes a pruned vector; returns each segment's record, and the new residual.

    Mutates nothing. Raw values leave the residual unchanged.

    Args:
        values_N: the values to send, 0 for elements that are not sent.
        residual_N: fp32 or bf16; added to values that are quantised, whose error replaces it.
        segments: the pieces of the vector.
        spec: dtype, chunk size and step of the records.
        key: of the random bits that round a bf16 residual; negative for rounding to nearest.
    """
    residual_N = residual_N.clone()
    if spec.value_dtype not in RICE_BITS:
        pieces = values_N.split(segments.offsets.diff().tolist())
        nnz_S = torch.tensor([int(piece.count_nonzero()) for piece in pieces], dtype=torch.int64)
        return message.encode(values_N, segments, nnz_S, spec), residual_N
    records = []
    for (begin, end), keep in zip(
        pairwise(segments.offsets.tolist()), segments.dense.tolist(), strict=True
    ):
        piece_M = values_N[begin:end].float()
        whole = keep or spec.without_indices
        index_K = torch.arange(end - begin) if whole else piece_M.nonzero().squeeze(1)
        x_K = piece_M[index_K] + residual_N[begin + index_K].float()
        # Both calls give the record and what x loses by it, which is the new residual.
        if keep:
            record, rest_K = _kept_record(x_K, piece_M, begin, spec)
        else:
            nnz = int(piece_M.count_nonzero())
            record, rest_K = encode(x_K, index_K, range(begin, end), spec, nnz)
        records.append(record)
        element_K = begin + index_K
        residual_N[element_K] = residual_in(residual_N.dtype, rest_K, key, element_K)
    return [sealed(r) if spec.checksum else r for r in records], residual_N


def _kept_record(
    x_M: torch.Tensor, piece_M: torch.Tensor, begin: int, spec: RecordSpec
) -> tuple[bytes, torch.Tensor]:
    """Encodes a kept segment as a dense record in bf16; returns it, and the rounding error of x.

    Each value is rounded alone, to nearest even, and stays finite. In quantised groups the scale
    would differ between ranks that share only some parameters of a group, and their copies of these
    parameters would drift apart.
    """
    finite_M = x_M.isfinite()
    rounded_M = round_to(torch.where(finite_M, x_M, 0), grid_of(BF16), None)
    sent_M = with_one_nan(torch.where(finite_M, rounded_M, x_M), torch.bfloat16)
    payload = padded(sent_M)
    header = Header(
        FORMAT_DENSE, BF16, len(x_M), int(piece_M.count_nonzero()), len(payload), begin, spec.step
    )
    return header.pack() + payload, torch.where(finite_M, x_M - rounded_M, 0)
