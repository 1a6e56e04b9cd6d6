"""Messages of Rice records: the oracle of `encode` and `prune_encode` with this format.

Quantised, the values of a segment are x = fl32(v + e): v is what pruning selects, e the residual
afterwards, which holds the rounding error of a narrow gradient. What x loses goes back to e.
`reference.message.decode_add_` reads the messages.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from megatron_sparse.cuda_ext.record_spec import Pruning, RecordSpec, Segments
from megatron_sparse.reference import message
from megatron_sparse.reference.capacity import prune_limited
from megatron_sparse.reference.counter_hash import DRAW_RESIDUAL, counter_hash
from megatron_sparse.reference.prune import BF16, FP32, grid_of, prune, round_to
from megatron_sparse.reference.rice import Place, encode
from megatron_sparse.reference.rice_chunk import RiceForm
from megatron_sparse.wire import FORMAT_DENSE, RICE_BITS

KEPT = 3
"""Dtype code of segments that are always sent whole in a quantised message: 8 bits."""


def prune_encode(
    grad_N: torch.Tensor, pruning: Pruning, segments: Segments, spec: RecordSpec
) -> tuple[list[bytes], torch.Tensor]:
    """The record of each segment, and the new residual; mutates nothing.

    Args are those of `cuda_ext.ops.prune_encode`.
    """
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
    """The record of each segment, and the new residual; mutates nothing.

    Args:
        values_N: the values to send, 0 for elements without an entry.
        residual_N: fp32 or bf16; quantised values take it along and leave their rest in it.
        segments: the pieces.
        spec: how they are written.
        key: of the random bits that round a bf16 residual; negative for rounding to nearest.
    """
    records, residual_N = [], residual_N.clone()
    for (begin, end), keep in zip(
        pairwise(segments.offsets.tolist()), segments.dense.tolist(), strict=True
    ):
        if spec.value_dtype not in RICE_BITS:
            records.append(_raw_record(values_N, begin, end, bool(keep), spec))
            continue
        value_dtype = KEPT if keep else spec.value_dtype
        form = RiceForm(value_dtype, spec.log2_span, not (keep or spec.without_indices))
        piece_M = values_N[begin:end].float()
        index_K = piece_M.nonzero().squeeze(1) if form.indices else torch.arange(end - begin)
        x_K = piece_M[index_K] + residual_N[begin + index_K].float()
        place, nnz = Place(end - begin, begin, spec.step), int(piece_M.count_nonzero())
        made = encode(x_K, index_K if form.indices else None, place, form, nnz)
        records.append(made.record)
        rest_K = made.residual_K
        if residual_N.dtype == torch.bfloat16:
            random = counter_hash(key, DRAW_RESIDUAL, begin + index_K) if key >= 0 else None
            rest_K = round_to(rest_K, grid_of(BF16), random)
        residual_N[begin + index_K] = rest_K.to(residual_N.dtype)
    return records, residual_N


def _raw_record(
    values_N: torch.Tensor, begin: int, end: int, keep: bool, spec: RecordSpec
) -> bytes:
    """The Rice record of a segment, or the dense one where that is not larger."""
    piece_M = values_N[begin:end]
    nnz = piece_M.count_nonzero().view(1)
    whole = Segments(torch.tensor([begin, end]), torch.ones(1, dtype=torch.uint8))
    dense_spec = RecordSpec(spec.value_dtype, spec.step, FORMAT_DENSE)
    (dense,) = message.encode(values_N, whole, nnz, dense_spec)
    if keep:
        return dense
    index_K = piece_M.nonzero().squeeze(1)
    form = RiceForm(spec.value_dtype, spec.log2_span)
    sparse = encode(piece_M[index_K], index_K, Place(end - begin, begin, spec.step), form).record
    return sparse if len(sparse) < len(dense) else dense
