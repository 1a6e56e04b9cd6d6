"""Checks of options that send values in few bits: they cross the sections of a configuration."""

from __future__ import annotations

from megatron_sparse.config.compression import CompressionConfig
from megatron_sparse.errors import ConfigError

QUANTISED_FORMATS = ("auto", "rice")
"""Formats that `compression.value_bits` goes with; `auto` is then `rice`."""


def check_value_bits(compression: CompressionConfig, form: str, wire_dtype: str | None) -> None:
    """Refuses a format or a dtype that contradicts `compression.value_bits`.

    Args:
        compression: has the bits.
        form: `scheme.format`.
        wire_dtype: `scheme.wire_dtype`.

    Raises:
        ConfigError: names the keys.
    """
    bits = compression.value_bits
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
    if form != "rice" and compression.value_bits is None:
        raise ConfigError(
            f"scheme.sum_bits={sum_bits} needs records with values of few bits",
            expected="scheme.format=rice, or compression.value_bits",
            got=f"scheme.format={form}",
            remedy="set scheme.format=rice, or leave scheme.sum_bits out",
        )
    if compression.residual_dtype != "fp32" or scheme == "hierarchical":
        raise ConfigError(
            f"scheme.sum_bits={sum_bits}: a sum's owner has no fp32 residual for it",
            expected="compression.residual_dtype=fp32, and a scheme without a hierarchy",
            got=f"residual_dtype={compression.residual_dtype}, scheme.name={scheme}",
            remedy="leave scheme.sum_bits out",
        )
