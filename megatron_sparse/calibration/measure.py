"""Measures the cluster that the ranks run on: a `ClusterModel`, the same on all of them.

All ranks measure together, one after the other, links and the backend's all-reduce
(`planner.link_timing`), the host's cost, and the codec (`codec`).

The host's cost is the time that training adds to a bare operation; what a bare message takes in
Python and in the backend is in the link's alpha already. So a message that the progress thread
drives through a collective's `Subgroup` is compared with a bare one, and a small bucket through the
reducer (plan, launch, threads, records) with a bare all-reduce. Neither includes a sparse
collective's other work on the host; its agreement costs about as much as two messages
(docs/calibration.md).
"""

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
"""Numbers of messages in a timed run; in a difference of two runs, costs of a run cancel."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        links: sizes and repetitions of messages.
        codec: sizes and repetitions of vectors.
        host_repeats: repetitions of each measurement of the host's cost.
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

    The group has 2 ranks at least. `progress` drives collectives; `tell` is called with a text that
    says what is measured next.

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
        ring_densities={},  # only `calibrate --sweep` finds them, and adds them later
        fingerprint=fingerprint(transport),
    )


def measure_host(
    transport: Transport, progress: Progress, repeats: int, clock: Clock
) -> tuple[float, float]:
    """Measures the seconds that training adds to a message, and to a bucket; same on all ranks.

    Both are differences of times; a negative one counts as 0. The ranks are real, 2 at least, and
    `progress` drives collectives as in training. A time is the median, over `repeats`, of the
    slowest ranks' times by `clock`, in seconds.
    """

    def seconds(run: Callable[[], object]) -> float:
        """The time of `run`, which waits for all that it starts."""

        def action() -> Iterable[Work]:
            run()
            return ()  # no work is left that `timed` would have to wait for

        return complete(timed(transport, repeats, clock, action))

    word = torch.zeros(1, dtype=torch.int64, device=transport.device)
    # The sends and receives of one exchange: 8 bytes to the next rank of a ring of all ranks.
    pieces = neighbours(transport.rank, [range(transport.world_size)], word)
    small_N = _small_bucket(transport).grad_N
    bare_s = [seconds(partial(_send, transport, pieces, count)) for count in (FEW, MANY)]
    driven_s = [
        seconds(partial(_send_driven, transport, pieces, count, progress)) for count in (FEW, MANY)
    ]
    # A message's time by the thread less its bare time; costs that occur once in a run cancel.
    a_message_s = ((driven_s[1] - driven_s[0]) - (bare_s[1] - bare_s[0])) / (MANY - FEW)
    reduced_s = seconds(_reduction(transport, progress))
    a_bucket_s = reduced_s - seconds(lambda: transport.all_reduce_(small_N).finish())
    return max(a_message_s, 0.0), max(a_bucket_s, 0.0)


def _send(transport: Transport, pieces: Round, count: int) -> None:
    """Sends `count` messages around the ring, and waits for each."""
    for _ in range(count):
        transport.exchange(*pieces, TAG).finish()


def _send_driven(transport: Transport, pieces: Round, count: int, progress: Progress) -> None:
    """Sends `count` messages around the ring in a job of the progress thread; awaits the job."""

    def job() -> Generator[object, None, None]:
        group = whole_group(transport, TAG)
        yield GATE  # a job must yield it before it posts messages
        for number in range(count):
            yield from group.exchange(*pieces, last=number == count - 1)

    progress.submit(Pending("calibrate", job(), StageTimer(transport.device))).wait()


def _small_bucket(transport: Transport) -> Bucket:
    n = transport.world_size
    grad_N = torch.zeros(n, device=transport.device)
    return Bucket("calibrate", grad_N, [ParameterSlice("w", 0, n)], CollectiveOp.ALL_REDUCE, n)


def _reduction(transport: Transport, progress: Progress) -> Callable[[], object]:
    """Makes a call that synchronises a small bucket densely by the reducer of training."""
    config, bucket = SparseConfig.from_overrides(scheme="dense"), _small_bucket(transport)
    residuals = ResidualStore(torch.float32)
    planner = Planner(config.compression, config.scheme)
    groups = Groups(transport)
    reducer = GradientReducer(config, groups, planner, residuals, NullSink(), progress)
    return lambda: reducer.start(bucket, 0).wait()
