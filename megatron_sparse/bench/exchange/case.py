"""A case of `bench collectives`: a collective on one size and density, its inputs and its way.

Two inputs for each case. Small integers serve to count `#wrong`: as many peaks as the case's
density selects, and plus or minus one elsewhere. They are so small that every sum of them is exact
in the gradient's dtype, in any order. Values that travel in few bits are no integers: their sum may
be off by the rounding of the additions, whose order is the scheme's. Normal values, independent on
each rank, serve for timing: selection keeps elements at independent uniform positions.

The way is the reducer of training. Between processes a progress thread drives it; virtual ranks are
driven step by step.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from megatron_sparse.bench.exchange.options import WHOLE_BITS, CollectiveSweep
from megatron_sparse.bench.options import check_arguments
from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import SCHEMES, Input, Scheme, check
from megatron_sparse.collectives.base import without
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.config.bits import AUTO_SUM_BITS
from megatron_sparse.config.compression import DENSE_VALUE_BITS, dense_value_bits
from megatron_sparse.config.level import RANK
from megatron_sparse.config.sparse import SparseConfig, StragglerConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.formats.message import VALUE_DTYPES
from megatron_sparse.planner import Planner
from megatron_sparse.recording import BucketRecord, NullSink, StageTimer
from megatron_sparse.reduction.job import Gate
from megatron_sparse.reduction.level_parts import in_whole_bucket
from megatron_sparse.reduction.progress import Progress
from megatron_sparse.reduction.reducer import GradientReducer, Groups

CHECK_STEPS = 2
"""The second step has a residual, and buffers that are not new."""
SMALLEST_PEAK, LARGEST_PEAK = 3, 7
CHUNK = 1 << 20
"""Elements whose sums are compared at once: fp64 values of all ranks take memory."""
EXACT_INTEGERS = {"fp32": 2**24, "bf16": 2**8, "fp16": 2**11}
"""Up to which magnitude a dtype has all integers."""


@dataclass(frozen=True)
class BucketCase:
    """One row: a collective on one size and density.

    Attributes:
        op: all-reduce or reduce-scatter.
        scheme: a name in `SCHEMES`, or `auto`.
        dtype: of the gradient: fp32, bf16 or fp16.
        density: target of the selection; 1 for dense schemes.
        numel: elements, a multiple of the number of ranks.
        value_bits: in which values travel, as `compression.value_bits`; None: whole.
        sum_bits: as `scheme.sum_bits`.
        level: as `compression.level`: rank or node.
    """

    op: CollectiveOp
    scheme: str
    dtype: str
    density: float
    numel: int
    value_bits: int | None = None
    sum_bits: int | None = None
    level: str = RANK

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient."""
        return self.numel * VALUE_DTYPES[self.dtype].itemsize

    def config(self, sweep: CollectiveSweep, world_size: int) -> SparseConfig:
        """The case's configuration, checked; its first step is at the target density already.

        For schemes that skip a straggler, it is the last rank.
        """
        scheme = entry_of(self.scheme)
        message_format = "auto" if scheme.own_format else sweep.message_format
        pinned = None
        if scheme.skips_straggler:
            pinned = StragglerConfig(mode="pinned", rank=world_size - 1)
        return check(
            SparseConfig.from_overrides(
                scheme=self.scheme,
                level=self.level,
                density=self.density,
                value_bits=self.value_bits,
                sum_bits=self.sum_bits,
                warmup_iters=0,
                ramp_iters=0,
                format=message_format,
                timeout_s=sweep.timeout_s,
                straggler=pinned,
                capacity=sweep.capacity if scheme.takes_slots else None,
            )
        )

    @property
    def rounds(self) -> bool:
        """Whether values or sums travel in few bits."""
        few_bits = self.value_bits is not None or self.sum_bits is not None
        return few_bits or entry_of(self.scheme).sends_whole

    def count_wrong(self, results: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> int:
        """Elements that are not the sum of the values that ranks have sent.

        Args:
            results: the same part of the sum [M] on one rank or several, in the gradient's dtype.
            sent: fp32 [M] of each rank: what the gradient and the residual have lost.
        """
        wrong = 0
        for start in range(0, len(results[0]), CHUNK):
            part = slice(start, start + CHUNK)
            sent_nC = torch.stack([values_M[part] for values_M in sent]).double()
            exact_C, slack = sent_nC.sum(0), 0.0
            if self.rounds:
                # n - 1 fp32 additions in any order, and three of an owner that rounds its sum. A
                # wrong value would be off by a step of its group, which is 2^12 times as much.
                slack = (len(sent) + 2) * 2.0**-24 * float(sent_nC.abs().sum(0).max())
            dtype = results[0].dtype
            low_C = (exact_C - slack).float().to(dtype)
            high_C = (exact_C + slack).float().to(dtype)
            for result_M in results:
                found_C = result_M[part]
                fits_C = (low_C <= found_C) & (found_C <= high_C)  # a NaN does not fit
                wrong += int(fits_C.logical_not_().sum())
        return wrong

    def bucket(self, grad_N: torch.Tensor, world_size: int) -> Bucket:
        """One pruned parameter that is the whole bucket."""
        parameters = [ParameterSlice("weight", 0, self.numel)]
        return Bucket("bench", grad_N, parameters, self.op, world_size)

    def owned(self, rank: int, world_size: int) -> slice:
        """The elements of the sum that a rank ends up with."""
        if self.op is CollectiveOp.ALL_REDUCE:
            return slice(None)
        shard = self.numel // world_size
        return slice(rank * shard, (rank + 1) * shard)

    def normal_values(self, rank: int) -> torch.Tensor:
        """A rank's gradient for timing."""
        generator = torch.Generator().manual_seed(1000 + rank)
        return torch.randn(self.numel, generator=generator).to(VALUE_DTYPES[self.dtype])

    def small_integers(self, rank: int, world_size: int, step: int) -> torch.Tensor:
        """A rank's gradient for counting `#wrong`, in one of `CHECK_STEPS` steps.

        Raises:
            ConfigError: the sums of so many ranks are not exact in the dtype.
        """
        # A peak that was not sent in one step is added to that of the next, so that a sum has up
        # to `CHECK_STEPS` peaks of each rank.
        largest = min(LARGEST_PEAK, EXACT_INTEGERS[self.dtype] // (CHECK_STEPS * world_size))
        most = EXACT_INTEGERS[self.dtype] // (CHECK_STEPS * SMALLEST_PEAK)
        countable = f"at most {most} to count #wrong in {self.dtype}; measure fp32"
        check_arguments(
            CollectiveSweep.NAME, [("ranks", world_size, world_size <= most, countable)]
        )
        generator = torch.Generator().manual_seed(CHECK_STEPS * rank + step)
        values = torch.randint(SMALLEST_PEAK, largest + 1, (self.numel,), generator=generator)
        is_low = torch.rand(self.numel, generator=generator) >= self.density
        values[is_low] = 1
        signs = torch.randint(0, 2, (self.numel,), generator=generator) * 2 - 1
        values *= signs
        return values.to(VALUE_DTYPES[self.dtype])


def cases_of(sweep: CollectiveSweep, world_size: int) -> list[BucketCase]:
    """The sweep's cases, each once: the size changes least often, level and scheme most often.

    So the schemes that one wants to compare stand in neighbouring rows.

    Raises:
        ConfigError: there is no case; or, by `_cases`, a gradient has fewer elements than there
            are ranks.
    """
    cases = list(dict.fromkeys(_cases(sweep, world_size)))
    if not cases:
        raise ConfigError(
            "bench collectives: there is nothing to measure",
            expected="a scheme that has the collective operation",
            got=f"{', '.join(sweep.schemes)} for {', '.join(sweep.ops)}",
            remedy="leave out --op, or choose another --scheme or --value-bits",
        )
    return cases


def entry_of(scheme: str) -> Scheme:
    """A scheme's entry; `auto` can do whatever `direct` can."""
    return SCHEMES["direct" if scheme == "auto" else scheme]


def _cases(sweep: CollectiveSweep, world_size: int) -> Iterator[BucketCase]:
    """Yields the cases of all options' combinations that the schemes can run.

    Dense schemes come again with every density and number of bits: the same case.
    """
    for size, op, dtype in product(sweep.sizes(), map(CollectiveOp, sweep.ops), sweep.dtypes):
        shard = size // VALUE_DTYPES[dtype].itemsize // world_size
        numel = shard * world_size
        whole_shards = f"an element of {dtype} for each of {world_size} ranks, or more"
        check_arguments(sweep.NAME, [("min_bytes", size, numel > 0, whole_shards)])
        for density, asked_bits, name, level in product(
            sweep.densities, sweep.value_bits, sweep.schemes, sweep.levels
        ):
            scheme, bits = entry_of(name), None if asked_bits == WHOLE_BITS else asked_bits
            if not _runs(scheme, op, bits, level):
                continue
            if scheme.sends_whole:
                bits = dense_value_bits(bits)  # it has no values in full
            elif scheme.takes is Input.DENSE:
                bits = None
            sum_bits = _sum_bits(scheme, op, bits, sweep)
            target = 1.0 if scheme.takes_all else density
            yield BucketCase(op, name, dtype, target, numel, bits, sum_bits, level)


def _runs(scheme: Scheme, op: CollectiveOp, bits: int | None, level: str) -> bool:
    """Whether the bench runs a scheme with this operation, level and bits; None: values in full."""
    # A level says what is added up before the selection: dense schemes select nothing. The late
    # rank of `BucketCase.config` is numbered among all ranks; at another level it would be a node.
    has_level = level == RANK or not (scheme.takes is Input.DENSE or scheme.skips_straggler)
    can_round = not scheme.sends_whole or bits in DENSE_VALUE_BITS
    has_bits = bits is None or (scheme.own_format is None and can_round)
    return op in scheme.ops and has_level and has_bits


def _sum_bits(
    scheme: Scheme, op: CollectiveOp, bits: int | None, sweep: CollectiveSweep
) -> int | None:
    """The bits in which a scheme gathers sums, if it can (see `config.bits`); None: whole.

    If the options name none, sums of values in few `bits` travel as `scheme.sum_bits=auto`.
    """
    sum_bits = sweep.sum_bits
    if sum_bits is None and bits is not None:
        sum_bits = AUTO_SUM_BITS
    is_rice = bits is not None or sweep.message_format == "rice"
    is_sparse = scheme.takes is Input.SPARSE and scheme.own_format is None
    has_residual = is_sparse and scheme.name != "hierarchical"
    can_round = op is CollectiveOp.ALL_REDUCE and has_residual and is_rice
    return sum_bits if can_round and sum_bits != WHOLE_BITS else None


class BucketPath:
    """One rank's reducer, with residuals that begin at zero and selections that all count.

    Args:
        case: what is synchronised.
        sweep: how.
        groups: of the rank.
        progress: drives the reducer; None for virtual ranks, which call `steps`.
    """

    def __init__(
        self,
        case: BucketCase,
        sweep: CollectiveSweep,
        groups: Groups,
        progress: Progress | None = None,
    ) -> None:
        config = case.config(sweep, groups.data_parallel.world_size)
        self.residuals = ResidualStore(torch.float32)
        self.reducer = GradientReducer(
            config,
            groups,
            Planner(config.compression, config.scheme),
            self.residuals,
            NullSink(),
            progress,  # type: ignore[arg-type] - virtual ranks launch nothing
        )

    def run(self, bucket: Bucket, step: int) -> BucketRecord:
        """Synchronises a bucket as training does; returns its record."""
        pending = self.reducer.start(bucket, step)
        pending.wait()
        assert isinstance(pending.record, BucketRecord), "of a bucket"
        return pending.record

    def steps(
        self, bucket: Bucket, step: int, timer: StageTimer | None = None
    ) -> Generator[Any, None, BucketRecord]:
        """Synchronises a bucket on a virtual rank; the cluster drives it. Returns its record.

        It leaves out the job's gates, which order several jobs of a rank: here there is one.
        """
        job = self.reducer.job(bucket, step)
        job.record.timer = timer or job.record.timer
        yield from without(self.reducer.synchronise(job), Gate)
        return job.record

    def residual(self, bucket: Bucket) -> torch.Tensor:
        """A copy of the rank's residual, fp32 [N] as the bucket; zero before the first step."""
        part = self.reducer.part(bucket)
        if part.name not in self.residuals:
            return torch.zeros(bucket.numel, device=bucket.grad_N.device)
        return in_whole_bucket(self.residuals.begin(part), part, bucket)
