"""The typed configuration of the plugin: with `config.compression`, `config.parameters`,
`config.straggler` and `config.tracking` the only place where its defaults are. They are those of
the preset `safe`.

Every section is a dataclass that checks itself when it is made, so a wrong value is one
`ConfigError` that names the key, wherever it came from (Hydra, a YAML file, Python).
`collectives.check` checks the names of schemes, and what depends on the scheme.
`config.run` adds the keys of a whole training run.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_sparse.config import bits
from megatron_sparse.config.checks import Checked, choice, number, whole
from megatron_sparse.config.compression import VALUE_BITS, CompressionConfig
from megatron_sparse.config.parameters import ParametersConfig
from megatron_sparse.config.presets import preset_values
from megatron_sparse.config.removed import removed
from megatron_sparse.config.straggler import TIMED_STRAGGLER_MODES, StragglerConfig
from megatron_sparse.config.tracking import TrackingConfig
from megatron_sparse.errors import ConfigError

DTYPES = ("fp32", "bf16", "fp16")
MESSAGE_FORMATS = ("auto", "coo", "pici", "rice", "dense")
RING_DENSITIES = {"coo": (0.3, 0.4, 0.5), "pici": (0.4, 0.5, 0.9)}
"""Thresholds of `adaptive_ring` inside nodes, between them, and for its all-gather: SpCCL's choice
for its cluster (sections IV-C and IV-D, there as sparsities)."""
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 64, 4096
"""What the encoder takes."""
AUTO_CAPACITY = 1.25
"""The factor that `scheme.capacity=auto` stands for on CUDA. Thresholds come from samples, so the
number of selected elements is off: with `compression.samples=auto` three standard deviations are
15 %, below a density of 1 % more."""


@dataclass(unsafe_hash=True)
class SchemeConfig(Checked):
    """How the selected gradient is synchronised. Never changed once it is made: it is hashable.

    Attributes:
        name: `auto` (with `planner.cluster` the scheme that is predicted to take the least time;
            else `agsparse` or `direct`, whichever is predicted to send fewer bytes, or `dense`
            where that would save less than 30 %), `dense` (the backend's own collective,
            uncompressed), or another registered scheme; docs/collectives.md says what each costs.
        wire_dtype: dtype in which values travel; null takes the gradient's own. A narrower one is
            rounded stochastically and the rounding error goes to the residual.
        format: of sparse messages: `coo` (4 bytes an entry beside its value), `pici` (a bitmap:
            1/32 of fp32's dense size, whatever the density), `rice` (positions near their entropy:
            about 6.1 bits an entry at density 5 %, 8.3 at 1 %, where `coo` takes 32), `dense`, or
            `auto`: `rice` with `compression.value_bits`, else the smallest of dense, COO and Pici
            in each segment. A sparse record that would not be smaller than a dense one is sent
            dense. `omnireduce` (blocks) and `zen` (index and value, hash bitmaps) have formats of
            their own, and take `auto` only.
        capacity: null exchanges message sizes, for which a GPU's host waits; a factor such as 1.25
            fixes them beforehand: no segment sends more than this many times the target density of
            its elements, and what does not fit stays in the residual. For `agsparse`, `direct`,
            `ssar_split_ag` and `dsar_split_ag`. `auto` is 1.25 on CUDA, for each
            bucket whose scheme is one of these, and null elsewhere: on a CPU, with
            `lossless_patterns`, and without the compiled codec; docs/collectives.md, Capacity mode.
        block_size: `omnireduce`: elements of a block, a power of two from 64 to 4096.
        partition_hash: `zen`: `permutation` (computed, no memory) or `general`, the paper's, which
            keeps 4 bytes for each element of a bucket.
        hash_rounds: `zen`: rehashes k of the paper's Algorithm 1, which cuts a message by partition
            in a hash memory; 0 sorts instead, which is faster on a CPU. The bytes are the same.
        ring_intra_density: `adaptive_ring`: density (nnz / numel) from which a partial sum goes
            dense over a link inside a node. 0 sends all but a rank's own contribution dense, more
            than 1 nothing; null takes SpCCL's value for `format`: 0.3 for `coo`, else 0.4.
        ring_inter_density: the same for links between nodes; SpCCL's: 0.4 for `coo`, else 0.5.
        ring_gather_density: the same for complete sums, whatever link they cross; SpCCL's: 0.5 for
            `coo`, else 0.9.
        inner: `hierarchical`: the sparse scheme that runs across the nodes.
        sum_bits: 8, 4, 3 or 2: where an all-reduce gathers complete sums from their owners
            (`direct`, `ssar_split_ag`, `sparse_ring`), they travel in this many bits, and the
            owner's residual keeps the rest. With `format=rice` or `compression.value_bits`, and an
            fp32 residual. null: in full. `auto` is 8 where `compression.value_bits` is a number and
            the residual allows it, else null. A reduce-scatter gathers no sums.
        timeout_s: seconds after which a collective that has not finished is an error.
        watch_peers: notice ranks that die or stop by a side channel (one TCP connection for each
            rank and group), long before the timeout; docs/collectives.md, Faults.
        nccl_engine: buckets of `direct` and `agsparse` of fixed size are one call of C++ on a
            communicator of NCCL's own, for groups whose host cannot keep up (docs/nccl.md,
            The NCCL engine). On CUDA, with the backend nccl as torch's ProcessGroupNCCL.
        checksum: the checksums of gradients' records cover the payloads too (docs/wire-format.md);
            needs the compiled codec.
        deterministic: freeze every decision that would be taken from timing.
    """

    SECTION = "scheme"

    name: str = "auto"
    wire_dtype: str | None = choice(None, (*DTYPES, None))
    format: str = choice("auto", MESSAGE_FORMATS)
    capacity: str | int | float | None = number("auto", 0, besides=(None,), low_open=True)
    block_size: int = whole(256, MIN_BLOCK_SIZE, MAX_BLOCK_SIZE)
    partition_hash: str = choice("permutation", ("permutation", "general"))
    hash_rounds: int = whole(0, 0, 64)
    ring_intra_density: float | None = number(None, 0)
    ring_inter_density: float | None = number(None, 0)
    ring_gather_density: float | None = number(None, 0)
    inner: str = "direct"
    timeout_s: float = number(300.0, 0, low_open=True)
    watch_peers: bool = True
    nccl_engine: bool = False
    sum_bits: int | str | None = choice("auto", ("auto", *VALUE_BITS, None))
    checksum: bool = False
    deterministic: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if int(self.block_size).bit_count() != 1:
            raise ConfigError(
                "scheme.block_size does not fit",
                expected=f"a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}",
                got=self.block_size,
            )
        if self.checksum and self.nccl_engine:
            raise ConfigError(
                "scheme.checksum does not reach the records of scheme.nccl_engine",
                expected="one of them",
                got="both",
                remedy="set scheme.nccl_engine=false, or scheme.checksum=false",
            )

    @property
    def given_capacity(self) -> float | None:
        """The factor that the user has set; None for `auto` and null."""
        return None if isinstance(self.capacity, str) else self.capacity

    @property
    def given_sum_bits(self) -> int | None:
        """Bits of a gathered sum; None: in full, as `auto` outside a `SparseConfig` is."""
        return None if isinstance(self.sum_bits, str) else self.sum_bits

    def capacity_on(self, device_type: str, *, takes_slots: bool) -> float | None:
        """The factor that fixes a bucket's message size; None: sizes are exchanged.

        Args:
            device_type: `cuda` or `cpu`, where the gradients are.
            takes_slots: of the bucket's scheme.

        Example:
            >>> SchemeConfig().capacity_on("cuda", takes_slots=True)
            1.25
            >>> SchemeConfig(capacity=2).capacity_on("cuda", takes_slots=False)
        """
        if not takes_slots:
            return None
        if self.capacity == "auto":
            return AUTO_CAPACITY if device_type == "cuda" else None
        return self.given_capacity

    def ring_densities(self) -> tuple[float, float, float]:
        """The thresholds of `adaptive_ring`: intra, inter, gather; SpCCL's where none is given."""
        given = (self.ring_intra_density, self.ring_inter_density, self.ring_gather_density)
        found = RING_DENSITIES.get(self.format, RING_DENSITIES["pici"])
        intra, inter, gather = (
            default if density is None else density
            for density, default in zip(given, found, strict=True)
        )
        return intra, inter, gather


