"""Expected sizes and codec times of records of a given density, in each format.

Bytes are those of docs/wire-format.md for long records (`record_bytes`) and a header;
sections' padding is left out. Seconds are the cluster's, as calibrated.

A part of a bucket has a record of its pruned elements, which selection may drop, and a dense record
of its kept ones, which are always sent.

A Rice record of density p has p (r + 1 / (1 - (1 - p)^(2^r))) bits of positions an element, r being
its parameter (`_rice_parameter`), and 95 bits a chunk: a row of the table, 64, and the mean
rounding of its sections to words. Values of q bits take q + 32 / 128, with their group's scale.
In capacity mode a Rice record fills its slot, which has room for the worst places of its entries
(`wire.rice_payload_bytes`): p (r + 1) + (1 - p) / 2^r bits an element, and s words more a chunk of
2^s elements (s + q + 1 of quantised values). Slots of other formats are as long as their records.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_sparse.cuda_ext.record_spec import DEFAULT_BLOCK_SIZE
from megatron_sparse.formats.hash_record import SECTIONS_AT
from megatron_sparse.pricing.cluster import ClusterModel, CodecOp
from megatron_sparse.pricing.densities import MOST_DENSITY
from megatron_sparse.wire import BLOCKS_SUBHEADER, HEADER_BYTES, rice_span

INDEX_BYTES = 4
BITMAP_BYTES = 1 / 8
SCALE_BITS = 32 / 128
"""Of each value of a group of 128."""
KEPT_BYTES = 2
"""Of an element that is always sent whole, in a message with values of few bits: bf16."""
CHUNK_BITS = 95

PerRank = float | np.ndarray
"""A density, bytes or seconds: one number for all ranks, or an array with one for each."""


@dataclass(frozen=True)
class Piece:
    """A part of the bucket: the number of its pruned elements and of its kept ones."""

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
        name: `auto` (the smallest of dense, COO and Pici), `coo`, `pici`, `rice` or `dense`.
        cluster: its codec rates give the seconds. Those of 4 bits stand for any number of bits.
        value_bits: of a quantised value; records are then Rice, or hold every element if `name` is
            `dense`. None: values are not quantised.
        fixed: records fill slots, in capacity mode.
    """

    name: str
    cluster: ClusterModel
    value_bits: int | None = None
    fixed: bool = False

    def nbytes(self, piece: Piece, density: PerRank, value_bytes: int) -> PerRank:
        """Bytes of a piece's records: one for pruned elements, one for kept ones, if any.

        Args:
            piece: the elements.
            density: of the pruned ones.
            value_bytes: of a value, unless it has `value_bits`.
        """
        if not piece.numel:
            return 0.0 * np.asarray(density)  # a zero for each density
        headers = HEADER_BYTES * ((piece.pruned > 0) + (piece.kept > 0))
        # Where pruned elements are quantised, kept ones are bf16.
        kept_bytes = value_bytes if self.value_bits is None else KEPT_BYTES
        pruned_bytes = self._pruned_bytes(piece.pruned, density, value_bytes)
        return headers + piece.kept * kept_bytes + pruned_bytes

    def seconds(self, op: CodecOp, piece: Piece, density: PerRank, value_bytes: int) -> PerRank:
        """Seconds of one codec call on a piece: on its kept elements and on its pruned ones.

        `density` is that of the pruned elements, `value_bytes` of a value on the wire.
        """
        kept_s = self.cluster.codec_s(op, "dense", piece.kept, 1.0, value_bytes)
        return kept_s + each(lambda d: self._pruned_s(op, piece.pruned, d, value_bytes), density)

    def _pruned_bytes(self, numel: float, density: PerRank, value_bytes: int) -> PerRank:
        """Bytes of the record of so many elements that may be pruned, without its header."""
        kind = self.name, self.value_bits, self.fixed
        return numel * each(lambda d: record_bytes(d, value_bytes, *kind), density)

    def _pruned_s(self, op: CodecOp, numel: float, density: float, value_bytes: int) -> float:
        """Seconds of one codec call on so many elements that may be pruned."""
        form = self.written(density, value_bytes)
        return self.cluster.codec_s(op, form, numel, density, value_bytes)

    def written(self, density: float, value_bytes: int) -> str:
        """The format in which a record of this density is encoded, as codec rates name it."""
        if self.value_bits is not None:
            return "dense_q4" if self.name == "dense" else "rice_q4"
        # The smallest of the formats that may be written, or dense.
        names = ("coo", "pici") if self.name == "auto" else (self.name,)
        sizes = {name: record_bytes(density, value_bytes, name) for name in names}
        smallest = min(sizes, key=lambda name: sizes[name])
        return smallest if sizes[smallest] < value_bytes else "dense"


