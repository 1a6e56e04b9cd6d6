"""A reducer of one rank, and gradients whose sums are exact."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_sparse.bucket import Bucket, ParameterSlice
from megatron_sparse.compression.residual import RESIDUAL_DTYPES, ResidualStore
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.planner import Planner
from megatron_sparse.planner.configured import planner_of
from megatron_sparse.recording import NullSink, RecordSink
from megatron_sparse.reduction.progress import Progress, ProgressThread
from megatron_sparse.reduction.reducer import GradientReducer, Groups
from megatron_sparse.sparsity.gradient_dump import GradientDumpWriter
from megatron_sparse.transport import ProcessGroupTransport

CPU = torch.device("cpu")


def at_target(**overrides: Any) -> SparseConfig:
    """A configuration whose every step prunes every parameter, to a tenth, with values in full."""
    settings = {"density": 0.1, "value_bits": None, "warmup_iters": 0, "ramp_iters": 0}
    return SparseConfig.from_overrides(**settings | {"keep_below_numel": 0} | overrides)


def reducer_of(
    config: SparseConfig,
    groups: Groups,
    sink: RecordSink | None = None,
    progress: Progress | None = None,
    *,
    is_reported: bool = True,
    planner: Planner | None = None,
    dump: GradientDumpWriter | None = None,
) -> GradientReducer:
    """A reducer with residuals of its own, which are in `selector.residuals`.

    Without `progress` the test drives the jobs. `is_reported`: keep undo copies, and leave
    selections pending. Without a `planner` it is that of the configuration.
    """
    residuals = ResidualStore(RESIDUAL_DTYPES[config.compression.residual_dtype])
    residuals.undo = residuals.is_reported = is_reported
    planner = planner or planner_of(config, logs=False)
    sink, progress = sink or NullSink(), progress or Progress(CPU, 0)
    return GradientReducer(config, groups, planner, residuals, sink, progress, dump)


@contextmanager
def reducer_over_gloo(
    config: SparseConfig,
    sink: RecordSink | None = None,
    *,
    wrap: Callable[[Any], Any] = lambda transport: transport,
    is_broken: bool = False,
    **options: Any,
) -> Iterator[GradientReducer]:
    """The reducer of this rank of a gloo world, closed at the end of the block.

    `wrap` makes the reducer's transport from the real one. `is_broken`: the group fails on another
    rank, and must not be used again. `options`: of `reducer_of`.
    """
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    timeout_s = config.scheme.timeout_s
    progress = ProgressThread(CPU, timeout_s)
    transport = ProcessGroupTransport(dist.group.WORLD, timeout_s, CPU)
    try:
        yield reducer_of(config, Groups(wrap(transport)), sink, progress, **options)
    finally:
        broken = is_broken or progress.broken
        progress.close()
        transport.close(broken=broken)


def integers(
    pieces: Sequence[ParameterSlice],
    numel: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    largest: int = 9,
) -> torch.Tensor:
    """A gradient of small integers, exact in every dtype; zero in the padding.

    Up to `largest` = 7 they are exact in 4 bits too.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn_N = torch.randint(-largest, largest + 1, (numel,), generator=generator).to(dtype)
    mask_N = torch.zeros(numel, dtype=torch.bool)
    for piece in pieces:
        mask_N[piece.start : piece.stop] = True
    return drawn_N * mask_N


def residual_of(reducer: GradientReducer, bucket: Bucket) -> torch.Tensor:
    """A copy of the residual of this rank's part, fp32; zeros if it keeps none."""
    part, residuals = reducer.part(bucket), reducer.selector.residuals
    if part.name not in residuals:
        return torch.zeros(part.numel)
    return residuals[part.name].float().clone()
