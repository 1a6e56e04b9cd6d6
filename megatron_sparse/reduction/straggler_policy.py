"""Decides which rank a bucket skips: measures, agrees and decides, for one group of ranks.

A rank is ready for a bucket when the bucket has passed its gate, that is, when the rank could post
the first message. It then reports its arrival (`transport.arrival_counter`), unless the straggler
is pinned. The time that each rank waited for the last one in a step is all-gathered in the next
step, behind the first bucket's messages, and used from the step after that. So all ranks decide
from the same numbers, which are two steps old, and no rank waits for them. 8 bytes a bucket.

The decision, by `straggler.mode`:

- `pinned`: always the configured rank.
- `persistent`: the rank that was last in most of the last steps (`straggler.detector`), if its
  expected delay exceeds the critical one of this bucket (`straggler.cost`).

The cost of the links comes from `planner.cluster`, or is measured when the policy is made. With
`straggler.min_delay_ms` the critical delay is that number in every bucket, whatever links cost.
"""

from __future__ import annotations

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
from megatron_sparse.straggler.cost import (
    SplitTimes,
    dense_split,
    expected_delay_s,
    sparse_split,
)
from megatron_sparse.straggler.detector import HISTORY, Readiness, persistent_straggler
from megatron_sparse.transport import Link, Transport
from megatron_sparse.transport.base import Arrive

logger = logging.getLogger("megatron_sparse")

SLOW_RANK = "MEGATRON_SPARSE_SLOW_RANK"
"""An environment variable for tests and benches: with `RANK:MILLISECONDS` that rank of each group
sleeps so long in every backward pass, when its first bucket is ready."""
AWARE = {"dense": "straggler", "direct": "straggler_direct"}
"""The scheme that can skip a rank, for each scheme that has one."""
WAITING = {aware: scheme for scheme, aware in AWARE.items()}
"""The scheme that such a bucket is recorded under when no rank is skipped."""


class Delays(NamedTuple):
    """The delays of a straggler at which it pays to skip it.

    Attributes:
        least_s: a delay must exceed it.
        most_s: a longer delay gains nothing more.
    """

    least_s: float
    most_s: float


NONE_PAYS = Delays(math.inf, math.inf)


class _Measured:
    """A `Work` that is ready when it is known how long this rank has waited."""

    def __init__(self, waits: list[Future[float]]) -> None:
        self._waits = waits

    def ready(self) -> bool:
        """See `Work`."""
        return all(wait.done() for wait in self._waits)

    def when_ready(self, wake: Callable[[], None]) -> None:
        """See `Work`."""
        for wait in self._waits:
            wait.add_done_callback(lambda _: wake())

    def finish(self) -> None:
        """See `Work`."""


