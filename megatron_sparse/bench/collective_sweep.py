"""What `bench collectives` measures: the sweep, and the inputs of each case.

Two inputs for each case. Small integers, whose sum is exact in every dtype and order, are what
`#wrong` is counted on. Normal values, independent on each rank, are what is timed: what selection
keeps of them lies at independent uniform positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_sparse.bench.table import check_arguments
from megatron_sparse.bucket import Bucket, Form, ParameterSlice
from megatron_sparse.collectives import SCHEMES, Input
from megatron_sparse.config import MESSAGE_FORMATS, SparseConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.formats.message import VALUE_DTYPES

SIZE_FACTOR = 4
LARGEST_INTEGER = 8


@dataclass(frozen=True)
class Case:
    """One row: a collective on one size and density.

    Attributes:
        form: all-reduce or reduce-scatter.
        scheme: a name in `SCHEMES`, or `auto`.
        dtype: of the gradient: fp32, bf16 or fp16.
        density: what selection aims at; 1 for dense schemes.
        numel: elements, a multiple of the number of ranks.
    """

    form: Form
    scheme: str
    dtype: str
    density: float
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient."""
        return self.numel * VALUE_DTYPES[self.dtype].itemsize

    def config(self, message_format: str) -> SparseConfig:
        """A configuration in which the first step is at the target already."""
        return SparseConfig.from_overrides(
            scheme=self.scheme, density=self.density, warmup_iters=0, ramp_iters=0,
            format=message_format,
        )  # fmt: skip

    def bucket(self, grad_N: torch.Tensor, world_size: int) -> Bucket:
        """One pruned parameter that is the whole bucket."""
        parameters = [ParameterSlice("weight", 0, self.numel)]
        return Bucket("bench", grad_N, parameters, self.form, world_size)

    def normal_values(self, rank: int) -> torch.Tensor:
        """What is timed."""
        generator = torch.Generator().manual_seed(1000 + rank)
        return torch.randn(self.numel, generator=generator).to(VALUE_DTYPES[self.dtype])

    def small_integers(self, rank: int) -> torch.Tensor:
        """What `#wrong` is counted on: exact sums even in bf16, for up to 32 ranks.

        As many are not zero as selection aims at, so that it takes most of them.
        """
        generator = torch.Generator().manual_seed(2000 + rank)
        values = torch.randint(1, LARGEST_INTEGER + 1, (self.numel,), generator=generator)
        values *= 1 - 2 * torch.randint(0, 2, (self.numel,), generator=generator)
        values *= torch.rand(self.numel, generator=generator) < self.density
        return values.to(VALUE_DTYPES[self.dtype])


@dataclass(frozen=True)
class Sweep:
    """All cases, and how they are timed.

    Attributes:
        min_bytes: size of the smallest gradient; each is four times the one before.
        max_bytes: no gradient is larger.
        densities: in (0, 1]; dense schemes run once, whatever they are.
        dtypes: of the gradient.
        schemes: names in `SCHEMES`, or `auto`.
        ops: `all_reduce`, `reduce_scatter`; a scheme that lacks one is left out of it.
        message_format: `scheme.format`.
        warmup: rounds before the first that counts.
        iters: rounds that count.
        mbit: rate of each rank's link; None measures it.
    """

    min_bytes: int
    max_bytes: int
    densities: Sequence[float]
    dtypes: Sequence[str]
    schemes: Sequence[str]
    ops: Sequence[str]
    message_format: str = "auto"
    warmup: int = 2
    iters: int = 7
    mbit: float | None = None

    def __post_init__(self) -> None:
        names, forms = ("auto", *SCHEMES), tuple(str(form) for form in Form)
        check_arguments("bench collectives", [
            ("min_bytes", self.min_bytes, 64 <= self.min_bytes <= self.max_bytes, "64 to max"),
            ("max_bytes", self.max_bytes, self.max_bytes < 2**32, "less than 4 GiB"),
            ("warmup", self.warmup, self.warmup >= 0, "0 or more"),
            ("iters", self.iters, self.iters >= 1, "1 or more"),
            ("dtype", self.dtypes, set(self.dtypes) <= set(VALUE_DTYPES), " | ".join(VALUE_DTYPES)),
            ("scheme", self.schemes, set(self.schemes) <= set(names), " | ".join(names)),
            ("op", self.ops, set(self.ops) <= set(forms), " | ".join(forms)),
            ("format", self.message_format, self.message_format in MESSAGE_FORMATS,
             " | ".join(MESSAGE_FORMATS)),
            ("mbit", self.mbit, self.mbit is None or self.mbit > 0, "above 0"),
        ])  # fmt: skip
        if not any(True for _ in self.cases(1)):
            raise ConfigError(
                "bench collectives: there is nothing to measure",
                expected="a scheme that has the form",
                got=f"{', '.join(self.schemes)} for {', '.join(self.ops)}",
            )

    def cases(self, world_size: int) -> Iterator[Case]:
        """Sizes outermost, schemes innermost, so that neighbours can be compared."""
        size = self.min_bytes
        while size <= self.max_bytes:
            for form in map(Form, self.ops):
                for dtype in self.dtypes:
                    numel = size // VALUE_DTYPES[dtype].itemsize // world_size * world_size
                    for index, density in enumerate(self.densities):
                        for scheme in self.schemes:
                            known = SCHEMES.get(scheme)
                            is_dense = known is not None and known.takes is Input.DENSE
                            if known is not None and form not in known.forms:
                                continue
                            if is_dense and index:
                                continue
                            yield Case(form, scheme, dtype, 1.0 if is_dense else density, numel)
            size *= SIZE_FACTOR
