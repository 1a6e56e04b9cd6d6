"""The plan of a bucket, and the planners that take it from the configuration or from a file."""

from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import Any

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives import SCHEMES, Exchange, Input, check_capacity, check_op
from megatron_sparse.collectives.accumulator import partial_dtype
from megatron_sparse.collectives.base import Yielded
from megatron_sparse.compression.schedule import Phase, phase_and_density
from megatron_sparse.compression.selection import MessageSpec
from megatron_sparse.config.compression import dense_value_bits
from megatron_sparse.config.sparse import CompressionConfig, PlannerConfig, SchemeConfig
from megatron_sparse.formats.message import VALUE_DTYPES, Message, wire_dtype_of
from megatron_sparse.planner.fingerprint import fingerprint
from megatron_sparse.planner.prices import DENSE
from megatron_sparse.planner.wire_bytes import predicted_bytes
from megatron_sparse.pricing.cluster import ClusterModel
from megatron_sparse.pricing.shape import BucketShape
from megatron_sparse.transport import ProcessGroupTransport, Transport

WORTHWHILE = 0.7
"""Fraction of the dense bytes; a scheme that would send more is not worth its codec's time."""

BY_SHARD_NUMEL = 2**20
"""Elements of a message on a CPU from which on a shard is sent while the next one is encoded: fewer
are encoded in a few milliseconds."""


@dataclass(frozen=True)
class Plan:
    """How one bucket is synchronised.

    Attributes:
        scheme: name of a collective in `megatron_sparse.collectives`.
        phase: the schedule's phase, or `off`.
        density: target density of the pruned parameters; 1 for dense plans.
        wire_dtype: dtype of the values on the wire, null for the gradient's own.
        sharded: whether the message is cut at shard borders.
        reason: why this scheme was chosen, in words.
        predicted_us: predicted microseconds, if a cost model chose the scheme; else None.
        value_bits: bits of quantised values; None for values in full.
    """

    scheme: str
    phase: Phase
    density: float
    wire_dtype: str | None
    sharded: bool
    reason: str
    predicted_us: float | None = None
    value_bits: int | None = None

    def narrows(self, bucket: Bucket) -> bool:
        """Whether the bucket's values are sent in a narrower dtype than the gradient's."""
        value_dtype = wire_dtype_of(bucket.grad_N.dtype, self.wire_dtype)
        return VALUE_DTYPES[value_dtype] != bucket.grad_N.dtype

    def message_spec(self, bucket: Bucket, options: SchemeConfig) -> MessageSpec:
        """The layout of the message that a sparse plan makes from `bucket`."""
        scheme = SCHEMES[self.scheme]
        # If the message holds every element, quantised values have 4 or 8 bits only.
        bits = dense_value_bits(self.value_bits) if scheme.sends_whole else self.value_bits
        form = scheme.message_format(options)
        if bits is not None and (form == "auto" or scheme.sends_whole):
            # `rice` is the only format with quantised values: `auto` means it, and a message of
            # every element uses it whatever `scheme.format` is.
            form = "rice"
        device = bucket.grad_N.device.type
        capacity = options.capacity_on(device, takes_slots=scheme.takes_slots)
        is_long = bucket.numel * self.density >= BY_SHARD_NUMEL and bucket.world_size > 1
        by_shard = scheme.sends_by_shard and self.sharded and is_long
        return MessageSpec(
            density=self.density,
            wire_dtype=self.wire_dtype,
            format=form,
            block_size=options.block_size,
            sharded=self.sharded,
            extra_cuts=scheme.extra_cuts(bucket),
            capacity=capacity,
            value_bits=bits,
            whole=scheme.sends_whole,
            checksum=options.checksum,
            by_shard=by_shard and device == "cpu" and capacity is None,
        )


@dataclass(frozen=True)
class Choice:
    """The name of a scheme, the reason for it in words, and its predicted time as in `Plan`."""

    scheme: str
    reason: str
    predicted_us: float | None = None


