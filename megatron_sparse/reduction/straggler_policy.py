"""Decides which rank the exchange of a bucket skips: a straggler, which the others do not wait for.

A rank is ready for a bucket when the bucket has passed its gate (`reduction.job`), that is, when
the rank could post the first message. It then reports its arrival (`transport.arrival_counter`),
unless the straggler is pinned. Each rank measures how long it waited until the last rank was ready.
These waiting times are all-gathered in the next step, behind the first bucket's messages (8 bytes a
bucket), and used from the step after that. So all ranks decide from the same numbers, which are two
steps old, and no rank waits for them.

The decision, by `straggler.mode`:

- `pinned`: skips always the configured rank.
- `persistent`: skips the rank that was last in most of the last steps (`straggler.detector`), if
  its expected delay exceeds the critical delay, from which on skipping is faster for this bucket
  (`straggler.cost`).
- `observe`: skips no rank, and records the waiting times.

The cost of the links comes from `planner.cluster`, or is measured when the policy is made.
`straggler.min_delay_ms` replaces the critical delay of every bucket.
"""

import logging
import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

import torch

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives import POSTED, SCHEMES, Input, skips_straggler
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.formats.message import VALUE_DTYPES, wire_dtype_of
from megatron_sparse.planner import Plan
from megatron_sparse.planner.link_timing import (
    QUICK,
    MeasuredLinks,
    complete,
    host_clock,
    measure_links,
)
from megatron_sparse.planner.wire_bytes import predicted_bytes
from megatron_sparse.pricing.cluster import ClusterModel, find
from megatron_sparse.recording import ReadinessRecord, RecordSink, StageTimer
from megatron_sparse.reduction.job import GATE, Pending
from megatron_sparse.reduction.progress import Progress
from megatron_sparse.straggler.cost import SplitTimes, dense_split, expected_delay_s, sparse_split
from megatron_sparse.straggler.detector import HISTORY, Readiness, persistent_straggler
from megatron_sparse.transport import Link, Transport
from megatron_sparse.transport.base import Arrive

logger = logging.getLogger("megatron_sparse")

SLOW_RANK = "MEGATRON_SPARSE_SLOW_RANK"
"""An environment variable for tests and benches: with `RANK:MILLISECONDS` that rank of each group
sleeps so long in every backward pass, when its first bucket is ready."""
AWARE = {"dense": "straggler", "direct": "straggler_direct"}
"""Scheme -> its variant that can skip a rank."""
WAITING = {aware: scheme for scheme, aware in AWARE.items()}
"""The variant -> the scheme that waits for all ranks."""


class Delays(NamedTuple):
    """The delays of a straggler, in seconds, at which skipping it is faster than waiting.

    Attributes:
        least_s: the critical delay: skipping is faster above it.
        most_s: a longer delay makes skipping no more profitable.
    """

    least_s: float
    most_s: float


NONE_PAYS = Delays(math.inf, math.inf)


class _Measured:
    """A `Work` that is ready when all the given futures, this rank's waiting times, are done."""

    def __init__(self, waits: list[Future[float]]) -> None:
        self._waits = waits

    def ready(self) -> bool:
        return all(wait.done() for wait in self._waits)

    def when_ready(self, wake: Callable[[], None]) -> None:
        for wait in self._waits:
            wait.add_done_callback(lambda _: wake())

    def finish(self) -> None:
        """Nothing is left to do."""


