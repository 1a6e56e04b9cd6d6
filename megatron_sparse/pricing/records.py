"""Expected sizes and codec times of records of a given density, in each format.

Bytes are those of docs/wire-format.md for long records (`record_bytes`) and a header;
sections' padding is left out. Seconds are the cluster's, as calibrated.

The kept elements of a part of a bucket are a dense record of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_sparse.formats.hash_record import SECTIONS_AT
from megatron_sparse.pricing.cluster import ClusterModel, CodecOp
from megatron_sparse.pricing.densities import MOST_DENSITY
from megatron_sparse.wire import BLOCKS_SUBHEADER, HEADER_BYTES

INDEX_BYTES = 4
BITMAP_BYTES = 1 / 8

Density = float | np.ndarray
"""nnz / numel of a piece, or of each rank's piece."""


@dataclass(frozen=True)
class Piece:
    """A part of the bucket: how many of its elements may be pruned and how many are kept."""

    pruned: float
    kept: float

    @property
    def numel(self) -> float:
        """Elements of both kinds."""
        return self.pruned + self.kept


@dataclass(frozen=True)
class RecordFormat:
    """Sizes and times of records.

    Attributes:
        name: `auto` (the smallest of dense, COO and Pici), `coo`, `pici` or `dense`.
        cluster: its codec rates give the seconds.
    """

    name: str
    cluster: ClusterModel

    def nbytes(self, piece: Piece, density: Density, value_bytes: int) -> Density:
        """Bytes of a piece's records; none for a piece without elements."""
        if not piece.numel:
            return 0.0 * np.asarray(density)
        headers = HEADER_BYTES * ((piece.pruned > 0) + (piece.kept > 0))
        pruned = each(lambda d: record_bytes(d, value_bytes, self.name), density)
        return headers + piece.kept * value_bytes + piece.pruned * pruned

    def seconds(self, op: CodecOp, piece: Piece, density: Density, value_bytes: int) -> Density:
        """Of one call on a piece."""
        codec_s = self.cluster.codec_s
        kept = codec_s(op, "dense", piece.kept, 1.0, value_bytes)
        return kept + each(
            lambda d: codec_s(op, self.written(d, value_bytes), piece.pruned, d, value_bytes),
            density,
        )

    def written(self, density: float, value_bytes: int) -> str:
        """The format in which a record of this density is encoded."""
        names = ("coo", "pici") if self.name == "auto" else (self.name,)
        sizes = {name: record_bytes(density, value_bytes, name) for name in names}
        least = min(sizes, key=lambda name: sizes[name])
        return least if sizes[least] < value_bytes else "dense"


@dataclass(frozen=True)
class BlockFormat:
    """The same for OmniReduce's blocks; densities are fractions of non-zero blocks.

    Codecs were measured on elements at random places. So this class takes the rates of the element
    density at which random places give the same fraction of non-zero blocks.
    """

    block_size: int
    cluster: ClusterModel

    def nbytes(self, piece: Piece, density: Density, value_bytes: int) -> Density:
        """See `RecordFormat`."""
        if not piece.numel:
            return 0.0 * np.asarray(density)
        dense = piece.pruned * value_bytes
        blocks = np.asarray(density) * piece.pruned / self.block_size
        sparse = BLOCKS_SUBHEADER.size + blocks * (INDEX_BYTES + self.block_size * value_bytes)
        headers = HEADER_BYTES * ((piece.pruned > 0) + (piece.kept > 0))
        return headers + piece.kept * value_bytes + np.minimum(sparse, dense)

    def seconds(self, op: CodecOp, piece: Piece, density: Density, value_bytes: int) -> Density:
        """See `RecordFormat`."""
        codec_s = self.cluster.codec_s

        def of(filled: float) -> float:
            is_dense = filled * (INDEX_BYTES + self.block_size * value_bytes) >= (
                self.block_size * value_bytes
            )
            empty = np.log1p(-min(filled, MOST_DENSITY))
            uniform = float(-np.expm1(empty / self.block_size))
            name = "dense" if is_dense else "blocks"
            return codec_s(op, name, piece.pruned, uniform, value_bytes)

        return codec_s(op, "dense", piece.kept, 1.0, value_bytes) + each(of, density)


def push_bytes(positions: float, density: Density, value_bytes: int) -> Density:
    """ZEN's Push record of one partition: pairs, a bitmap or dense, whichever is the smallest."""
    pairs = np.asarray(density) * (INDEX_BYTES + value_bytes)
    return SECTIONS_AT + positions * np.minimum(pairs, _by_position(density, value_bytes))


def pull_bytes(positions: float, density: Density, value_bytes: int) -> Density:
    """ZEN's Pull record of one partition: a bitmap or dense."""
    return SECTIONS_AT + positions * _by_position(density, value_bytes)


def _by_position(density: Density, value_bytes: int) -> Density:
    return np.minimum(BITMAP_BYTES + np.asarray(density) * value_bytes, value_bytes)


def each(function: Callable[[float], float], density: Density) -> Density:
    """A function of each density; called once for equal ones."""
    if np.ndim(density) == 0:
        return function(float(density))
    values, places = np.unique(np.round(density, 12), return_inverse=True)
    return np.array([function(float(value)) for value in values])[places]


def record_bytes(density: float, element_bytes: int, form: str) -> float:
    """Bytes for each element of a long record in the format that `scheme.format` names."""
    sizes = {
        "coo": density * (INDEX_BYTES + element_bytes),
        "pici": density * element_bytes + BITMAP_BYTES,
        "dense": float(element_bytes),
    }
    return min(min(sizes.values()) if form == "auto" else sizes[form], element_bytes)