@dataclass
class PlannerConfig:
    """How `scheme.name=auto` chooses for each bucket. See docs/planner.md.

    Attributes:
        cluster: the costs of links and codecs: a file that `megatron-sparse calibrate` wrote, or
            the name of a shipped cluster model. `train cluster=NAME` sets it to the costs of that
            cluster where they are known. null compares bytes instead of times; `schemes` then has
            no effect.
        schemes: names of candidate schemes; `dense` is always a candidate. null takes all, but
            `dense_q`, which rounds, only with `compression.value_bits`.
    """

    cluster: str | None = None
    schemes: list[str] | None = None

    def __post_init__(self) -> None:
        if self.schemes is not None and not self.schemes:
            raise ConfigError(
                "planner.schemes is empty",
                expected="names of schemes, or null for all of them",
                got="[]",
            )


@dataclass
class SparseConfig:
    """The plugin's configuration, which `install`, `attach` and `ddp_hook` take.

    The defaults are those of the preset `safe`. `auto` in `compression.value_bits` and
    `scheme.sum_bits` is replaced here by a number or null.
    """

    compression: CompressionConfig = field(default_factory=CompressionConfig)
    scheme: SchemeConfig = field(default_factory=SchemeConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    parameters: ParametersConfig = field(default_factory=ParametersConfig)

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            section, made = getattr(self, each.name), each.default_factory
            if not isinstance(section, made):  # type: ignore[arg-type]
                raise ConfigError(
                    f"{each.name} is not a section",
                    expected=f"a {made.__name__}",  # type: ignore[union-attr]
                    got=repr(section),
                    remedy=f"write {made.__name__}(...)",  # type: ignore[union-attr]
                )
        priced = self.scheme.name == "auto" and self.planner.cluster is not None
        if self.compression.threshold_scope == "tp_group" and priced:
            raise ConfigError(
                "compression.threshold_scope=tp_group needs the same plan on the whole group",
                expected="a scheme by name, or planner.cluster=null",
                got=f"planner.cluster={self.planner.cluster}, with which each data-parallel group "
                "makes its own plan",
                remedy="name a scheme, or set planner.cluster=null, or "
                "compression.threshold_scope=bucket",
            )
        if self.scheme.wire_dtype is not None and not self.compression.enabled:
            raise ConfigError(
                "scheme.wire_dtype has no effect where compression is off",
                expected="scheme.wire_dtype=null, or compression.enabled=true",
                got=f"scheme.wire_dtype={self.scheme.wire_dtype}, compression.enabled=false",
                remedy="to round every element and prune none: compression.enabled=true "
                "compression.density=1",
            )
        self._resolve_bits()
        scheme = self.scheme
        bits.check_value_bits(self.compression, scheme.format, scheme.wire_dtype)
        bits.check_sum_bits(self.compression, scheme.name, scheme.format, scheme.given_sum_bits)
        if self.compression.density == "auto":
            self._check_auto_density()
        if self.compression.lossless_patterns:
            self._turn_capacity_off()
        if self.straggler.mode in TIMED_STRAGGLER_MODES and self.scheme.deterministic:
            raise ConfigError(
                f"straggler.mode={self.straggler.mode} decides from timing",
                expected="scheme.deterministic=false",
                got="scheme.deterministic=true",
                remedy="set scheme.deterministic=false, or name the straggler: "
                "straggler.mode=pinned straggler.rank=RANK",
            )

    def _check_auto_density(self) -> None:
        """Refuses `density=auto` where presets cannot be tried."""
        if self.scheme.given_sum_bits is None:
            raise ConfigError(
                "compression.density=auto tries presets, which send values in few bits",
                expected="what sends values and sums in few bits",
                got=f"scheme={self.scheme.name}, scheme.format={self.scheme.format}, "
                f"compression.value_bits={self.compression.value_bits}, "
                f"scheme.sum_bits={self.scheme.sum_bits}",
                remedy="name a density, as compression.density=0.22",
            )

    def _turn_capacity_off(self) -> None:
        """Lossless parameters need messages as large as what is not zero; refuses a capacity."""
        capacity = self.scheme.given_capacity
        if capacity is not None:
            raise ConfigError(
                "compression.lossless_patterns would lose elements beyond a message of fixed size",
                expected="scheme.capacity=null",
                got=f"scheme.capacity={capacity:g}",
                remedy="leave scheme.capacity out, or use compression.keep_patterns instead",
            )
        self.scheme = replace(self.scheme, capacity=None)

    def _resolve_bits(self) -> None:
        """Replaces `auto` of `compression.value_bits` and `scheme.sum_bits`.

        It stands for few bits where the other keys allow them, and for null (in full) elsewhere.
        """
        scheme, given = self.scheme, self.compression
        if given.value_bits == "auto":
            full = bits.sends_full_values(scheme.name, self.planner.schemes) or scheme.nccl_engine
            # Unpruned elements travel as they are, unless the user asks for few bits.
            unpruned = not given.enabled or given.given_density == 1
            few = not (full or unpruned) and bits.is_allowed(
                lambda: bits.check_value_bits(
                    # `replace` checks the section again, with these bits.
                    replace(given, value_bits=bits.AUTO_VALUE_BITS),
                    scheme.format,
                    scheme.wire_dtype,
                )
            )
            self.compression = replace(given, value_bits=bits.AUTO_VALUE_BITS if few else None)
        if scheme.sum_bits == "auto":
            decided = self.compression  # its `auto` was replaced above
            few = decided.given_value_bits is not None and bits.is_allowed(
                lambda: bits.check_sum_bits(
                    decided, scheme.name, scheme.format, sum_bits=bits.AUTO_SUM_BITS
                )
            )
            self.scheme = replace(scheme, sum_bits=bits.AUTO_SUM_BITS if few else None)

    @classmethod
    def given(
        cls, to: str, config: SparseConfig | str | None, overrides: Mapping[str, Any]
    ) -> SparseConfig:
        """The configuration of a call that takes a whole one, or a preset's name, or neither.

        Args:
            to: name of the called function, for the error.
            config: the whole configuration, or a preset's name.
            overrides: single options, see `from_overrides`; they win over a preset's.

        Raises:
            ConfigError: a whole configuration and options were given, there is no such preset, or
                an option is invalid.
        """
        if isinstance(config, str):
            return cls.preset(config, **overrides)
        if config is None:
            return cls.from_overrides(**overrides)
        if overrides:
            raise ConfigError(
                f"{to} got both a config and single options",
                expected="one of them",
                got=", ".join(overrides),
                remedy="put the options into the SparseConfig",
            )
        return config

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> SparseConfig:
        """The configuration of a preset, docs/choosing-density.md.

        Args:
            name: `auto`, `lossless`, `quantised`, `safe`, `balanced` or `extreme`.
            **overrides: options that win over the preset's, see `from_overrides`.

        Raises:
            ConfigError: there is no such preset, or an option is invalid.

        Example:
            >>> config = SparseConfig.preset("extreme", density=0.02)
            >>> config.compression.density, config.compression.value_bits
            (0.02, 3)
        """
        return cls._made(preset_values(name), overrides)

    @classmethod
    def from_overrides(cls, **overrides: Any) -> SparseConfig:
        """Makes a configuration from flat keywords, e.g. `density=0.01, scheme="agsparse"`.

        A keyword names a field of `CompressionConfig` or `SchemeConfig`; `scheme` is short for
        `SchemeConfig.name`; `tracking`, `planner`, `straggler` and `parameters` take their
        sections, such as a `TrackingConfig`.

        Raises:
            ConfigError: a keyword names no field, or a value is invalid.
        """
        return cls._made({}, overrides)

    @classmethod
    def _made(
        cls, base: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, Any]
    ) -> SparseConfig:
        """Of the values of sections, and keywords that win over them."""
        compression = {f.name for f in dataclasses.fields(CompressionConfig)}
        scheme = {f.name for f in dataclasses.fields(SchemeConfig)} - {"name"}
        parts = {name: dict(base.get(name, {})) for name in ("compression", "scheme")}
        sections = {
            name: overrides.get(name) or made(**base.get(name, {}))
            for name, made in SECTIONS.items()
        }
        for key in overrides.keys() - SECTIONS.keys():
            if key == "scheme":
                parts["scheme"]["name"] = overrides[key]
            elif key in compression:
                parts["compression"][key] = overrides[key]
            elif key in scheme:
                parts["scheme"][key] = overrides[key]
            elif gone := _removed_option(key):
                raise gone
            else:
                known = sorted(compression | scheme | {"scheme", *SECTIONS})
                meant = difflib.get_close_matches(key, known, 1)
                raise ConfigError(
                    f"unknown option {key!r}",
                    expected=f"{meant[0]}?" if meant else ", ".join(known),
                    got=key,
                    remedy="see megatron_sparse/config/sparse.py for what each option does",
                )
        return cls(
            CompressionConfig(**parts["compression"]), SchemeConfig(**parts["scheme"]), **sections
        )


def _removed_option(keyword: str) -> ConfigError | None:
    """The error for a flat keyword whose key has left."""
    found = (removed(f"{section}.{keyword}") for section in ("compression", "scheme"))
    return next((error for error in found if error is not None), None)


SECTIONS: Mapping[str, Any] = {
    "tracking": TrackingConfig,
    "planner": PlannerConfig,
    "straggler": StragglerConfig,
    "parameters": ParametersConfig,
}
"""Sections of `SparseConfig` that `from_overrides` takes whole; a preset gives single keys."""