class StragglerPolicy:
    """See the module's docstring. Making one is collective in the modes that measure.

    Args:
        config: `straggler`, `scheme` and `planner.cluster` are read.
        transport: the group of ranks.
        sink: receives the waiting times of all ranks.
        links: the cost of the group's links; None takes `planner.cluster`, or measures.

    Raises:
        ConfigError: the configured rank is not in the group.
    """

    def __init__(
        self,
        config: SparseConfig,
        transport: Transport,
        sink: RecordSink,
        links: MeasuredLinks | ClusterModel | None = None,
    ) -> None:
        self._config = config.straggler
        self._scheme = config.scheme
        self._transport = transport
        self._sink = sink
        # Bucket -> the waiting times of all ranks in the last steps; the same on every rank.
        self._history: defaultdict[str, deque[Readiness]]
        self._history = defaultdict(lambda: deque(maxlen=HISTORY))
        self._arrive: Arrive | None = None
        self._link = self._dense_link = Link(0.0, 0.0)  # costs; set below where they are needed
        self._step = self._previous = -1  # this step and the one before; -1: none yet
        # Buckets of this step and of the last one, each with this rank's waiting time.
        self._this_step: list[tuple[str, Future[float]]] = []
        self._last_step: list[tuple[str, Future[float]]] = []
        self._readiness: list[ReadinessRecord] = []  # the result of `gather`
        self._gathering: Pending | None = None  # the job of this step that runs it
        self._skipped_last: dict[str, int | None] = {}  # bucket -> rank skipped in the last step
        mode, is_single = self._config.mode, transport.world_size == 1
        self._may_skip = self._config.leaves_behind and not is_single
        self._check_rank("straggler.rank", self._config.rank)
        self._sleep_s = self._injected_delay_s()
        if mode in ("off", "pinned") or is_single:  # these need no waiting times
            return
        self._arrive = transport.open_arrival_counter()
        if mode == "persistent" and self._config.min_delay_ms is None:
            if links is None and config.planner.cluster is not None:
                links = find(config.planner.cluster)
            elif links is None:
                links = complete(measure_links(transport, QUICK, host_clock(transport.device)))
            # With several nodes the links between them are the slowest.
            self._link = links.inter if len(set(transport.nodes)) > 1 else links.intra
            self._dense_link = links.dense

    def _check_rank(self, name: str, rank: int | None) -> None:
        """Refuses a rank that is not in the group; `name` is the setting that names it."""
        n = self._transport.world_size
        if rank is not None and rank >= n:
            raise ConfigError(
                f"{name} is not in the group",
                expected=f"0 to {n - 1}: the ranks that reduce gradients together",
                got=rank,
            )

    def _injected_delay_s(self) -> float:
        """Seconds that this rank sleeps in each step, to simulate a straggler: see `SLOW_RANK`."""
        setting = os.environ.get(SLOW_RANK)
        if setting is None:
            return 0.0
        try:
            rank_text, delay_text = setting.split(":")
            rank, delay_ms = int(rank_text), float(delay_text)
        except ValueError:
            raise ConfigError(
                f"{SLOW_RANK} cannot be read", expected="RANK:MILLISECONDS, like 3:250", got=setting
            ) from None
        self._check_rank(SLOW_RANK, rank)
        return delay_ms / 1e3 if rank == self._transport.rank else 0.0

    def begin_step(self, step: int) -> None:
        """Adds the waiting times gathered in the last step to the history, if a new step begins.

        The training thread calls it before each launch of a bucket. At a step's first launch all
        buckets of earlier steps must have ended. The rank that `SLOW_RANK` names sleeps here.

        Raises:
            CommunicationError: the waiting times could not be gathered.
        """
        if step == self._step:
            return
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        # All jobs of the last step have ended, so no thread uses the following attributes now.
        self._previous, self._step = self._step, step
        readiness, self._readiness = self._readiness, []
        for record in readiness:
            self._history[record.bucket].append(record.ready_s)
            self._sink.record_readiness(record)
        self._last_step, self._this_step = self._this_step, []
        if self._sleep_s:
            time.sleep(self._sleep_s)

    def launched(self, progress: Progress) -> None:
        """Starts the job `gather`, after a step's first launch; to be called after each launch."""
        if self._last_step and self._gathering is None:
            self._gathering = progress.submit(Pending("readiness", self.gather(), StageTimer()))

    def adapt(self, bucket: Bucket, plan: Plan) -> Plan:
        """Replaces the plan's scheme by its variant that can skip a rank, if one can be used."""
        scheme = AWARE.get(plan.scheme)
        if scheme is None or not self._may_skip or bucket.op not in SCHEMES[scheme].ops:
            return plan
        if self._scheme.given_capacity is not None and SCHEMES[plan.scheme].takes_slots:
            return plan  # with `scheme.capacity` messages have a fixed size; the variant's do not
        return replace(plan, scheme=scheme)

    def scheme_of(self, plan: Plan, straggler: int | None) -> str:
        """The scheme to record: the plan's; if no rank is skipped, the one that waits for all."""
        return plan.scheme if straggler is not None else WAITING.get(plan.scheme, plan.scheme)

    def decide(self, bucket: Bucket, plan: Plan) -> int | None:
        """Reports this rank's arrival at a bucket, and decides which rank the bucket skips.

        Called behind the gate, before the bucket's first message.

        Returns:
            A rank of the group, the same on all ranks; None if no rank is skipped.
        """
        can_skip = self._may_skip and skips_straggler(plan.scheme)
        if self._config.mode == "pinned":
            return self._config.rank if can_skip else None
        if self._arrive is None:
            return None
        self._this_step.append((bucket.name, self._arrive(bucket.name)))
        if self._config.mode != "persistent":  # `observe`
            return None
        # Called even if no rank can be skipped, to log that the bucket waits for all ranks again.
        delays = self._delays_that_pay(bucket, plan) if can_skip else NONE_PAYS
        return self._persistent(bucket, delays)

    def _persistent(self, bucket: Bucket, delays: Delays) -> int | None:
        """The usually last rank, if skipping it is faster; else None. Rank 0 logs changes."""
        steps = self._history[bucket.name]
        skipped = persistent_straggler(steps)
        if skipped is not None:
            expected_s = expected_delay_s(steps, skipped, delays.most_s)
            if expected_s <= delays.least_s:
                skipped = None
        if skipped != self._skipped_last.get(bucket.name) and self._transport.rank == 0:
            logger.info(
                "step %d: bucket %s %s (critical delay %.2f ms)",
                self._step,
                bucket.name,
                "waits for all ranks" if skipped is None else f"skips rank {skipped}",
                delays.least_s * 1e3,
            )
        self._skipped_last[bucket.name] = skipped
        return skipped

    def gather(self) -> Generator[object, None, None]:
        """The job that all-gathers the waiting times of the last step; fills `_readiness`.

        On CUDA the copy of the result to the CPU blocks the progress thread.
        """
        arrivals, n = self._last_step, self._transport.world_size
        waits = [wait for _, wait in arrivals]
        yield _Measured(waits)  # a wait is known only when the last rank has arrived
        own_s = torch.tensor([wait.result() for wait in waits], dtype=torch.float64)
        own_s = own_s.to(self._transport.device)
        gathered_s = own_s.new_empty(n * own_s.numel())
        yield GATE
        work = self._transport.all_gather(gathered_s, own_s)
        yield POSTED
        yield work
        waited_by_bucket = gathered_s.view(n, -1).t().tolist()  # for each bucket n seconds
        self._readiness = [
            ReadinessRecord(name, self._previous, tuple(waited_s))
            for (name, _), waited_s in zip(arrivals, waited_by_bucket, strict=True)
        ]

    def _delays_that_pay(self, bucket: Bucket, plan: Plan) -> Delays:
        """The delays at which skipping a rank is faster than waiting, for this bucket.

        From `straggler.min_delay_ms`, else from the cost of the links. `NONE_PAYS` if skipping is
        never faster.
        """
        if self._config.min_delay_ms is not None:
            return Delays(self._config.min_delay_ms / 1e3, math.inf)
        times = self._split_times(bucket, plan)
        if not times.can_win:
            return NONE_PAYS
        return Delays(max(0.0, times.critical_s), times.early_s)

    def _split_times(self, bucket: Bucket, plan: Plan) -> SplitTimes:
        """The modelled seconds of a bucket's exchange, with a straggler skipped and waited for."""
        n = bucket.world_size
        wire_dtype = wire_dtype_of(bucket.grad_N.dtype, plan.wire_dtype)
        if SCHEMES[plan.scheme].takes is Input.DENSE:
            buffer_bytes = bucket.numel * VALUE_DTYPES[wire_dtype].itemsize
            return dense_split(n, buffer_bytes, self._link, self._dense_link)
        wire_bytes = predicted_bytes(bucket, plan.density, self._scheme, plan.value_bits)
        # In `agsparse` a rank sends n - 1 times its whole message. In `direct` it sends (n - 1) / n
        # of its message, and as much of the encoded sum.
        message_bytes = wire_bytes["agsparse"] / (n - 1)
        sum_bytes = wire_bytes["direct"] * n / (n - 1) - message_bytes
        return sparse_split(n, message_bytes, sum_bytes, self._link)
