"""The choice: for each bucket the scheme that a cost model predicts to take the least time.

All candidates are priced (`prices.predict_all`) from the bucket's shape, its sparsity profile and
the cluster's model; the cheapest is chosen, dense included. At `compression.level` node or instance
the bucket is a part: its ranks are those of a lane, which has a share of the links. ZEN (section
2.4) compares two equations in this way. Here every scheme of the registry is compared for each
bucket, with the costs of codecs and host.

Until a profile is measured, the planner assumes independent uniform positions. Ranks sample a
profile (`sampling`) in the first steps of ramp and target, whenever the target density has fallen
by half since, and every `Pace.profile_every` steps. Sampling needs a message, so a dense bucket
uses the best sparse candidate in such a step, unless no sparse candidate would be cheaper than
dense even at full overlap. A bucket changes its scheme only for a gain of more than
`Pace.hysteresis`.

With `scheme.deterministic=false` measured times count too. Every `Pace.replan_every` steps the
ranks exchange their times of the present scheme and of `dense` (each rank's median over the last
steps; the slowest rank's counts). `dense` replaces a scheme that is slower than `dense` by more
than the hysteresis. After `Pace.retry_after` steps, or when the target density has fallen by
half, the planner tries the next best candidate; after the last one it starts again at the first.
Dense is measured in the warm-up and whenever a bucket is dense; if the last measurement is
`Pace.retry_after` steps old, or there is none, the planner makes `PROBE_STEPS` steps dense to
measure it.

All ranks decide alike. They use only the configuration and exchanged numbers, which are the same
bits on every rank, in the same order. Times travel with a fingerprint of the bucket's state, so
ranks whose states differ get an error. Cost: the sampler's exchange in a profile step, and 8 (2 +
n) bytes per rank and bucket in a replan step. Both run before the collective, on the progress
thread. Changes take effect in the next step.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections import deque
from collections.abc import Generator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives import Exchange
from megatron_sparse.collectives.base import Identity, Yielded, exchange_sizes
from megatron_sparse.compression.schedule import Phase, phase_and_density
from megatron_sparse.config.sparse import CompressionConfig, PlannerConfig, SchemeConfig
from megatron_sparse.errors import CheckpointError, MegatronSparseError
from megatron_sparse.formats.message import Message
from megatron_sparse.planner.plan import Choice, Plan, Planner, shape_of
from megatron_sparse.planner.plan_state import BucketState
from megatron_sparse.planner.prices import (
    DENSE,
    alike,
    candidates,
    explain,
    fully_overlapping,
    least,
    prices_us,
    prior,
    runnable,
    takes_dense,
)
from megatron_sparse.pricing.cluster import ClusterModel
from megatron_sparse.pricing.shape import BucketShape
from megatron_sparse.recording import BucketRecord
from megatron_sparse.sparsity.sampling import sample_profile
from megatron_sparse.transport import Transport

PRICED_OPTIONS = (
    "format",
    "capacity",
    "block_size",
    "partition_hash",
    "hash_rounds",
    "ring_intra_density",
    "ring_inter_density",
    "ring_gather_density",
    "inner",
    "sum_bits",
)
"""The fields of `SchemeConfig` that affect predicted times."""

logger = logging.getLogger("megatron_sparse")

KEPT_RECORDS = 15
"""The measured time is the median over this many steps."""
PROBE_STEPS = 5
"""Number of steps that run dense to measure `dense`."""


@dataclass(frozen=True)
class Pace:
    """When the planner looks again, and what gain a change needs. Tests take shorter steps.

    Attributes:
        profile_iters: steps at the beginning of ramp and target that sample each bucket's
            sparsity: one sample could fall on an unusual gradient.
        profile_every: steps between later samples; a sample then costs less than 1 % of the
            selections (docs/profiling.md).
        hysteresis: a bucket changes its scheme only if the new one's time is shorter by more than
            this fraction of the current one's: predictions err by about as much.
        replan_every: steps between comparisons of measured with predicted times on all ranks; not
            with `scheme.deterministic`, which takes no decision from timing.
        retry_after: steps for which a scheme measured slower than dense is not tried again, and
            after which dense is measured again.
    """

    profile_iters: int = 3
    profile_every: int = 200
    hysteresis: float = 0.05
    replan_every: int = 50
    retry_after: int = 1000


class PricedPlanner(Planner):
    """See the module's docstring.

    Args:
        compression: the schedule of densities.
        scheme: options of the candidates; `name` is `auto`.
        planner: see `PlannerConfig`.
        cluster: the cost of links, codecs and the host.
        logs: whether this rank logs changes of plan; set it on one rank of a group.
        pace: when to look again; the same on all ranks.
    """

    def __init__(
        self,
        compression: CompressionConfig,
        scheme: SchemeConfig,
        planner: PlannerConfig,
        cluster: ClusterModel,
        *,
        logs: bool,
        pace: Pace | None = None,
    ) -> None:
        super().__init__(compression, scheme, cluster)
        self._cluster: ClusterModel = cluster
        self._config = planner
        self._pace = pace or Pace()
        self._options = scheme
        self._logs = logs
        self._states: dict[str, BucketState] = {}
        self._records: dict[tuple[str, str], deque[BucketRecord]] = {}

    # The choice

    def _choose(self, bucket: Bucket, step: int, density: float) -> Choice:
        if bucket.world_size == 1:
            return Choice(DENSE, "one rank")
        state = self._state_of(bucket)
        if state.failed and density <= state.failed_density / 2:
            state.failed, state.dense_until, state.chosen = [], 0, None
        if state.dense_until and step >= state.dense_until:
            state.dense_until = 0
            self._decide(bucket, state, step, density)
        elif state.chosen is None:
            self._decide(bucket, state, step, density)
        if takes_dense(str(state.chosen)) and self._profiles(state, step, density):
            scheme = least(state.predicted_us, _untried(state))
            reason = f"to sample the sparsity; else {state.chosen}: {state.reason}"
            return Choice(scheme, reason, state.predicted_us[scheme])
        return _settled(state, step)

    def _decide(self, bucket: Bucket, state: BucketState, step: int, density: float) -> None:
        """Prices all candidates, and keeps or changes the scheme."""
        shape = self._shape_of(bucket)
        profile = state.profile or prior(shape, density)
        names = runnable(
            candidates(self._config.schemes, self._compression.given_value_bits),
            self._options,
            bucket.grad_N.device.type,
        )
        price = partial(prices_us, shape, cluster=self._cluster, options=self._options, names=names)
        prices = state.predicted_us = price(profile)
        state.hopeless = False
        before, failed = state.chosen, set(state.failed)
        if not any(prices[name] < prices[DENSE] for name in prices.keys() - failed - {DENSE}):
            state.failed = []  # All have been tried.
        best = least(prices, [name for name in prices if name not in state.failed])
        keeps = before in prices and before not in state.failed
        if keeps and prices[best] >= (1 - self._pace.hysteresis) * prices[str(before)]:
            best = str(before)
        if takes_dense(best):
            overlapping = price(fully_overlapping(profile))
            state.hopeless = takes_dense(least(overlapping, overlapping))
        how = "sampled" if state.profile else "assumed uniform"
        state.chosen, state.density = best, density
        state.reason = explain(best, prices, f"density {profile.density:.3g} {how}")
        if best != before:
            self._log(step, bucket, before or "nothing", best, state.reason)

    def _shape_of(self, bucket: Bucket) -> BucketShape:
        return shape_of(bucket, self._scheme.wire_dtype, self._compression.given_value_bits)

    def _profiles(self, state: BucketState, step: int, density: float) -> bool:
        """Whether the bucket's sparsity is sampled in this step."""
        if state.hopeless or step < state.dense_until or density >= 1:
            return False
        if not _untried(state):
            return False
        ramp, every = self._compression.warmup, self._pace.profile_every
        target = ramp + self._compression.ramp
        since = step - (ramp if step < target else target)
        return (
            since < self._pace.profile_iters
            or since % every == 0
            or density <= state.profile_density / 2
        )

    def _state_of(self, bucket: Bucket) -> BucketState:
        state = self._states.get(bucket.name)
        if state is None or not state.fits(bucket):
            if state is not None and self._logs:
                logger.warning(
                    "bucket %s is planned anew: what is known is of %d elements on %d ranks, and "
                    "it has %d on %d",
                    bucket.name,
                    state.numel,
                    state.world_size,
                    bucket.numel,
                    bucket.world_size,
                )
            state = self._states[bucket.name] = BucketState.of(bucket)
        return state

    # What ranks exchange

    def follow(self, record: BucketRecord) -> None:
        """See `Planner`."""
        if not self._scheme.deterministic:
            key = (record.bucket, record.scheme)
            self._records.setdefault(key, deque(maxlen=KEPT_RECORDS)).append(record)

    def share(
        self, exchange: Exchange, plan: Plan, step: int, message: Message | None
    ) -> Generator[Yielded, None, None]:
        """See `Planner`.

        Raises:
            CommunicationError: another rank has a different plan.
        """
        bucket, transport = exchange.bucket, exchange.transport
        if plan.phase is Phase.OFF or bucket.world_size == 1:
            return
        state = self._state_of(bucket)
        if not self._scheme.deterministic and step and step % self._pace.replan_every == 0:
            yield from self._compare(bucket, state, plan, step, transport)
        if plan.phase is Phase.WARMUP and step + 1 == self._compression.warmup:
            # Pricing takes time, so it is done here and not at the launch of the next step.
            _, density = phase_and_density(self._compression, step + 1)
            self._decide(bucket, state, step + 1, density)
        if message is not None and self._profiles(state, step, plan.density):
            before, seed = state.profile, self._compression.seed
            state.profile = yield from sample_profile(
                bucket, message, transport, exchange.buffers, exchange.timer, seed=seed
            )
            state.profile_density = plan.density
            # A profile that has hardly changed gives the same choice, and pricing takes time.
            if before is None or not alike(before, state.profile, self._pace.hysteresis):
                self._decide(bucket, state, step, plan.density)

    def _compare(
        self, bucket: Bucket, state: BucketState, plan: Plan, step: int, transport: Transport
    ) -> Generator[Yielded, None, None]:
        """Exchanges the times of dense and of the present scheme; may change the plan."""
        chosen = state.chosen or DENSE
        names = list(dict.fromkeys([DENSE, chosen]))
        own_ns = [self._measured_ns(bucket.name, name, step) for name in names]
        identity = Identity(
            f"plan {state.fingerprint():#x}", bucket, str(bucket.grad_N.dtype), step
        )
        table = yield from exchange_sizes(own_ns, identity, transport)
        for index, name in enumerate(names):
            if all(row[index] for row in table):
                state.measured_us[name] = max(row[index] for row in table) / 1e3
                state.dense_step = step if name == DENSE else state.dense_step
        if plan.phase is Phase.WARMUP or chosen == DENSE or step < state.dense_until:
            return
        dense_us, chosen_us = state.measured_us.get(DENSE), state.measured_us.get(chosen)
        if dense_us is None or step - state.dense_step >= self._pace.retry_after:
            reason = f"for {PROBE_STEPS} steps, to be measured"
            self._go_dense(bucket, state, step, PROBE_STEPS, reason)
        elif chosen_us is not None and dense_us < (1 - self._pace.hysteresis) * chosen_us:
            state.failed, state.failed_density = [*state.failed, chosen], plan.density
            reason = f"{chosen} took {chosen_us:.0f} us and dense {dense_us:.0f} us, measured"
            self._go_dense(bucket, state, step, self._pace.retry_after, reason)

    def _go_dense(
        self, bucket: Bucket, state: BucketState, step: int, steps: int, reason: str
    ) -> None:
        state.dense_until, state.dense_reason = step + 1 + steps, reason
        self._log(step, bucket, str(state.chosen), DENSE, reason)

    def _measured_ns(self, bucket: str, scheme: str, step: int) -> int:
        """This rank's median since the last call; 0 without a measurement."""
        records = self._records.pop((bucket, scheme), ())
        # The step's own record is not complete yet, and a straggler may have changed a scheme.
        times_us = [
            sum(r.timer.times_us().values())
            for r in records
            if r.step < step and r.scheme == scheme
        ]
        return round(median(times_us) * 1e3) if times_us else 0

    def _log(self, step: int, bucket: Bucket, before: str, after: str, reason: str) -> None:
        if self._logs:
            logger.info(
                "step %d: bucket %s: %s -> %s, %s", step, bucket.name, before, after, reason
            )

    def replan(self) -> None:
        """See `Planner`. Profiles and measured times are of the old density: dropped too."""
        self._states.clear()
        self._records.clear()

    # Reports and checkpoints

    def report(self, bucket: Bucket, step: int) -> dict[str, Any]:
        """See `Planner`. The row also holds the profile and the measured times."""
        plan, state = self.plan_for(bucket, step), self._state_of(bucket)
        choice = Choice(plan.scheme, plan.reason)
        if plan.phase in (Phase.RAMP, Phase.TARGET) and bucket.world_size > 1:
            choice = _settled(state, step)  # ignores the temporary scheme of a sampling step
        return {
            "bucket": bucket.name,
            **asdict(self._shape_of(bucket)),
            "density": plan.density,
            "predicted_us": state.predicted_us,
            "measured_us": state.measured_us,
            "chosen": choice.scheme,
            "reason": choice.reason,
            "profile": state.to_dict()["profile"],
        }

    def state_dict(self) -> dict[str, Any]:
        """See `Planner`."""
        buckets = {name: state.to_dict() for name, state in self._states.items()}
        return {"basis": self._basis(), "buckets": buckets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Planner`.

        If the settings have changed, profiles are kept and plans are made anew. If a bucket's size
        or group has changed, all its state is made anew when the bucket is next synchronised.

        Raises:
            CheckpointError: the state is damaged.
        """
        if not state:
            return  # the state is of a run with another planner
        try:
            self._states = {
                name: BucketState.from_dict(values) for name, values in state["buckets"].items()
            }
            same = state["basis"] == self._basis()
        except (TypeError, KeyError, AttributeError, MegatronSparseError) as error:
            raise CheckpointError(
                "the saved plan is damaged",
                expected="what the planner saved",
                got=error,
                remedy="start from another checkpoint, or delete the plugin's folder in this one",
            ) from error
        if not same:
            if self._logs:
                logger.warning("the planner's settings have changed: all buckets are planned anew")
            for name, kept in self._states.items():
                self._states[name] = BucketState(
                    kept.numel,
                    kept.op,
                    kept.world_size,
                    lanes=kept.lanes,
                    profile=kept.profile,
                    profile_density=kept.profile_density,
                )

    def _basis(self) -> int:
        """A checksum of everything that the choice depends on."""
        parts = [self._cluster.to_yaml(""), asdict(self._config), asdict(self._pace)]
        options = asdict(self._options)
        parts += [{name: options[name] for name in PRICED_OPTIONS}, asdict(self._compression)]
        return zlib.crc32(json.dumps(parts, sort_keys=True).encode())


def _settled(state: BucketState, step: int) -> Choice:
    """The choice for a step."""
    scheme, reason = str(state.chosen), state.reason
    if step < state.dense_until:
        scheme, reason = DENSE, state.dense_reason
    return Choice(scheme, reason, state.predicted_us[scheme])


def _untried(state: BucketState) -> list[str]:
    """The sparse candidates that have not failed."""
    return [
        name for name in state.predicted_us if not takes_dense(name) and name not in state.failed
    ]
