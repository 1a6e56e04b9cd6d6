"""The plan of a bucket, and the planner that takes it from the configuration."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives import SCHEMES, Input
from megatron_sparse.compression.schedule import Phase, phase_and_density
from megatron_sparse.config import CompressionConfig, SchemeConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.planner.wire_bytes import predicted_bytes

WORTHWHILE = 0.7
"""Of the dense bytes: a scheme that would send more is not worth its codec's time."""


@dataclass(frozen=True)
class Plan:
    """How one bucket is synchronised.

    Attributes:
        scheme: name of a collective in `megatron_sparse.collectives`.
        phase: the schedule's phase, or `off`.
        density: target density of the pruned parameters; 1 for dense plans.
        wire_dtype: dtype of the values on the wire, null for the gradient's own.
        sharded: whether the message is cut at shard borders.
        reason: why, in words.
    """

    scheme: str
    phase: Phase
    density: float
    wire_dtype: str | None
    sharded: bool
    reason: str

    def to_dict(self) -> dict[str, object]:
        """For `plan.json`."""
        return asdict(self)


class Planner(Protocol):
    """Takes the same decision on every rank: it never looks at what only one rank knows."""

    enabled: bool

    def plan_for(self, bucket: Bucket, step: int) -> Plan:
        """The plan of `bucket` in step `step`."""
        ...


class FixedPlanner:
    """Follows the configuration; `scheme=auto` compares bytes on the wire.

    Attributes:
        enabled: the running switch; False plans dense, which also empties the residual.
    """

    def __init__(self, compression: CompressionConfig, scheme: SchemeConfig) -> None:
        self._compression = compression
        self._scheme = scheme
        self.enabled = True

    def plan_for(self, bucket: Bucket, step: int) -> Plan:
        """See `Planner`.

        Raises:
            ConfigError: the configured scheme cannot do what the bucket needs.
        """
        self._check_form(bucket)
        phase, density = phase_and_density(self._compression, step)
        if not self.enabled:
            return self._dense(Phase.OFF, "compression is switched off")
        if phase in (Phase.WARMUP, Phase.OFF):
            return self._dense(phase, f"phase {phase}")
        name = self._scheme.name
        if name in SCHEMES and SCHEMES[name].takes is Input.DENSE:
            return self._dense(phase, f"scheme={name}", name)
        if name == "auto":
            wire_bytes = predicted_bytes(bucket, density, self._scheme)
            dense_bytes = wire_bytes.pop("dense")
            name = min(wire_bytes, key=lambda scheme: wire_bytes[scheme])
            reason = f"{name} {wire_bytes[name]:.0f} B against dense {dense_bytes:.0f} B"
            if bucket.world_size == 1 or wire_bytes[name] > WORTHWHILE * dense_bytes:
                return self._dense(phase, reason)
        else:
            reason = f"scheme={name}"
        return Plan(
            scheme=name,
            phase=phase,
            density=density,
            wire_dtype=self._scheme.wire_dtype,
            sharded=SCHEMES[name].is_sharded(bucket.form),
            reason=reason,
        )

    def _dense(self, phase: Phase, reason: str, name: str = "dense") -> Plan:
        wire_dtype = None if phase is Phase.OFF else self._scheme.wire_dtype
        return Plan(name, phase, 1.0, wire_dtype, sharded=False, reason=reason)

    def _check_form(self, bucket: Bucket) -> None:
        """In the first step already, not only when the warm-up ends."""
        name = self._scheme.name
        if self._scheme.capacity is not None and name != "auto" and not SCHEMES[name].takes_slots:
            raise ConfigError(
                f"scheme.name={name} has no messages of fixed size",
                expected=" | ".join(["auto", *(s.name for s in SCHEMES.values() if s.takes_slots)]),
                got=f"scheme.capacity={self._scheme.capacity}",
                remedy="choose another scheme, or leave scheme.capacity out",
            )
        if name == "auto" or bucket.form in SCHEMES[name].forms:
            return
        able = [scheme.name for scheme in SCHEMES.values() if bucket.form in scheme.forms]
        raise ConfigError(
            f"scheme.name={name} has no {bucket.form} form, which bucket {bucket.name} needs",
            expected=" | ".join(["auto", *able]),
            got=name,
            remedy="choose another scheme, or train without Megatron's distributed optimizer",
        )
