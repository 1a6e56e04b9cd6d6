"""Chooses for each bucket the scheme that a cost model predicts to take the least time.

All candidates, dense included, are priced (`prices.predict_all`) from the bucket's shape, its
sparsity profile and the cluster's model. ZEN (section 2.4) compares two equations in this way; here
every registered scheme is compared, with the costs of codecs and of the CPU that drives them. At
`compression.level` node or instance a bucket is one rank's part of a gradient bucket; the ranks
with the same part form a lane, which has a share of the links.

- Profile: measured sparsity; until one is measured, positions count as independent and uniform.
- Sampled step: one in which ranks measure a profile (`sampling`): the first steps of ramp and of
  target phase, every `Pace.profile_every` steps, and when the target density has halved since.
- Settled scheme: the one chosen by price. Where it is dense, a sampled step uses the best sparse
  candidate, as only its messages can be sampled. It changes for gains over `Pace.hysteresis`.
- Hopeless bucket: no sparse candidate is cheaper than dense even if all ranks select the same
  elements. It is sampled only when the target density has halved.

All ranks decide alike. They use only the configuration and exchanged numbers, which are the same
bits on every rank, in the same order; nothing is decided from timing (`reduction.setting_trials`
does that). Cost: the exchange of a sampled step, before the collective, on the progress thread.
Changes take effect in the next step.
"""

import json
import logging
import zlib
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives import SCHEMES, Exchange
from megatron_sparse.collectives.base import Yielded
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
)
from megatron_sparse.pricing.cluster import ClusterModel
from megatron_sparse.sparsity.sampling import sample_profile
from megatron_sparse.transport import Transport
from megatron_sparse.transport.topology import members_of