class Planner:
    """Plans by the configuration; `scheme=auto` compares bytes on the wire. The base of planners.

    Makes the same decision on every rank: it never uses data that only one rank has.

    `cluster` is checked against the running one, see `join`; None for none.

    Attributes:
        enabled: switch that may change during the run; False plans dense, which also empties the
            residual.
        is_trial: whether the present setting is tried (`reduction.setting_trials`).
    """

    def __init__(
        self,
        compression: CompressionConfig,
        scheme: SchemeConfig,
        cluster: ClusterModel | None = None,
    ) -> None:
        self._compression = compression
        self._scheme = scheme
        self._cluster = cluster
        self._joined = False  # whether `join` has compared the cluster file with the ranks
        self.enabled = True
        self.is_trial = False

    def plan_for(self, bucket: Bucket, step: int) -> Plan:
        """The plan of `bucket` in `step`: the phase may demand a dense or a quantised one.

        Raises:
            ConfigError: the configured scheme cannot do what the bucket needs.
        """
        check_capacity(self._scheme)
        check_op(self._scheme, PlannerConfig(), bucket.op)  # with no schemes listed, `auto` passes
        phase, density = phase_and_density(self._compression, step)
        value_bits = self._compression.given_value_bits
        if self.is_trial and phase is not Phase.OFF:
            phase = Phase.TRIAL
        prunes_nothing = phase is not Phase.OFF and density == 1
        if not self.enabled:
            phase, choice = Phase.OFF, Choice(DENSE, "compression is switched off")
        elif prunes_nothing and self._quantises_all(bucket):
            content = "warm-up" if phase is Phase.WARMUP else "every element"
            quantised_dense = next(name for name, scheme in SCHEMES.items() if scheme.sends_whole)
            choice = Choice(quantised_dense, f"{content} in {dense_value_bits(value_bits)} bits")
        elif phase in (Phase.WARMUP, Phase.OFF):
            reason = "compression.enabled=false" if phase is Phase.OFF else "dense warm-up"
            choice = Choice(DENSE, reason)
        else:
            choice = self._choose(bucket, step, density)
        scheme = SCHEMES[choice.scheme]
        return Plan(
            scheme=choice.scheme,
            phase=phase,
            density=1.0 if scheme.takes_all else density,
            wire_dtype=None if phase is Phase.OFF else self._scheme.wire_dtype,
            sharded=scheme.is_sharded(bucket.op),
            reason=choice.reason,
            predicted_us=choice.predicted_us,
            value_bits=None if scheme.takes is Input.DENSE else value_bits,
        )

    def _quantises_all(self, bucket: Bucket) -> bool:
        """Whether a step without pruning sends every element quantised, and not in full.

        It does if the later steps of the run quantise values.
        """
        named = SCHEMES.get(self._scheme.name)  # None for `auto`
        # One rank sends nothing; a dense scheme, named by the user, sends values in full.
        if bucket.world_size == 1 or (named is not None and named.takes is Input.DENSE):
            return False
        always_quantises = named is not None and named.sends_whole
        return always_quantises or self._compression.given_value_bits is not None

    def _choose(self, bucket: Bucket, step: int, density: float) -> Choice:
        """The scheme if the phase demands none: as configured; for `auto` that of fewest bytes."""
        name = self._scheme.name
        if name != "auto":
            return Choice(name, f"scheme={name}")
        wire_bytes = predicted_bytes(
            bucket, density, self._scheme, self._compression.given_value_bits
        )
        dense_bytes = wire_bytes.pop(DENSE)
        best = min(wire_bytes, key=lambda scheme: wire_bytes[scheme])
        reason = f"{best} {wire_bytes[best]:.0f} B against dense {dense_bytes:.0f} B"
        # Few bytes saved are not worth the time of encoding; one rank sends nothing.
        if bucket.world_size == 1 or wire_bytes[best] > WORTHWHILE * dense_bytes:
            return Choice(DENSE, reason)
        return Choice(best, reason)

    def join(self, transport: Transport) -> None:
        """Checks that the cluster file fits the running ranks.

        Called with each group of ranks before its first bucket; checks the first group only.

        Raises:
            ConfigError: the cluster file was measured on another cluster.
        """
        if self._joined or self._cluster is None or self._cluster.is_model:
            return
        assert isinstance(transport, ProcessGroupTransport), "virtual ranks have model clusters"
        found = fingerprint(transport)
        if found["hosts"] == "one":  # a group may lie on one node of a cluster of several
            found["hosts"] = self._cluster.fingerprint.get("hosts", "one")
        self._cluster.check_fingerprint(found)
        self._joined = True

    def share(
        self, exchange: Exchange, plan: Plan, step: int, message: Message | None
    ) -> Generator[Yielded, None, None]:
        """Exchanges what a planner needs before the bucket's collective; this one needs nothing.

        The progress thread drives it, on every rank in the order of launches. Changes of the plan
        take effect in the next step.

        `message` is this rank's selection; None for a dense plan.
        """
        yield from ()  # makes this a generator

    def replan(self) -> None:
        """Drops every choice: the target density has changed. Called between two steps."""

    def report(self, bucket: Bucket, step: int) -> dict[str, Any]:
        """The bucket's row of `plan.json`."""
        plan = self.plan_for(bucket, step)
        bits = self._compression.given_value_bits
        # The schedule's density, from which a scheme is chosen; a dense plan's own is 1.
        _, density = phase_and_density(self._compression, step)
        return {
            "bucket": bucket.name,
            **asdict(shape_of(bucket, self._scheme.wire_dtype, bits)),
            "density": density,
            "predicted_us": {},  # this planner predicts bytes, not times
            "chosen": plan.scheme,
            "reason": plan.reason,
        }

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs to plan the same; plain values, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of `state_dict`."""


def shape_of(bucket: Bucket, wire_dtype: str | None, value_bits: int | None = None) -> BucketShape:
    """The `BucketShape` of a bucket: what its costs depend on besides the gradients' sparsity."""
    kept = sum(piece.numel for piece in bucket.parameters if piece.keep)
    value_dtype = VALUE_DTYPES[wire_dtype_of(bucket.grad_N.dtype, wire_dtype)]
    return BucketShape(
        numel=bucket.numel,
        kept_numel=kept,
        element_bytes=value_dtype.itemsize,
        op=bucket.op,
        world_size=bucket.world_size,
        partial_bytes=partial_dtype(bucket, value_dtype).itemsize,
        value_bits=value_bits,
        lanes=bucket.lanes,
    )
