"""Shapes, dtypes and devices of every op's result, for tracing without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

STATUS_WORDS = 4
"""Words of a decoder's status, and of an encoder's report before the sizes and counts."""


def register(part: Literal["cpu", "cuda"]) -> None:
    """Registers the fakes of a library's schemas; called once, right after it was loaded."""
    for name, fake in _FAKES[part].items():
        torch.library.register_fake(f"megatron_sparse::{name}", fake)


def _prune(
    grad: torch.Tensor,
    residual: torch.Tensor,
    range_offsets: torch.Tensor,
    thresholds: torch.Tensor,
    leak: float,
    wire_dtype: int,
    key: int,
    tie_chances: torch.Tensor | None = None,
) -> torch.Tensor:
    return thresholds.new_empty(thresholds.shape, dtype=torch.int64)


def _sample_threshold(
    grad: torch.Tensor,
    residual: torch.Tensor | None,
    range_offsets: torch.Tensor,
    densities: torch.Tensor,
    samples: int,
    keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    thresholds = grad.new_empty(densities.shape, dtype=torch.float32)
    return thresholds, torch.empty_like(thresholds), grad.new_empty(keys.shape, dtype=torch.int64)


def _encode(
    grad: torch.Tensor,
    segment_offsets: torch.Tensor,
    segment_dense: torch.Tensor,
    nnz: torch.Tensor,
    value_dtype: int,
    step: int,
    out: torch.Tensor,
    scratch: torch.Tensor,
    kind: int,
    block_size: int,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    return nnz.new_empty(nnz.shape)


def _prune_encode(
    grad: torch.Tensor,
    residual: torch.Tensor,
    range_offsets: torch.Tensor,
    thresholds: torch.Tensor,
    segment_offsets: torch.Tensor,
    segment_dense: torch.Tensor,
    leak: float,
    wire_dtype: int,
    key: int,
    step: int,
    out: torch.Tensor,
    scratch: torch.Tensor,
    kind: int,
    block_size: int,
    capacity: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    tie_chances: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = segment_offsets.new_empty(segment_dense.shape)
    return sizes, segment_offsets.new_empty(segment_dense.shape)


def _encode_rice(
    grad: torch.Tensor,
    segment_offsets: torch.Tensor,
    segment_dense: torch.Tensor,
    value_dtype: int,
    step: int,
    out: torch.Tensor,
    scratch: torch.Tensor,
    log2_span: int,
    without_indices: bool = False,
    residual: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = segment_offsets.new_empty(segment_dense.shape)
    return sizes, torch.empty_like(sizes)


def _prune_encode_rice(
    grad: torch.Tensor,
    residual: torch.Tensor,
    range_offsets: torch.Tensor,
    thresholds: torch.Tensor,
    segment_offsets: torch.Tensor,
    segment_dense: torch.Tensor,
    leak: float,
    value_dtype: int,
    key: int,
    step: int,
    out: torch.Tensor,
    scratch: torch.Tensor,
    log2_span: int,
    without_indices: bool = False,
    capacity: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    tie_chances: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = segment_offsets.new_empty(segment_dense.shape)
    return sizes, torch.empty_like(sizes)


def _decode_add(
    acc: torch.Tensor,
    message: torch.Tensor,
    segment_offsets: torch.Tensor,
    value_dtype: int,
    step: int,
    base: int,
    fresh: bool = False,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    return segment_offsets.new_empty(STATUS_WORDS)


def _decode_sum(
    acc: torch.Tensor,
    messages: list[torch.Tensor],
    segment_offsets: torch.Tensor,
    value_dtype: int,
    step: int,
    base: int,
    fresh: bool = True,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    return segment_offsets.new_empty(STATUS_WORDS * len(messages))


def _encode_records(
    grad: torch.Tensor,
    segment_offsets: torch.Tensor,
    segment_formats: torch.Tensor,
    value_dtype: int,
    step: int,
    block_size: int,
    out: torch.Tensor,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    return segment_offsets.new_empty(STATUS_WORDS + 2 * segment_formats.shape[0])


def _prune_encode_records(
    grad: torch.Tensor,
    residual: torch.Tensor,
    range_offsets: torch.Tensor,
    thresholds: torch.Tensor,
    leak: float,
    key: int,
    segment_offsets: torch.Tensor,
    segment_formats: torch.Tensor,
    value_dtype: int,
    step: int,
    block_size: int,
    out: torch.Tensor,
    capacity: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    tie_chances: torch.Tensor | None = None,
) -> torch.Tensor:
    return segment_offsets.new_empty(STATUS_WORDS + 2 * segment_formats.shape[0])


def _encode_rice_records(
    grad: torch.Tensor,
    segment_offsets: torch.Tensor,
    segment_formats: torch.Tensor,
    value_dtype: int,
    step: int,
    log2_span: int,
    without_indices: bool,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    return segment_offsets.new_empty(STATUS_WORDS + 2 * segment_formats.shape[0])


def _prune_encode_rice_records(
    grad: torch.Tensor,
    residual: torch.Tensor,
    range_offsets: torch.Tensor,
    thresholds: torch.Tensor,
    leak: float,
    key: int,
    segment_offsets: torch.Tensor,
    segment_formats: torch.Tensor,
    value_dtype: int,
    step: int,
    log2_span: int,
    without_indices: bool,
    out: torch.Tensor,
    capacity: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    tie_chances: torch.Tensor | None = None,
) -> torch.Tensor:
    return segment_offsets.new_empty(STATUS_WORDS + 2 * segment_formats.shape[0])


def _peer_collective(*arguments: Any) -> None:
    """Mutates its outputs and returns nothing."""


def _nccl_sparse_sum(acc: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, int]:
    words = torch.library.get_ctx().new_dynamic_size()
    return acc.new_empty(words, dtype=torch.int64), 0


def _hash_map(entries: torch.Tensor, *_: object) -> torch.Tensor:
    return entries.new_empty(entries.shape)


def _hierarchical_hash(
    indices: torch.Tensor,
    values: torch.Tensor,
    partition_of: torch.Tensor,
    numel: int,
    partitions: int,
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        indices.new_empty(indices.shape),
        values.new_empty(values.shape),
        indices.new_empty(partitions + 1),
        indices.new_empty(2),
    )


def _hash_split(partition_of: torch.Tensor, partitions: int) -> tuple[torch.Tensor, torch.Tensor]:
    return partition_of.new_empty(partition_of.shape), partition_of.new_empty(partitions + 1)


def _hash_memory(
    indices: torch.Tensor, partition_of: torch.Tensor, numel: int, partitions: int, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    entries, offsets = _hash_split(partition_of, partitions)
    return entries, offsets, indices.new_empty(2)


def _hash_bitmap_pack(
    values: torch.Tensor, words: torch.Tensor, packed: torch.Tensor
) -> torch.Tensor:
    return values.new_empty(1, dtype=torch.int64)


def _hash_bitmap_elements(
    words: torch.Tensor, nnz: int, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return words.new_empty(nnz, dtype=torch.int64), words.new_empty(2, dtype=torch.int64)


def _hash_bitmap_add(acc: torch.Tensor, words: torch.Tensor, *_: object) -> torch.Tensor:
    return words.new_empty(2, dtype=torch.int64)


def _row_sparse_sum(rows: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((offsets.shape[0] - 1, rows.shape[1]))


def _row_sparse_union(
    indices: torch.Tensor, offsets: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    return indices.new_empty(size), indices.new_empty(4)


def _row_sparse_match(local: torch.Tensor, union: torch.Tensor) -> torch.Tensor:
    return local.new_empty(local.shape)


def _row_sparse_expand(
    local: torch.Tensor, rows: torch.Tensor, union: torch.Tensor
) -> torch.Tensor:
    return rows.new_empty((union.shape[0], rows.shape[1]))


def _moves_encode(
    old: torch.Tensor, new: torch.Tensor, coder: int, step: int, out: torch.Tensor
) -> torch.Tensor:
    return out.new_empty(1, dtype=torch.int64)


def _moves_decode(held: torch.Tensor, record: torch.Tensor, coder: int) -> torch.Tensor:
    return record.new_empty(2, dtype=torch.int64)


def _quantise(
    new: torch.Tensor, old: torch.Tensor, bits: int, step: int, out: torch.Tensor
) -> None:
    return None


def _add_quantised(held: torch.Tensor, record: torch.Tensor, bits: int) -> torch.Tensor:
    return record.new_empty(2, dtype=torch.int64)


_FAKES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "cpu": {
        "prune_": _prune,
        "sample_threshold": _sample_threshold,
        "encode": _encode,
        "prune_encode": _prune_encode,
        "encode_rice": _encode_rice,
        "prune_encode_rice": _prune_encode_rice,
        "decode_add_": _decode_add,
        "decode_sum_": _decode_sum,
        "hash_permute": _hash_map,
        "hash_unpermute": _hash_map,
        "hash_partition_of": _hash_map,
        "hierarchical_hash": _hierarchical_hash,
        "hash_bitmap_pack": _hash_bitmap_pack,
        "hash_bitmap_elements": _hash_bitmap_elements,
        "hash_bitmap_add_": _hash_bitmap_add,
        "row_sparse_sum": _row_sparse_sum,
        "row_sparse_union": _row_sparse_union,
        "row_sparse_match": _row_sparse_match,
        "row_sparse_expand": _row_sparse_expand,
        "moves_encode": _moves_encode,
        "moves_decode_": _moves_decode,
        "quantise": _quantise,
        "add_quantised_": _add_quantised,
    },
    "cuda": {
        "encode_records": _encode_records,
        "prune_encode_records": _prune_encode_records,
        "encode_rice_records": _encode_rice_records,
        "prune_encode_rice_records": _prune_encode_rice_records,
        "peer_collective": _peer_collective,
        "nccl_sparse_sum": _nccl_sparse_sum,
        "hash_split": _hash_split,
        "hash_memory": _hash_memory,
    },
}
