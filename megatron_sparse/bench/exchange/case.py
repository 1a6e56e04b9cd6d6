"""A case of `bench collectives`: a collective on one size and density, its inputs and its reducer.

Each case has two inputs. Small integers serve to count `#wrong`: as many peaks (of magnitude
`SMALLEST_PEAK` or more) as the case's density selects, and plus or minus one elsewhere. Every sum
of them is exact in the gradient's dtype, in any order. Quantised values (sent in few bits) are no
integers: their sum may be off by the rounding of the additions, whose order is the scheme's. Normal
values, independent on each rank, serve for timing: selection keeps elements at independent uniform
positions.

The reducer is that of training. Between processes a progress thread drives it; virtual ranks are
driven step by step. What a rank has sent is its gradient plus its residual before the step, less
its residual after the step.
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
"""Steps that are checked: the second one has a residual, and buffers that are not new."""
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
        value_bits: of each value sent, as `compression.value_bits`; None: not quantised.
        sum_bits: of each gathered sum, as `scheme.sum_bits`; None: not quantised.
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
        """Makes and checks the configuration; step 0 has the target density already.

        Schemes that skip a straggler skip the last rank, which `--delay-ms` delays.
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
    def is_quantised(self) -> bool:
        """Whether values or sums are quantised, so that integers do not stay integers."""
        few_bits = self.value_bits is not None or self.sum_bits is not None
        return few_bits or entry_of(self.scheme).sends_whole

    def count_wrong(self, results: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> int:
        """Counts the elements of the results that are not the sum of what the ranks have sent.

        Args:
            results: the same part of the sum [M] from one rank or several, in the gradient's dtype.
            sent: of each rank fp32 [M], what it has sent (see the module's docstring).
        """
        wrong = 0
        for start in range(0, len(results[0]), CHUNK):
            part = slice(start, start + CHUNK)
            sent_nC = torch.stack([values_M[part] for values_M in sent]).double()
            exact_C, slack = sent_nC.sum(0), 0.0
            if self.is_quantised:
                # Each of n + 2 fp32 operations may round: n - 1 additions in any order, and three
                # where a sum's owner quantises it. A wrong value would be off by a quantisation
                # step: for few ranks, hundreds of times `slack`.
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
        """Makes a bucket with one parameter, which is pruned."""
        parameters = [ParameterSlice("weight", 0, self.numel)]
        return Bucket("bench", grad_N, parameters, self.op, world_size)

    def owned(self, rank: int, world_size: int) -> slice:
        """The elements whose sums a rank gets: all of them, or its shard of a reduce-scatter."""
        if self.op is CollectiveOp.ALL_REDUCE:
            return slice(None)
        shard = self.numel // world_size
        return slice(rank * shard, (rank + 1) * shard)

    def normal_values(self, rank: int) -> torch.Tensor:
        """A rank's gradient for timing."""
        generator = torch.Generator().manual_seed(1000 + rank)
        return torch.randn(self.numel, generator=generator).to(VALUE_DTYPES[self.dtype])

    def small_integers(self, rank: int, world_size: int, step: int) -> torch.Tensor:
        """Makes a rank's gradient for counting `#wrong` in `step`, 0 to `CHECK_STEPS` - 1.

        Raises:
            ConfigError: the sums of so many ranks are not exact in the dtype.
        """
        # A peak that was not sent stays in the residual and is added to that of the next step: a
        # sum has up to `CHECK_STEPS` peaks of each rank.
        largest = min(LARGEST_PEAK, EXACT_INTEGERS[self.dtype] // (CHECK_STEPS * world_size))
        most_ranks = EXACT_INTEGERS[self.dtype] // (CHECK_STEPS * SMALLEST_PEAK)
        countable = f"at most {most_ranks} to count #wrong in {self.dtype}; measure fp32"
        fits = world_size <= most_ranks
        check_arguments(CollectiveSweep.NAME, [("ranks", world_size, fits, countable)])
        generator = torch.Generator().manual_seed(CHECK_STEPS * rank + step)
        values = torch.randint(SMALLEST_PEAK, largest + 1, (self.numel,), generator=generator)
        is_low = torch.rand(self.numel, generator=generator) >= self.density
        values[is_low] = 1
        signs = torch.randint(0, 2, (self.numel,), generator=generator) * 2 - 1
        values *= signs
        return values.to(VALUE_DTYPES[self.dtype])


def cases_of(sweep: CollectiveSweep, world_size: int) -> list[BucketCase]:
    """Lists the sweep's cases, each once, so ordered that neighbouring rows compare schemes.

    Raises:
        ConfigError: there is no case, or a gradient has fewer elements than there are ranks.
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
    """Yields the case of each combination of options that its scheme can run.

    For a dense scheme several densities and numbers of bits yield the same case.
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
            if not _can_run(scheme, op, bits, level):
                continue
            if scheme.sends_whole:
                bits = dense_value_bits(bits)  # `dense_q` quantises all elements
            elif scheme.takes is Input.DENSE:
                bits = None  # the other dense schemes never quantise
            sum_bits = _sum_bits(scheme, op, bits, sweep)
            target = 1.0 if scheme.takes_all else density
            yield BucketCase(op, name, dtype, target, numel, bits, sum_bits, level)


def _can_run(scheme: Scheme, op: CollectiveOp, bits: int | None, level: str) -> bool:
    """Whether a scheme has this operation, level and bits of a value; None: not quantised."""
    # Level `node` adds up a node's gradients before the selection; dense schemes select nothing. At
    # that level a straggler would be a node, but `BucketCase.config` names a rank.
    has_level = level == RANK or not (scheme.takes is Input.DENSE or scheme.skips_straggler)
    can_round = not scheme.sends_whole or bits in DENSE_VALUE_BITS
    has_bits = bits is None or (scheme.own_format is None and can_round)
    return op in scheme.ops and has_level and has_bits


def _sum_bits(
    scheme: Scheme, op: CollectiveOp, bits: int | None, sweep: CollectiveSweep
) -> int | None:
    """Returns the bits of a sum that a scheme's all-gather sends; None: it is not quantised.

    Without the option `--sum-bits` they are those of `scheme.sum_bits=auto` if values are quantised
    (`bits`). A sum is quantised only as Rice, where its owner's residual takes the error.
    """
    sum_bits = sweep.sum_bits
    if sum_bits is None and bits is not None:
        sum_bits = AUTO_SUM_BITS
    is_rice = bits is not None or sweep.message_format == "rice"
    is_sparse = scheme.takes is Input.SPARSE and scheme.own_format is None
    # In `hierarchical` the owner of a sum has no residual for it.
    has_residual = is_sparse and scheme.name != "hierarchical"
    can_round = op is CollectiveOp.ALL_REDUCE and has_residual and is_rice
    return sum_bits if can_round and sum_bits != WHOLE_BITS else None


class RankReducer:
    """One rank's reducer for a case; residuals begin at zero, and no step is ever undone.

    `progress` drives the reducer; None for virtual ranks, which call `steps`.
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
            progress,  # type: ignore[arg-type] - `steps` does not use it
        )

    def run(self, bucket: Bucket, step: int) -> BucketRecord:
        """Synchronises a bucket as training does; returns the record of times and bytes."""
        pending = self.reducer.start(bucket, step)
        pending.wait()
        assert isinstance(pending.record, BucketRecord), "a bucket's job has such a record"
        return pending.record

    def steps(
        self, bucket: Bucket, step: int, timer: StageTimer | None = None
    ) -> Generator[Any, None, BucketRecord]:
        """Synchronises on a virtual rank: yields what its cluster waits for, returns the record."""
        job = self.reducer.job(bucket, step)
        job.record.timer = timer or job.record.timer
        # Gates order the jobs of a rank. Here there is one job, so they are left out.
        yield from without(self.reducer.synchronise(job), Gate)
        return job.record

    def residual(self, bucket: Bucket) -> torch.Tensor:
        """A copy of the rank's residual, fp32 [N]; zero before the first step."""
        # At level `node` a rank has a residual of a part of the bucket; elsewhere the copy is zero.
        part = self.reducer.part(bucket)
        if part.name not in self.residuals:
            return torch.zeros(bucket.numel, device=bucket.grad_N.device)
        return in_whole_bucket(self.residuals.begin(part), part, bucket)
