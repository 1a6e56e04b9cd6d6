"""The question to a cost model: a bucket's shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.config.checks import in_range, one_of
from megatron_sparse.config.compression import VALUE_BITS

FP32_BYTES = 4


@dataclass(frozen=True)
class BucketShape:
    """A bucket as cost models see it.

    Attributes:
        numel: elements, kept ones included.
        kept_numel: elements that are always sent whole; assumed to lie evenly in the bucket.
        element_bytes: of a value on the wire: 4 or 2.
        op: all-reduce or reduce-scatter.
        world_size: ranks of the group.
        partial_bytes: of a value of a partial sum on the wire: 4, or 2 where
            `scheme.wire_dtype=bf16` narrows an fp32 gradient.
        value_bits: of a value of a rank's own message, as `compression.value_bits`; values of sums
            and dense schemes have `element_bytes`. None: values of messages have that, too.
        lanes: number of lanes, one of which exchanges this bucket; 1 if all ranks exchange it. The
            other lanes exchange as many elements at the same time, over the same links, see
            `planner.prices.lane_cluster`.

    Raises:
        ConfigError: numbers that no bucket has.
    """

    numel: int
    kept_numel: int
    element_bytes: int
    op: CollectiveOp
    world_size: int
    partial_bytes: int = FP32_BYTES
    value_bits: int | None = None
    lanes: int = 1

    def __post_init__(self) -> None:
        """Refuses numbers that no bucket has."""
        in_range("shape.numel", self.numel, 0, 2**40, integer=True)
        in_range("shape.kept_numel", self.kept_numel, 0, self.numel, integer=True)
        in_range("shape.world_size", self.world_size, 1, 2**20, integer=True)
        in_range("shape.lanes", self.lanes, 1, 2**20, integer=True)
        for name in ("element_bytes", "partial_bytes"):
            one_of(f"shape.{name}", getattr(self, name), (2, FP32_BYTES))
        if self.value_bits is not None:
            one_of("shape.value_bits", self.value_bits, VALUE_BITS)

    @property
    def pruned_numel(self) -> int:
        """Elements that selection may leave out."""
        return self.numel - self.kept_numel

    def lane(self, lanes: int) -> BucketShape:
        """The shape of one lane's part; each node, or instance, has one rank in each of the lanes.

        Example:
            >>> shape = BucketShape(1000, 0, 4, CollectiveOp.ALL_REDUCE, 8)
            >>> part = shape.lane(4)
            >>> part.numel, part.world_size, part.lanes
            (250, 2, 4)
        """
        return replace(
            self,
            numel=-(-self.numel // lanes),  # rounded up, as is the next one
            kept_numel=-(-self.kept_numel // lanes),
            world_size=self.world_size // lanes,
            lanes=lanes,
        )
