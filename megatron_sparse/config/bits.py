"""Replaces `auto` in `compression.value_bits` and `scheme.sum_bits`, and checks these keys.

Both depend on keys of several sections. Quantised values have 8, 4, 3 or 2 bits (few bits), and
only the message format `rice` holds them; values in full have a floating-point dtype.
"""

from collections.abc import Collection
from dataclasses import replace

from megatron_sparse.config.compression import CompressionConfig
from megatron_sparse.config.scheme import SchemeConfig
from megatron_sparse.errors import ConfigError

QUANTISED_FORMATS = ("auto", "rice")
"""Formats that `compression.value_bits` goes with; `auto` is then `rice`."""
AUTO_VALUE_BITS, AUTO_SUM_BITS = 4, 8
"""What `auto` stands for where messages can be quantised: as in the preset `safe`."""
FULL_VALUE_SCHEMES = ("omnireduce", "zen")
"""Sparse schemes without records of format Rice. The registry has them; a test compares."""
DENSE_SCHEMES = (
    "dense",
    "dense_ring",
    "dense_rhd",
    "dense_allpairs",
    "dense_hierarchical",
    "straggler",
)
"""Schemes that send every element, in full."""


def sends_full_values(scheme: str, candidates: Collection[str] | None) -> bool:
    """Whether the schemes that the user has named need values in full.

    They do if one of them is sparse and cannot quantise, because quantised values would exclude it
    from the planner's choice; or if all of them are in `DENSE_SCHEMES`, which never quantise.

    Args:
        scheme: `scheme.name`.
        candidates: `planner.schemes`, from which `scheme.name=auto` chooses; None names no scheme.

    Example:
        >>> sends_full_values("zen", None), sends_full_values("auto", ["direct", "zen"])
        (True, True)
        >>> sends_full_values("direct", None), sends_full_values("auto", ["direct", "dense"])
        (False, False)
    """
    named = set(candidates or ()) if scheme == "auto" else {scheme}
    one_cannot_quantise = not named.isdisjoint(FULL_VALUE_SCHEMES)
    all_are_dense = len(named) > 0 and named.issubset(DENSE_SCHEMES)
    return one_cannot_quantise or all_are_dense


def resolve_bits(
    compression: CompressionConfig, scheme: SchemeConfig, candidates: Collection[str] | None
) -> tuple[CompressionConfig, SchemeConfig]:
    """Returns both sections with `auto` in `value_bits` and `sum_bits` replaced, and checked.

    `auto` becomes a number of bits where the other keys allow it, and None (in full) elsewhere.
    Mutates neither section. `candidates` is `planner.schemes`, see `sends_full_values`.

    Raises:
        ConfigError: a number of bits that the user has set contradicts other keys.
    """
    if compression.value_bits == "auto":
        # The cases that `CompressionConfig.value_bits` lists for null, and `enabled=false`.
        is_unpruned = not compression.enabled or compression.given_density == 1
        has_other_format = scheme.format not in QUANTISED_FORMATS or scheme.wire_dtype is not None
        in_full = (
            is_unpruned
            or has_other_format
            or compression.lossless_patterns
            or scheme.nccl_engine
            or sends_full_values(scheme.name, candidates)
        )
        compression = replace(compression, value_bits=None if in_full else AUTO_VALUE_BITS)
    _check_value_bits(compression, scheme)
    # After `value_bits`, because `auto` quantises sums only where values are quantised.
    if scheme.sum_bits == "auto":
        values_are_quantised = compression.value_bits is not None
        sums_can_be = values_are_quantised and _residual_keeps_sum_errors(compression, scheme)
        scheme = replace(scheme, sum_bits=AUTO_SUM_BITS if sums_can_be else None)
    _check_sum_bits(compression, scheme)
    return compression, scheme


def _residual_keeps_sum_errors(compression: CompressionConfig, scheme: SchemeConfig) -> bool:
    """Whether the rank that owns a sum adds the sum's rounding error to its fp32 residual."""
    return compression.residual_dtype == "fp32" and scheme.name != "hierarchical"


def _check_value_bits(compression: CompressionConfig, scheme: SchemeConfig) -> None:
    """Refuses quantised values with a message format or a wire dtype that cannot hold them."""
    bits, form = compression.value_bits, scheme.format
    if bits is None:
        return
    if form not in QUANTISED_FORMATS:
        raise ConfigError(
            f"scheme.format={form} has no values of {bits} bits",
            expected="scheme.format=" + " | ".join(QUANTISED_FORMATS),
            got=form,
            remedy="leave scheme.format or compression.value_bits out",
        )
    if scheme.wire_dtype is not None:
        raise ConfigError(
            f"compression.value_bits={bits} and scheme.wire_dtype exclude each other",
            expected="scheme.wire_dtype=null",
            got=scheme.wire_dtype,
            remedy="leave one of the two out",
        )


def _check_sum_bits(compression: CompressionConfig, scheme: SchemeConfig) -> None:
    """Refuses quantised sums without Rice records, or without a residual for their errors."""
    bits = scheme.sum_bits
    if bits is None:
        return
    if scheme.format != "rice" and compression.value_bits is None:
        raise ConfigError(
            f"scheme.sum_bits={bits} needs records with values of few bits",
            expected="scheme.format=rice, or compression.value_bits",
            got=f"scheme.format={scheme.format}",
            remedy="set scheme.format=rice, or scheme.sum_bits=null",
        )
    if not _residual_keeps_sum_errors(compression, scheme):
        raise ConfigError(
            f"scheme.sum_bits={bits}: the owner of a sum has no fp32 residual for its error",
            expected="compression.residual_dtype=fp32, and a scheme without a hierarchy",
            got=f"residual_dtype={compression.residual_dtype}, scheme.name={scheme.name}",
            remedy="leave scheme.sum_bits out",
        )
