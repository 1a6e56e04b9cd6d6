"""Checks of single configuration values; each raises a `ConfigError` that names the key."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from megatron_sparse.config.removed import removed
from megatron_sparse.errors import ConfigError


def one_of(key: str, value: object, choices: Sequence[object]) -> None:
    """Refuses a value that is not one of `choices`.

    Raises:
        ConfigError: lists the choices, or says that the value has left.
    """
    if value not in choices:
        if gone := removed(key, value):
            raise gone
        raise ConfigError(
            f"{key} is unknown",
            expected=" | ".join("null" if each is None else str(each) for each in choices),
            got=repr(value),
            remedy=f"set {key} to one of these",
        )


def in_range(
    key: str,
    value: object,
    low: float,
    high: float = math.inf,
    *,
    low_open: bool = False,
    integer: bool = False,
    or_null: bool = False,
) -> None:
    """Refuses a value that is not a finite number in [low, high], or (low, high] with `low_open`.

    Args:
        key: the key as the user writes it.
        value: the value to check; a bool is not a number.
        low: the smallest allowed value, or the open bound.
        high: the largest allowed value; infinity for none.
        low_open: exclude `low` itself.
        integer: allow whole numbers only.
        or_null: allow None.

    Raises:
        ConfigError: names the range.
    """
    if value is None and or_null:
        return
    bracket = "<" if low_open else "<="
    upper = "" if math.isinf(high) else f" <= {high:g}"
    expected = f"{low:g} {bracket} {key}{upper}" + (", a whole number" if integer else "")
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or not (low < value if low_open else low <= value)
        or not value <= high
        or (integer and not float(value).is_integer())
    ):
        percent = re.fullmatch(r"([\d.]+) ?%", value) if isinstance(value, str) else None
        remedy = f"write {float(percent[1]) / 100:g}" if percent else None
        raise ConfigError(
            f"{key} is out of range", expected=expected, got=repr(value), remedy=remedy
        )


def is_flag(key: str, value: object) -> None:
    """Refuses a value that is neither True nor False.

    Raises:
        ConfigError: on anything else, such as the text "false", which would count as true.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is not a flag", expected="true | false", got=repr(value))


def are_patterns(key: str, values: Sequence[str]) -> None:
    """Refuses a value that is not a list of regular expressions.

    A bare string would be read as a list of its characters.

    Raises:
        ConfigError: names the value that is wrong, and the place of the mistake.
    """
    if isinstance(values, str):
        raise ConfigError(f"{key} is not a list", expected=f"[{values}]", got=values)
    for value in values:
        try:
            re.compile(value)
        except re.error as error:
            raise ConfigError(
                f"{key} is not a regular expression",
                expected="a pattern of Python's re module",
                got=f"{value!r}: {error}",
            ) from None


def divides(part_key: str, part: int, whole_key: str, whole: int) -> None:
    """Refuses a whole that `part` does not divide.

    Raises:
        ConfigError: names both keys.
    """
    if whole % part:
        raise ConfigError(
            f"{part_key} does not divide {whole_key}",
            expected=f"{whole_key} as a multiple of {part}",
            got=whole,
            remedy="change one of the two",
        )
