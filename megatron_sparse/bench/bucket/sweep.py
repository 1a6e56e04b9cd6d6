"""Options of `bench bucket`."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sparse.bench.options import (
    Sizes,
    check_arguments,
    option,
    parse_names,
    parse_size,
)

CODECS = ("cuda", "torch")
"""MEGATRON_SPARSE_CODEC on a GPU: the compiled kernels; Triton's kernels and torch operations."""


@dataclass(frozen=True, kw_only=True)
class BucketSweep(Sizes):
    """What is measured."""

    NAME = "bench bucket"

    min_bytes: int = option("64M", "Such as 64K, 1M.", parse_size)
    max_bytes: int = option("1G", "Such as 64M, 1G.", parse_size)
    scheme: str = option("direct", "Of docs/collectives.md.")
    density: float = option(0.01, "Fraction selected.", min=1e-6, max=1)
    capacity: float = option(1.25, "scheme.capacity", min=1)
    codecs: tuple[str, ...] = option(
        "cuda,torch",
        "On a GPU: cuda, torch (Triton's kernels and torch operations; exchanges sizes).",
        parse_names,
    )
    nccl_engine: bool = option(False, "scheme.nccl_engine", flag="--nccl-engine")
    warmup: int = option(3, "Buckets that are not timed.", min=0)
    iters: int = option(10, "Buckets that are timed.", min=1)

    def __post_init__(self) -> None:
        known = bool(self.codecs) and set(self.codecs) <= set(CODECS)
        check_arguments(
            self.NAME,
            [*self.range_checks(64), ("codecs", self.codecs, known, f"of {', '.join(CODECS)}")],
        )
