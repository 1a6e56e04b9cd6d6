"""Formats numbers for tables and reports: milliseconds, shares, bytes."""

from __future__ import annotations


def ms(time_ms: float | None) -> str:
    """Milliseconds with two decimals, from 10 s on with none; `-` for None.

    Example:
        >>> ms(12.345), ms(16250.17)
        ('12.35', '16250')
    """
    if time_ms is None:
        return "-"
    # The bound takes rounding into account, so that ten characters always suffice.
    return f"{time_ms:.2f}" if time_ms < 9999.995 else f"{time_ms:.0f}"


def percent(ratio: float | None) -> str:
    """Two decimals, or as many as a smaller share needs to show two digits; `-` for None.

    Example:
        >>> percent(0.0123), percent(0.0000456)
        ('1.23%', '0.0046%')
    """
    if ratio is None:
        return "-"
    return f"{ratio:.2%}" if ratio == 0 or ratio >= 0.001 else f"{100 * ratio:.2g}%"


def size(count: float) -> str:
    """Bytes in binary units.

    Example:
        >>> size(3 * 2**20)
        '3.00 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
