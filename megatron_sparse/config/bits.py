"""Checks of options that send values in few bits: they cross the sections of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection

from megatron_sparse.config.compression import CompressionConfig
from megatron_sparse.errors import ConfigError

QUANTISED_FORMATS = ("auto", "rice")
"""Formats that `compression.value_bits` goes with; `auto` is then `rice`."""
AUTO_VALUE_BITS, AUTO_SUM_BITS = 4, 8
"""What `auto` stands for where messages take values in few bits: as in the preset `safe`."""
FULL_VALUE_SCHEMES = ("omnireduce", "zen")
"""Sparse schemes without records of format Rice. The registry has them; a test compares."""
DENSE_SCHEMES = (
    "dense",
    "dense_ring",
    "dense_rhd",
    "dense_allpairs",
    "dense_broadcast",
    "dense_hierarchical",
    "straggler",
)
"""Schemes that send the gradient as it is."""


def sends_full_values(scheme: str, candidates: Collection[str] | None) -> bool:
    """Whether a scheme, or what `auto` may take, sends its values in full.

    Args:
        scheme: `scheme.name`.
        candidates: `planner.schemes`. One without values in few bits suffices: with them the
            planner could not take it. None: there are enough others.

    Example:
        >>> sends_full_values("zen", None), sends_full_values("auto", ["direct", "zen"])
        (True, True)
        >>> sends_full_values("direct", None), sends_full_values("auto", ["direct", "dense"])
        (False, False)
    """
    named = set(candidates or ()) if scheme == "auto" else {scheme}
    has_full = not named.isdisjoint(FULL_VALUE_SCHEMES)
    return has_full or (len(named) > 0 and named.issubset(DENSE_SCHEMES))


def is_allowed(checked: Callable[[], object]) -> bool:
    """Whether a check, or the making of a section, raises no `ConfigError`."""
    try:
        checked()
    except ConfigError:
        return False
    return True


def check_value_bits(compression: CompressionConfig, form: str, wire_dtype: str | None) -> None:
    """Refuses a format or a dtype that contradicts `compression.value_bits`.

    Args:
        compression: has the bits.
        form: `scheme.format`.
        wire_dtype: `scheme.wire_dtype`.

    Raises:
        ConfigError: names the keys.
    """
    bits = compression.given_value_bits
    if bits is None:
        return
    if form not in QUANTISED_FORMATS:
        raise ConfigError(
            f"scheme.format={form} has no values of {bits} bits",
            expected="scheme.format=" + " | ".join(QUANTISED_FORMATS),
            got=form,
            remedy="leave scheme.format or compression.value_bits out",
        )
    if wire_dtype is not None:
        raise ConfigError(
            f"compression.value_bits={bits} and scheme.wire_dtype exclude each other",
            expected="scheme.wire_dtype=null",
            got=wire_dtype,
            remedy="leave one of the two out",
        )


def check_sum_bits(
    compression: CompressionConfig, scheme: str, form: str, sum_bits: int | None
) -> None:
    """Refuses sums in few bits where nothing could keep the rest.

    Args:
        compression: has the bits of values, and the residual's dtype.
        scheme: `scheme.name`.
        form: `scheme.format`.
        sum_bits: `scheme.sum_bits`.

    Raises:
        ConfigError: names the keys.
    """
    if sum_bits is None:
        return
    if form != "rice" and compression.given_value_bits is None:
        raise ConfigError(
            f"scheme.sum_bits={sum_bits} needs records with values of few bits",
            expected="scheme.format=rice, or compression.value_bits",
            got=f"scheme.format={form}",
            remedy="set scheme.format=rice, or scheme.sum_bits=null",
        )
    if compression.residual_dtype != "fp32" or scheme == "hierarchical":
        raise ConfigError(
            f"scheme.sum_bits={sum_bits}: a sum's owner has no fp32 residual for it",
            expected="compression.residual_dtype=fp32, and a scheme without a hierarchy",
            got=f"residual_dtype={compression.residual_dtype}, scheme.name={scheme}",
            remedy="leave scheme.sum_bits out",
        )