logger = logging.getLogger("megatron_sparse")


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
    """

    profile_iters: int = 3
    profile_every: int = 200
    hysteresis: float = 0.05


class PricedPlanner(Planner):
    """The planner for `scheme.name=auto` with a cluster model; see the module's docstring.

    `scheme` has the name `auto`, and the candidates' options. `logs`: this rank logs changes of
    plan; set it on one rank of a group. `pace`: when to look again, the same on all ranks.
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
        self._logs = logs
        self._states: dict[str, BucketState] = {}
        # By the number of ranks in all lanes of a group: `cluster` with the nodes of that group.
        self._clusters: dict[int, ClusterModel] = {}

    def join(self, transport: Transport) -> None:
        """See `Planner.join`. Prices of the group's buckets then use its nodes, not the file's."""
        super().join(transport)
        node_sizes = tuple(map(len, members_of(transport.nodes)))
        cluster = self._cluster
        if len(node_sizes) == 1 < len(cluster.nodes):
            if cluster.is_model:
                return  # ranks on one machine may imitate the model's nodes, so these stay
            cluster = replace(cluster, dense=cluster.intra)  # `dense` was measured across nodes
        self._clusters[transport.world_size] = replace(cluster, nodes=node_sizes)

    # The choice

    def _choose(self, bucket: Bucket, step: int, density: float) -> Choice:
        """The settled scheme, decided here if there is none; in a sampled step always sparse."""
        if bucket.world_size == 1:
            return Choice(DENSE, "one rank")
        state = self._state_of(bucket)
        if state.chosen is None:
            self._decide(bucket, state, step, density)
        settled = _settled(state)
        # Only the message of a sparse scheme can be sampled.
        if SCHEMES[settled.scheme].takes_all and self._is_sampled(state, step, density):
            scheme = least(state.predicted_us, _sparse(state))
            reason = f"to sample the sparsity; else {settled.scheme}: {settled.reason}"
            return Choice(scheme, reason, state.predicted_us[scheme])
        return settled

    def _decide(self, bucket: Bucket, state: BucketState, step: int, density: float) -> None:
        """Stores in `state` the prices of all candidates, and the scheme chosen by price.

        If that scheme is dense, also finds out whether the bucket is hopeless (see the module).
        """
        value_bits = self._compression.given_value_bits
        shape = shape_of(bucket, self._scheme.wire_dtype, value_bits)
        profile = state.profile or prior(shape, density)
        names = candidates(self._config.schemes, value_bits)
        if bucket.grad_N.device.type == "cuda":  # the CPU's waits for the GPU have no price
            names = [name for name in names if not SCHEMES[name].waits_on_cuda]
        cluster = self._clusters.get(bucket.world_size * bucket.lanes, self._cluster)
        # price(profile) is a dict: scheme -> microseconds.
        price = partial(prices_us, shape, cluster=cluster, options=self._scheme, names=names)
        prices = state.predicted_us = price(profile)
        state.hopeless = False
        before, best = state.chosen, least(prices, prices.keys())
        if before in prices:  # there is an earlier scheme, and it is still a candidate
            price_to_beat = (1 - self._pace.hysteresis) * prices[before]
            best = best if prices[best] < price_to_beat else before
        if SCHEMES[best].takes_all:
            best_case = price(fully_overlapping(profile))
            state.hopeless = SCHEMES[least(best_case, best_case.keys())].takes_all
            if state.hopeless:
                state.profile_density = density  # the next sample is taken at half of it
        basis = "sampled" if state.profile else "assumed uniform"
        state.chosen = best
        state.reason = explain(best, prices, f"density {profile.density:.3g} {basis}")
        if best != before and self._logs:
            change = (bucket.name, before or "nothing", best, state.reason)
            logger.info("step %d: bucket %s: %s -> %s, %s", step, *change)

    def _is_sampled(self, state: BucketState, step: int, density: float) -> bool:
        """Whether `step` is a sampled step of the bucket, as the module's docstring defines it."""
        if density >= 1 or not _sparse(state):
            return False  # there is no sparse message, which a sample is taken from
        has_halved = density <= state.profile_density / 2
        if state.hopeless:
            return has_halved  # until then no sample would change the choice
        ramp_start = self._compression.warmup
        target_start = ramp_start + self._compression.ramp
        steps_in_phase = step - (ramp_start if step < target_start else target_start)
        is_early = steps_in_phase < self._pace.profile_iters
        is_due = steps_in_phase % self._pace.profile_every == 0
        return is_early or is_due or has_halved

    def _state_of(self, bucket: Bucket) -> BucketState:
        """The bucket's state; a new one if there is none, or if its size or group has changed."""
        cluster = self._clusters.get(bucket.world_size * bucket.lanes)
        nodes = () if cluster is None else cluster.nodes  # (): priced on the cluster file's nodes
        state = self._states.get(bucket.name)
        if state is None or not state.fits(bucket, nodes):
            if state is not None and self._logs:
                logger.warning(
                    "bucket %s is planned anew: its plan is of another size, operation or group",
                    bucket.name,
                )
            state = self._states[bucket.name] = BucketState.of(bucket, nodes)
        return state

    # What ranks exchange

    def share(
        self, exchange: Exchange, plan: Plan, step: int, message: Message | None
    ) -> Generator[Yielded, None, None]:
        """In a sampled step measures the bucket's profile and may change its scheme; see `Planner`.

        Also decides at the end of the warm-up, so that the first sparse step need not.
        """
        bucket, transport = exchange.bucket, exchange.transport
        if plan.phase is Phase.OFF or bucket.world_size == 1:
            return
        state = self._state_of(bucket)
        if plan.phase is Phase.WARMUP and step + 1 == self._compression.warmup:  # the last one
            # Pricing takes time: on this thread, the progress thread, it delays no launch.
            _, density = phase_and_density(self._compression, step + 1)
            self._decide(bucket, state, step + 1, density)
        if message is not None and self._is_sampled(state, step, plan.density):
            before, seed = state.profile, self._compression.seed
            state.profile = yield from sample_profile(
                bucket, message, transport, exchange.buffers, exchange.timer, seed=seed
            )
            state.profile_density = plan.density
            # No new prices if the profile has hardly changed: the choice would be the same.
            if before is None or not alike(before, state.profile, self._pace.hysteresis):
                self._decide(bucket, state, step, plan.density)

    def replan(self) -> None:
        """See `Planner`. Profiles are of the old density: dropped too."""
        self._states.clear()

    # Reports and checkpoints

    def report(self, bucket: Bucket, step: int) -> dict[str, Any]:
        """The bucket's row of `plan.json`, with its profile and all predicted times."""
        row = super().report(bucket, step)
        plan, state = self.plan_for(bucket, step), self._state_of(bucket)
        if plan.predicted_us is not None:  # None: the schedule chose, as in the warm-up
            settled = _settled(state)  # not the temporary scheme of a sampled step
            row |= {"chosen": settled.scheme, "reason": settled.reason}
        return row | {"predicted_us": state.predicted_us, "profile": state.to_dict()["profile"]}

    def state_dict(self) -> dict[str, Any]:
        """See `Planner`."""
        buckets = {name: state.to_dict() for name, state in self._states.items()}
        return {"basis": self._basis(), "buckets": buckets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned.

        If the settings have changed, profiles are kept and plans are made anew. If a bucket's size
        or group has changed, all its state is made anew when the bucket is next synchronised.

        Raises:
            CheckpointError: the state is damaged.
        """
        if not state:
            return  # saved by the base `Planner`, which has no state
        try:
            self._states = {
                name: BucketState.from_dict(values) for name, values in state["buckets"].items()
            }
            has_same_basis = state["basis"] == self._basis()
        except (TypeError, KeyError, AttributeError, MegatronSparseError) as error:
            raise CheckpointError(
                "the saved plan is damaged",
                expected="what the planner saved",
                got=error,
                remedy="start from another checkpoint",
            ) from error
        if not has_same_basis:
            if self._logs:
                logger.warning("the cluster or settings have changed: all buckets are planned anew")
            for name, old in self._states.items():
                undecided = {"chosen": None, "reason": "", "predicted_us": {}, "hopeless": False}
                self._states[name] = replace(old, **undecided)

    def _basis(self) -> int:
        """A checksum of all settings that the choice depends on, to compare with a checkpoint's."""
        sections = (self._cluster, self._config, self._pace, self._scheme, self._compression)
        parts: list[Any] = [asdict(section) for section in sections]
        # A custom scheme that was registered in the saved run may be missing in this one.
        parts.append(candidates(self._config.schemes, self._compression.given_value_bits))
        return zlib.crc32(json.dumps(parts, sort_keys=True).encode())


def _settled(state: BucketState) -> Choice:
    """The scheme that a decided state has chosen, with its reason and predicted time."""
    scheme = str(state.chosen)
    return Choice(scheme, state.reason, state.predicted_us[scheme])


def _sparse(state: BucketState) -> list[str]:
    """The priced schemes that select elements: only their messages can be sampled."""
    return [name for name in state.predicted_us if not SCHEMES[name].takes_all]
