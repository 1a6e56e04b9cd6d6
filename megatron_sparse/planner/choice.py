"""The choice: for each bucket the scheme that a cost model predicts to take the least time.

All candidates are priced (`prices.predict_all`) from the bucket's shape, its sparsity profile and
the cluster's model; the cheapest is chosen, dense included. At `compression.level` node or instance
the bucket is a part: its ranks are those of a lane, which has a share of the links. ZEN (section
2.4) compares two equations in this way. Here every scheme of the registry is compared for each
bucket, with the costs of codecs and host.

Until a profile is measured, the planner assumes independent uniform positions. Ranks sample a
profile (`sampling`) in the first steps of ramp and target, whenever the target density has fallen
by half since, and every `Pace.profile_every` steps. Sampling needs a message, so a dense bucket
uses the best sparse candidate in such a step. Where no sparse candidate would be cheaper than dense
even at full overlap, it does so only when the target density has fallen by half. A bucket changes
its scheme only for a gain of more than `Pace.hysteresis`.

All ranks decide alike. They use only the configuration and exchanged numbers, which are the same
bits on every rank, in the same order; nothing is decided from timing (`reduction.setting_trials`
does that). Cost: the sampler's exchange in a profile step, before the collective, on the progress
thread. Changes take effect in the next step.
"""

from __future__ import annotations

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
        self._logs = logs
        self._states: dict[str, BucketState] = {}
        # The cluster with a group's own nodes, by its ranks.
        self._clusters: dict[int, ClusterModel] = {}

    def join(self, transport: Transport) -> None:
        """See `Planner`. The group is priced on its own nodes; the file's may have more ranks."""
        super().join(transport)
        nodes = tuple(map(len, members_of(transport.nodes)))
        cluster = self._cluster
        if len(nodes) == 1 < len(cluster.nodes):
            if cluster.is_model:
                return  # this machine may stand for the model's nodes
            cluster = replace(cluster, dense=cluster.intra)  # it was measured across nodes
        self._clusters[transport.world_size] = replace(cluster, nodes=nodes)

    # The choice

    def _choose(self, bucket: Bucket, step: int, density: float) -> Choice:
        """The settled scheme, decided first if there is none; a sampling step may take another."""
        if bucket.world_size == 1:
            return Choice(DENSE, "one rank")
        state = self._state_of(bucket)
        if state.chosen is None:
            self._decide(bucket, state, step, density)
        settled = _settled(state)
        # A sample needs the message of a sparse scheme.
        if SCHEMES[settled.scheme].takes_all and self._is_sampled(state, step, density):
            scheme = least(state.predicted_us, _sparse(state))
            reason = f"to sample the sparsity; else {settled.scheme}: {settled.reason}"
            return Choice(scheme, reason, state.predicted_us[scheme])
        return settled

    def _decide(self, bucket: Bucket, state: BucketState, step: int, density: float) -> None:
        """Prices all candidates into `state`, and keeps or changes its scheme.

        Where the choice is dense, also finds out whether a sample could change that.
        """
        value_bits = self._compression.given_value_bits
        shape = shape_of(bucket, self._scheme.wire_dtype, value_bits)
        profile = state.profile or prior(shape, density)
        names = candidates(self._config.schemes, value_bits)
        if bucket.grad_N.device.type == "cuda":  # no price includes the host's waits
            names = [name for name in names if not SCHEMES[name].waits_on_cuda]
        # From a profile: microseconds by scheme.
        cluster = self._clusters.get(bucket.world_size * bucket.lanes, self._cluster)
        price = partial(prices_us, shape, cluster=cluster, options=self._scheme, names=names)
        prices = state.predicted_us = price(profile)
        state.hopeless = False
        before, best = state.chosen, least(prices, prices.keys())
        if before in prices:
            price_to_beat = (1 - self._pace.hysteresis) * prices[before]
            best = best if prices[best] < price_to_beat else before
        if SCHEMES[best].takes_all:
            best_case = price(fully_overlapping(profile))
            state.hopeless = SCHEMES[least(best_case, best_case.keys())].takes_all
            if state.hopeless:
                state.profile_density = density
        basis = "sampled" if state.profile else "assumed uniform"
        state.chosen = best
        state.reason = explain(best, prices, f"density {profile.density:.3g} {basis}")
        if best != before and self._logs:
            change = (bucket.name, before or "nothing", best, state.reason)
            logger.info("step %d: bucket %s: %s -> %s, %s", step, *change)

    def _is_sampled(self, state: BucketState, step: int, density: float) -> bool:
        """Whether the bucket's sparsity is sampled in this step; the module says when."""
        if density >= 1 or not _sparse(state):
            return False  # no message could be sampled
        has_halved = density <= state.profile_density / 2
        if state.hopeless:
            return has_halved  # at this density no sample would change the choice
        ramp_start = self._compression.warmup
        target_start = ramp_start + self._compression.ramp
        steps_in_phase = step - (ramp_start if step < target_start else target_start)
        is_early = steps_in_phase < self._pace.profile_iters
        is_due = steps_in_phase % self._pace.profile_every == 0
        return is_early or is_due or has_halved

    def _state_of(self, bucket: Bucket) -> BucketState:
        """The bucket's state; a new one if it has none, or one of another size or group."""
        cluster = self._clusters.get(bucket.world_size * bucket.lanes)
        nodes = () if cluster is None else cluster.nodes
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
        """Samples the bucket's sparsity if it is due, and may decide anew; see `Planner`."""
        bucket, transport = exchange.bucket, exchange.transport
        if plan.phase is Phase.OFF or bucket.world_size == 1:
            return
        state = self._state_of(bucket)
        is_warmup_end = plan.phase is Phase.WARMUP and step + 1 == self._compression.warmup
        if is_warmup_end:
            # Pricing takes time, so it is done here and not at the launch of the next step.
            _, density = phase_and_density(self._compression, step + 1)
            self._decide(bucket, state, step + 1, density)
        if message is not None and self._is_sampled(state, step, plan.density):
            before, seed = state.profile, self._compression.seed
            state.profile = yield from sample_profile(
                bucket, message, transport, exchange.buffers, exchange.timer, seed=seed
            )
            state.profile_density = plan.density
            # A profile that has hardly changed gives the same choice, and pricing takes time.
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
        if plan.predicted_us is not None:  # else prices did not choose: every element in few bits
            settled = _settled(state)  # ignores the temporary scheme of a sampling step
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
            return  # the state is of a run with another planner
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
            for name, kept in self._states.items():
                undecided = {"chosen": None, "reason": "", "predicted_us": {}, "hopeless": False}
                self._states[name] = replace(kept, **undecided)

    def _basis(self) -> int:
        """A checksum of everything that the choice depends on."""
        sections = (self._cluster, self._config, self._pace, self._scheme, self._compression)
        parts: list[Any] = [asdict(section) for section in sections]
        # A scheme of the user's own may not be registered in every process.
        parts.append(candidates(self._config.schemes, self._compression.given_value_bits))
        return zlib.crc32(json.dumps(parts, sort_keys=True).encode())


def _settled(state: BucketState) -> Choice:
    """The scheme that a decided state has chosen, with its reason and predicted time."""
    scheme = str(state.chosen)
    return Choice(scheme, state.reason, state.predicted_us[scheme])


def _sparse(state: BucketState) -> list[str]:
    """The priced schemes that select elements: only their messages can be sampled."""
    return [name for name in state.predicted_us if not SCHEMES[name].takes_all]