@dataclass(frozen=True)
class BlockFormat(RecordFormat):
    """`RecordFormat` for OmniReduce's blocks: here a density is the fraction of non-zero blocks.

    Codecs were measured on elements at random positions. So this class takes the rate at the
    element density for which random positions give the same fraction of non-zero blocks.
    """

    block_size: int = DEFAULT_BLOCK_SIZE

    def _pruned_bytes(self, numel: float, density: PerRank, value_bytes: int) -> PerRank:
        blocks = np.asarray(density) * numel / self.block_size
        sparse = BLOCKS_SUBHEADER.size + blocks * (INDEX_BYTES + self.block_size * value_bytes)
        return np.minimum(sparse, numel * value_bytes)

    def _pruned_s(self, op: CodecOp, numel: float, density: float, value_bytes: int) -> float:
        """Seconds of one codec call; `density` is the fraction of blocks that are not zero."""
        block_bytes = self.block_size * value_bytes
        # A record is dense unless blocks with their indices are smaller.
        form = "dense" if density * (INDEX_BYTES + block_bytes) >= block_bytes else "blocks"
        # A block is empty with the probability 1 - density = (1 - element_density)^block_size.
        log_empty = np.log1p(-min(density, MOST_DENSITY))
        element_density = float(-np.expm1(log_empty / self.block_size))
        return self.cluster.codec_s(op, form, numel, element_density, value_bytes)


def push_bytes(positions: float, density: PerRank, value_bytes: int) -> PerRank:
    """ZEN's Push record of one partition: pairs, a bitmap or dense, whichever is the smallest."""
    pairs = np.asarray(density) * (INDEX_BYTES + value_bytes)
    return SECTIONS_AT + positions * np.minimum(pairs, _by_position(density, value_bytes))


def pull_bytes(positions: float, density: PerRank, value_bytes: int) -> PerRank:
    """ZEN's Pull record of one partition: a bitmap or dense."""
    return SECTIONS_AT + positions * _by_position(density, value_bytes)


def _by_position(density: PerRank, value_bytes: int) -> PerRank:
    return np.minimum(BITMAP_BYTES + np.asarray(density) * value_bytes, value_bytes)


def each(function: Callable[[float], float], density: PerRank) -> PerRank:
    """Applies a function to a density, or to each in an array, once if 12 decimals are equal."""
    if np.ndim(density) == 0:
        return function(float(density))
    values, indices = np.unique(np.round(density, 12), return_inverse=True)
    return np.array([function(float(value)) for value in values])[indices]


def record_bytes(
    density: float,
    element_bytes: int,
    form: str,
    value_bits: int | None = None,
    fixed: bool = False,
) -> float:
    """Bytes for each element of a long record.

    Args:
        density: non-zeros / elements.
        element_bytes: of a value in full; not used if there are `value_bits`.
        form: the format that `scheme.format` names.
        value_bits: of a rounded value. The record is then Rice whatever `form` says, or all values
            without their positions if it is `dense`. None: values are in full.
        fixed: whether the record fills a slot, in capacity mode.

    Example:
        >>> record_bytes(0.05, 4, "coo"), round(8 * record_bytes(0.05, 4, "auto", 4), 3)
        (0.4, 0.505)
    """
    if value_bits is not None:
        # Not limited to the dense size, as below: quantised records are never sent dense.
        value_bytes = (value_bits + SCALE_BITS) / 8
        return value_bytes if form == "dense" else _rice_bytes(density, value_bytes, fixed)
    if form == "rice":
        return min(_rice_bytes(density, element_bytes, fixed), element_bytes)
    sizes = {
        "coo": density * (INDEX_BYTES + element_bytes),
        "pici": density * element_bytes + BITMAP_BYTES,
        "dense": float(element_bytes),
    }
    size = min(sizes.values()) if form == "auto" else sizes[form]
    return min(size, element_bytes)  # a record is dense where sparse is larger


def _rice_bytes(density: float, value_bytes: float, fixed: bool) -> float:
    """Bytes an element of a long Rice record, or of its slot, by the formulas of the module."""
    if density < 1e-15:  # a density of 0, or what rounding has left of it: no bucket has so little
        return 0.0
    parameter, log2_span = _rice_parameter(density), rice_span(density)
    gap_bits = parameter + 1 / (1 - (1 - density) ** (2**parameter))  # of an entry's position
    chunk_bits = CHUNK_BITS
    if fixed:
        gap_bits = parameter + 1 + (1 - density) / density / 2**parameter
        # Quantised values, of less than 2 bytes, have a section for each bit and one for scales:
        # each of these has one word more in a chunk.
        section_words = math.ceil(8 * value_bytes) if value_bytes < 2 else 0
        chunk_bits = 64 + 32 * (log2_span + section_words)  # a row of the table, and whole words
    return density * (value_bytes + gap_bits / 8) + chunk_bits / 8 / 2**log2_span


def _rice_parameter(density: float) -> int:
    """The smallest r >= 0 with (1 - p) <= p 2^(r + 1), as docs/wire-format.md says."""
    return max(math.ceil(math.log2((1 - density) / density) - 1), 0) if density < 1 else 0