class StragglerPolicy:
    """See the module's docstring. Making one is collective in the modes that measure.

    Args:
        config: `straggler`, `scheme` and `planner.cluster` are read.
        transport: the group.
        sink: receives the times at which ranks were ready.
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
        # By bucket, the last times of readiness: the same on every rank.
        self._history: defaultdict[str, deque[Readiness]]
        self._history = defaultdict(lambda: deque(maxlen=HISTORY))
        self._arrive: Arrive | None = None
        self._link = self._dense_link = Link(0.0, 0.0)  # until they are known, if they are needed
        self._step = self._previous = -1
        self._this_step: list[tuple[str, Future[float]]] = []
        self._last_step: list[tuple[str, Future[float]]] = []
        self._readiness: list[ReadinessRecord] = []
        self._agreement: Pending | None = None
        self._skipped_last: dict[str, int | None] = {}  # by bucket
        mode, alone = self._config.mode, transport.world_size == 1
        self._may_skip = self._config.leaves_behind and not alone
        self._check_rank("straggler.rank", self._config.rank)
        self._sleep_s = self._injected_delay_s()
        if mode in ("off", "pinned") or alone:
            return
        self._arrive = transport.open_arrival_counter()
        if mode == "persistent" and self._config.min_delay_ms is None:
            if links is None and config.planner.cluster is not None:
                links = find(config.planner.cluster)
            elif links is None:
                links = complete(measure_links(transport, QUICK, host_clock(transport.device)))
            # Ranks on several nodes wait for the links between the nodes.
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
        """How long this rank sleeps in each step: see `SLOW_RANK`."""
        given = os.environ.get(SLOW_RANK)
        if given is None:
            return 0.0
        try:
            rank_text, delay_text = given.split(":")
            rank, delay_ms = int(rank_text), float(delay_text)
        except ValueError:
            raise ConfigError(
                f"{SLOW_RANK} cannot be read", expected="RANK:MILLISECONDS, like 3:250", got=given
            ) from None
        self._check_rank(SLOW_RANK, rank)
        return delay_ms / 1e3 if rank == self._transport.rank else 0.0

    def begin_step(self, step: int) -> None:
        """Takes over the waiting times that ranks agreed on, if a new step begins.

        The training thread calls it before each launch. At a step's first launch no bucket of an
        earlier step may be under way. The rank that `SLOW_RANK` names sleeps here.

        Raises:
            CommunicationError: the ranks could not agree.
        """
        if step == self._step:
            return
        if self._agreement is not None:
            self._agreement.wait()
            self._agreement = None
        # No job reads the following attributes from here on.
        self._previous, self._step = self._step, step
        readiness, self._readiness = self._readiness, []
        for record in readiness:
            self._history[record.bucket].append(record.ready_s)
            self._sink.record_readiness(record)
        self._last_step, self._this_step = self._this_step, []
        if self._sleep_s:
            time.sleep(self._sleep_s)

    def launched(self, progress: Progress) -> None:
        """Called after each launch; submits `agree` after the first launch of a step."""
        if self._last_step and self._agreement is None:
            self._agreement = progress.submit(Pending("readiness", self.agree(), StageTimer()))

    def adapt(self, bucket: Bucket, plan: Plan) -> Plan:
        """The plan with a scheme that can skip a rank, where its own scheme has such a variant."""
        scheme = AWARE.get(plan.scheme)
        if scheme is None or not self._may_skip or bucket.op not in SCHEMES[scheme].ops:
            return plan
        if self._scheme.given_capacity is not None and SCHEMES[plan.scheme].takes_slots:
            return plan  # its messages have slots; those of the other scheme have none
        return replace(plan, scheme=scheme)

    def scheme_of(self, plan: Plan, straggler: int | None) -> str:
        """The scheme to record, once it is known whether a rank is skipped."""
        return plan.scheme if straggler is not None else WAITING.get(plan.scheme, plan.scheme)

    def decide(self, bucket: Bucket, plan: Plan) -> int | None:
        """The rank to skip, the same on all ranks. Called after the gate, before any message.

        Pinned it is the configured one, persistent the one that has come last for many steps, if
        that pays. Else, and while observing, there is none.

        Returns:
            A rank of the group; None if no rank is skipped.
        """
        aware = self._may_skip and skips_straggler(plan.scheme)
        if self._config.mode == "pinned":
            return self._config.rank if aware else None
        if self._arrive is None:
            return None
        self._this_step.append((bucket.name, self._arrive(bucket.name)))
        if self._config.mode != "persistent":
            return None
        delays = self._delays_that_pay(bucket, plan) if aware else NONE_PAYS
        # Also for a bucket that can no longer skip a rank: the log says that it waits again.
        return self._persistent(bucket, delays)

    def _persistent(self, bucket: Bucket, delays: Delays) -> int | None:
        """The persistent straggler, if skipping it pays. Logs every change."""
        steps = self._history[bucket.name]
        expected = persistent_straggler(steps)
        if expected is not None:
            expected_s = expected_delay_s(steps, expected, delays.most_s)
            expected = expected if expected_s > delays.least_s else None
        if expected != self._skipped_last.get(bucket.name) and self._transport.rank == 0:
            logger.info(
                "step %d: bucket %s %s (critical delay %.2f ms)",
                self._step,
                bucket.name,
                "waits for all ranks" if expected is None else f"skips rank {expected}",
                delays.least_s * 1e3,
            )
        self._skipped_last[bucket.name] = expected
        return expected

    def agree(self) -> Generator[object, None, None]:
        """The job that gathers how long each rank waited in the last step.

        On CUDA the progress thread waits for the result on the host.
        """
        arrivals, n = self._last_step, self._transport.world_size
        waits = [wait for _, wait in arrivals]
        yield _Measured(waits)
        own_s = torch.tensor([wait.result() for wait in waits], dtype=torch.float64)
        own_s = own_s.to(self._transport.device)
        gathered_s = own_s.new_empty(n * own_s.numel())
        yield GATE
        work = self._transport.all_gather(gathered_s, own_s)
        yield POSTED
        yield work
        waited_by_bucket = gathered_s.view(n, -1).t().tolist()  # each the seconds of all ranks
        self._readiness = [
            ReadinessRecord(name, self._previous, tuple(waited_s))
            for (name, _), waited_s in zip(arrivals, waited_by_bucket, strict=True)
        ]

    def _delays_that_pay(self, bucket: Bucket, plan: Plan) -> Delays:
        """The delay above which skipping a rank pays, and the one beyond which it gains no more.

        By `straggler.min_delay_ms`, else by the cost of the links. `NONE_PAYS` where waiting is at
        least as fast however late the rank is.
        """
        if self._config.min_delay_ms is not None:
            return Delays(self._config.min_delay_ms / 1e3, math.inf)
        times = self._split_times(bucket, plan)
        if not times.can_win:
            return NONE_PAYS
        return Delays(max(0.0, times.critical_s), times.early_s)

    def _split_times(self, bucket: Bucket, plan: Plan) -> SplitTimes:
        """The modelled seconds of a bucket, with the late rank skipped and with all waiting for it.

        From the bytes of the bucket's messages and the costs of the links.
        """
        n = bucket.world_size
        wire_dtype = wire_dtype_of(bucket.grad_N.dtype, plan.wire_dtype)
        if SCHEMES[plan.scheme].takes is Input.DENSE:
            buffer_bytes = bucket.numel * VALUE_DTYPES[wire_dtype].itemsize
            return dense_split(n, buffer_bytes, self._link, self._dense_link)
        wire_bytes = predicted_bytes(bucket, plan.density, self._scheme, plan.value_bits)
        # `agsparse` sends n - 1 whole messages; `direct` all parts but its own of message and sum.
        message_bytes = wire_bytes["agsparse"] / (n - 1)
        sum_bytes = wire_bytes["direct"] * n / (n - 1) - message_bytes
        return sparse_split(n, message_bytes, sum_bytes, self._link)
