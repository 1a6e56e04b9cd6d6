"""Measures the cluster that the ranks run on: a `ClusterModel`, the same on all of them.

Links and the backend's all-reduce (`planner.link_timing`), the host's cost and the codec (`codec`),
one after the other, by all ranks at once.

The host's cost in a collective: alpha, as `planner.link_timing` measures it, already contains a
message's own share of Python and of the backend. What training adds is measured in turn with the
bare operation: the same messages driven by the progress thread through a collective's `Subgroup`,
and a small bucket through the reducer (plan, launch, threads, records). Neither includes a sparse
collective's other work on the host; its agreement costs about as much as two messages
(docs/calibration.md).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.calibration import codec as calibration_codec
from megatron_sparse.calibration.codec import CodecSizes, measure_codec
from megatron_sparse.collectives.base import Round, whole_group
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.planner import link_timing
from megatron_sparse.planner.fingerprint import fingerprint
from megatron_sparse.planner.link_timing import (
    TAG,
    Clock,
    LinkSweep,
    complete,
    host_clock,
    measure_links,
    neighbours,
    timed,
)
from megatron_sparse.planner.plan import Planner
from megatron_sparse.pricing.cluster import ClusterModel
from megatron_sparse.recording import NullSink, StageTimer
from megatron_sparse.reduction.host_state import check_kernels_of_all
from megatron_sparse.reduction.job import GATE, Pending
from megatron_sparse.reduction.progress import Progress
from megatron_sparse.reduction.reducer import GradientReducer, Groups
from megatron_sparse.transport import ProcessGroupTransport, Transport, Work

FEW, MANY = 4, 36
"""Numbers of consecutive messages; the difference of the two cancels costs that occur once."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        links: messages.
        codec: vectors.
        host_repeats: repetitions of the host's measurements.
    """

    links: LinkSweep
    codec: CodecSizes
    host_repeats: int


QUICK = Effort(link_timing.QUICK, calibration_codec.QUICK, 11)
FULL = Effort(link_timing.FULL, calibration_codec.FULL, 31)


def calibrate(
    transport: ProcessGroupTransport,
    progress: Progress,
    effort: Effort,
    name: str,
    tell: Callable[[str], None],
) -> ClusterModel:
    """Measures links, host and codec; every rank of the group calls it, and gets the same model.

    Args:
        transport: the group, 2 ranks at least.
        progress: the thread that drives collectives.
        effort: how much.
        name: of the cluster.
        tell: progress callback: what is measured next.

    Raises:
        ConfigError: there is one rank only.
        CommunicationError: a rank is gone.
        DependencyError, ExtensionError: a GPU has no kernels (`check_kernels_of_all`).
    """
    check_kernels_of_all(transport.device)
    clock = host_clock(transport.device)
    tell("measuring: links")
    links = complete(measure_links(transport, effort.links, clock))
    tell("measuring: host")
    per_message_s, per_bucket_s = measure_host(transport, progress, effort.host_repeats, clock)
    tell("measuring: codec")
    codec = complete(measure_codec(transport, effort.codec, clock))
    return ClusterModel(
        name=name,
        device=transport.device.type,
        **vars(links),  # nodes, nic, intra, inter and dense
        host_s_per_message=per_message_s,
        host_s_per_bucket=per_bucket_s,
        codec=codec,
        ring_densities={},
        fingerprint=fingerprint(transport),
    )


def measure_host(
    transport: Transport, progress: Progress, repeats: int, clock: Clock
) -> tuple[float, float]:
    """Seconds that training adds to a message and to a bucket; the same on all ranks.

    A difference of times that comes out negative counts as 0.

    Args:
        transport: real ranks, 2 at least.
        progress: the thread that would drive their collectives.
        repeats: how often each is timed; the result is the median of the slowest ranks' times.
        clock: this rank's.
    """

    def seconds(run: Callable[[], object]) -> float:
        """The time of `run`, which has ended when it returns: no work is left to wait for."""

        def action() -> Iterable[Work]:
            run()
            return ()

        return complete(timed(transport, repeats, clock, action))

    word = torch.zeros(1, dtype=torch.int64, device=transport.device)
    pieces = neighbours(transport.rank, [range(transport.world_size)], word)
    small_N = _small_bucket(transport).grad_N
    bare_s = [seconds(partial(_send, transport, pieces, count)) for count in (FEW, MANY)]
    driven_s = [
        seconds(partial(_send_driven, transport, pieces, count, progress)) for count in (FEW, MANY)
    ]
    # What a further message costs by the thread, less what it costs bare: costs that occur once
    # cancel.
    a_message_s = ((driven_s[1] - driven_s[0]) - (bare_s[1] - bare_s[0])) / (MANY - FEW)
    reduced_s = seconds(_reduction(transport, progress))
    a_bucket_s = reduced_s - seconds(lambda: transport.all_reduce_(small_N).finish())
    return max(a_message_s, 0.0), max(a_bucket_s, 0.0)


def _send(transport: Transport, pieces: Round, count: int) -> None:
    """Sends so many messages around the ring, and waits for each."""
    for _ in range(count):
        transport.exchange(*pieces, TAG).finish()


def _send_driven(transport: Transport, pieces: Round, count: int, progress: Progress) -> None:
    """Sends `count` messages around the ring, as a job of the progress thread; waits for it."""

    def job() -> Generator[object, None, None]:
        group = whole_group(transport, TAG)
        yield GATE  # from here on the job posts messages
        for number in range(count):
            yield from group.exchange(*pieces, last=number == count - 1)

    progress.submit(Pending("calibrate", job(), StageTimer(transport.device))).wait()


def _small_bucket(transport: Transport) -> Bucket:
    n = transport.world_size
    grad_N = torch.zeros(n, device=transport.device)
    return Bucket("calibrate", grad_N, [ParameterSlice("w", 0, n)], CollectiveOp.ALL_REDUCE, n)


def _reduction(transport: Transport, progress: Progress) -> Callable[[], object]:
    """A call that synchronises a small bucket densely, by the reducer of training."""
    config, bucket = SparseConfig.from_overrides(scheme="dense"), _small_bucket(transport)
    residuals = ResidualStore(torch.float32)
    planner = Planner(config.compression, config.scheme)
    groups = Groups(transport)
    reducer = GradientReducer(config, groups, planner, residuals, NullSink(), progress)
    return lambda: reducer.start(bucket, 0).wait()
