"""Checks of single configuration values; each raises a `ConfigError` that names the key.

`number`, `whole` and `choice` make a dataclass field that has a default and a check; a `Checked`
runs the checks of its fields.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import field, fields
from functools import partial
from typing import Any, ClassVar

from megatron_sparse.errors import ConfigError

_CHECK = "check"


class Checked:
    """Base of dataclasses of configuration values, which are checked when an object is made.

    Fields of type `bool` take True and False; `number`, `whole` and `choice` make other fields.

    Raises:
        ConfigError: names the key, such as `scheme.hash_rounds`.
    """

    SECTION: ClassVar[str] = ""
    """Its name in a run's configuration; that of the whole is empty."""

    def __post_init__(self) -> None:
        """Checks every field that declares a check, in the order of the fields."""
        for option in fields(self):  # type: ignore[arg-type] - subclasses are dataclasses
            key = f"{self.SECTION}.{option.name}".removeprefix(".")  # SECTION may be empty
            # The type is a string, because these modules import `annotations` from `__future__`.
            check = is_flag if option.type == "bool" else option.metadata.get(_CHECK)
            if check is not None:
                check(key, getattr(self, option.name))


def number(
    default: Any, low: float, high: float = math.inf, *, besides: tuple = (), **options: bool
) -> Any:
    """A dataclass field with a default, whose values `in_range` checks with these arguments."""
    # A default that is not a number, such as None or `auto`, must pass the check, too.
    allowed = besides if isinstance(default, int | float) else (default, *besides)
    check = partial(in_range, low=low, high=high, besides=allowed, **options)
    return field(default=default, metadata={_CHECK: check})


whole = partial(number, integer=True)
"""A `number` without decimals."""


def choice(default: Any, choices: Sequence[object]) -> Any:
    """A field that takes one of these values."""
    return field(default=default, metadata={_CHECK: partial(one_of, choices=choices)})


def one_of(key: str, value: object, choices: Sequence[object]) -> None:
    """Refuses a value that is not one of `choices`.

    Raises:
        ConfigError: lists the choices.
    """
    if value not in choices:
        raise ConfigError(
            f"{key} is unknown",
            expected=" | ".join(map(_word, choices)),
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
    besides: Sequence[object] = (),
) -> None:
    """Refuses a value that is not a finite number in [low, high], or (low, high] with `low_open`.

    Args:
        key: the key as the user writes it.
        value: the value to check; a bool is not a number.
        low: the smallest allowed value, or the open bound.
        high: the largest allowed value; infinity for none.
        low_open: exclude `low` itself.
        integer: allow whole numbers only.
        besides: values that are allowed, too.

    Raises:
        ConfigError: names the range.
    """
    if value in besides:
        return
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_above = low < value if low_open else low <= value
        is_inside = math.isfinite(value) and is_above and value <= high
        if is_inside and (float(value).is_integer() or not integer):
            return
    bracket = "<" if low_open else "<="
    upper = "" if math.isinf(high) else f" <= {high:g}"
    expected = f"{low:g} {bracket} {key}{upper}" + (", a whole number" if integer else "")
    expected += "".join(f", or {_word(each)}" for each in besides)
    # A user who wrote `5%` or `5 %` meant 0.05.
    percent = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?%", str(value))
    remedy = f"write {float(percent[1]) / 100:g}" if percent else None
    raise ConfigError(f"{key} is out of range", expected=expected, got=repr(value), remedy=remedy)


def _word(value: object) -> str:
    return "null" if value is None else str(value)


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
    """Refuses the value `whole` of one key if it is no multiple of `part`, another key's.

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
