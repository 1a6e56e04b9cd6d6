"""The typed configuration of the plugin, whose sections are the only place where its defaults are.
They are those of the preset `safe`.

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

from megatron_sparse.config.bits import resolve_bits
from megatron_sparse.config.compression import CompressionConfig
from megatron_sparse.config.parameters import ParametersConfig
from megatron_sparse.config.presets import preset_values
from megatron_sparse.config.scheme import SchemeConfig
from megatron_sparse.config.straggler import StragglerConfig
from megatron_sparse.config.tracking import TrackingConfig
from megatron_sparse.errors import ConfigError


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
        """Refuses an empty list of schemes."""
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
        """Checks keys that depend on other sections, and replaces `auto` in such keys."""
        for option in dataclasses.fields(self):
            # The `default_factory` of a section's field is the section's class.
            section, expected = getattr(self, option.name), option.default_factory
            if not isinstance(section, expected):  # type: ignore[arg-type]
                raise ConfigError(
                    f"{option.name} is not a section",
                    expected=f"a {expected.__name__}",  # type: ignore[union-attr]
                    got=repr(section),
                    remedy=f"write {expected.__name__}(...)",  # type: ignore[union-attr]
                )
        if self.scheme.wire_dtype is not None and not self.compression.enabled:
            raise ConfigError(
                "scheme.wire_dtype has no effect where compression is off",
                expected="scheme.wire_dtype=null, or compression.enabled=true",
                got=f"scheme.wire_dtype={self.scheme.wire_dtype}, compression.enabled=false",
                remedy="to round every element and prune none: compression.enabled=true "
                "compression.density=1",
            )
        # Before `_check_auto_density`, which reads the bits.
        self.compression, self.scheme = resolve_bits(
            self.compression, self.scheme, self.planner.schemes
        )
        if self.compression.density == "auto":
            self._check_auto_density()
        if self.compression.lossless_patterns:
            self._turn_capacity_off()
        if self.straggler.mode == "persistent" and self.scheme.deterministic:
            raise ConfigError(
                "straggler.mode=persistent decides from timing",
                expected="scheme.deterministic=false",
                got="scheme.deterministic=true",
                remedy="set scheme.deterministic=false, or name the straggler: "
                "straggler.mode=pinned straggler.rank=RANK",
            )

    def _check_auto_density(self) -> None:
        """Refuses `density=auto` with values or sums in full: most of its presets quantise both."""
        if None in {self.compression.value_bits, self.scheme.given_sum_bits}:
            raise ConfigError(
                "compression.density=auto tries presets, which send values in few bits",
                expected="what sends values and sums in few bits",
                got=f"scheme={self.scheme.name}, scheme.format={self.scheme.format}, "
                f"compression.value_bits={self.compression.value_bits}, "
                f"scheme.sum_bits={self.scheme.sum_bits}",
                remedy="name a density, as compression.density=0.22",
            )

    def _turn_capacity_off(self) -> None:
        """Sets `scheme.capacity` from `auto` to null; refuses a factor that the user has set.

        A message of fixed size might not hold all non-zero elements of a lossless parameter.
        """
        capacity = self.scheme.given_capacity
        if capacity is not None:
            raise ConfigError(
                "compression.lossless_patterns would lose elements beyond a message of fixed size",
                expected="scheme.capacity=null",
                got=f"scheme.capacity={capacity:g}",
                remedy="leave scheme.capacity out, or use compression.keep_patterns instead",
            )
        self.scheme = replace(self.scheme, capacity=None)

    @classmethod
    def given(
        cls, to: str, config: SparseConfig | str | None, overrides: Mapping[str, Any]
    ) -> SparseConfig:
        """Returns the configuration for a call with a whole one, a preset's name, or options.

        Args:
            to: name of the called function, for the error.
            config: the whole configuration; a preset's name; or None, the defaults.
            overrides: single options, see `from_overrides`; they win over a preset or default.

        Raises:
            ConfigError: a whole configuration was given together with options; `config` is of
                another type; there is no such preset; or an option is invalid.
        """
        if isinstance(config, str):
            return cls.preset(config, **overrides)
        if config is None:
            return cls.from_overrides(**overrides)
        if not isinstance(config, cls):
            raise ConfigError(
                f"{to} got a config of another kind",
                expected="a SparseConfig, or a preset's name",
                got=type(config).__name__,
                remedy="give single options as keywords, a dict of them with ** before it",
            )
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
        """Makes a configuration from values of a preset, and options that override them.

        `base` has a preset's values, section -> key -> value, or is empty; it is not mutated.
        `overrides` are options, see `from_overrides`.
        """
        values: dict[str, dict[str, Any]] = {name: dict(keys) for name, keys in base.items()}
        # Sections that are given as objects; the others are made from their keys, below.
        sections = {name: overrides[name] for name in WHOLE_SECTIONS & overrides.keys()}
        for keyword in overrides.keys() - WHOLE_SECTIONS:
            if keyword not in _KEYWORDS:
                raise _no_option(keyword)
            section, key = _KEYWORDS[keyword]
            values.setdefault(section, {})[key] = overrides[keyword]
        for each in dataclasses.fields(cls):
            if sections.get(each.name) is None:  # not given, or given as None
                # The `default_factory` of a section's field is the section's class.
                options = values.get(each.name, {})
                sections[each.name] = each.default_factory(**options)  # type: ignore[misc]
        return cls(**sections)


WHOLE_SECTIONS = frozenset({"tracking", "planner", "straggler", "parameters"})
"""Sections of `SparseConfig` that `from_overrides` takes whole; a preset gives single keys."""
_KEYWORDS = {
    "scheme": ("scheme", "name"),
    **{each.name: ("scheme", each.name) for each in dataclasses.fields(SchemeConfig)[1:]},
    **{each.name: ("compression", each.name) for each in dataclasses.fields(CompressionConfig)},
}
"""The section and the key of each keyword of `from_overrides` that is no section."""


def _no_option(keyword: str) -> ConfigError:
    known = sorted({*_KEYWORDS, *WHOLE_SECTIONS})
    meant = difflib.get_close_matches(keyword, known, 1)  # one name at most
    return ConfigError(
        f"unknown option {keyword!r}",
        expected=f"{meant[0]}?" if meant else ", ".join(known),
        got=keyword,
        remedy="docs/reference/configuration.md says what each option does",
    )
