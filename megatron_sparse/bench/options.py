"""Options of benches, declared once, as fields of a dataclass (`Options`).

A field made by `option` carries its flag, its help, its parser and its checks. `add_command` makes
the Typer options of all dataclasses that a function takes; `Options.arguments` writes them as a
command line again, for the ranks that a bench starts. Imports nothing heavy: `--help` reads this
file.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import partial
from inspect import Signature
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self, get_type_hints

from megatron_sparse.errors import ConfigError

if TYPE_CHECKING:
    import typer

DTYPE_NAMES = ("fp32", "bf16", "fp16")
SIZE_FACTOR = 4
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_KEY = "option"

type Check = tuple[str, object, bool, str]
"""An argument's name, its value, whether the value fits, and a text that says what would fit."""
type Fits = Callable[[Any], str]
"""Tests one value: returns an empty text if the value fits, else what would fit."""
type Names = Iterable[object] | Callable[[], Iterable[object]]
"""The values that are allowed, or a function that is called for them when a value is tested."""


def check_arguments(bench: str, checks: Iterable[Check]) -> None:
    """Raises an error for the first of the checks whose argument does not fit.

    Raises:
        ConfigError: names the bench and the argument.
    """
    for name, value, fits, expected in checks:
        if not fits:
            raise ConfigError(f"{bench}: {name} is out of range", expected=expected, got=value)


def _among(names: Names) -> Fits:
    """Makes a test, whose result is empty if a value's text is one of the names, else all names."""

    def fits(value: Any) -> str:
        allowed = [str(name) for name in (names() if callable(names) else names)]
        return "" if str(value) in allowed else " | ".join(allowed)

    return fits


def at_least(low: float) -> Fits:
    """Not below a bound."""
    return lambda value: "" if value >= low else f"{low} or more"


def above_zero(value: Any) -> str:
    """Positive."""
    return "" if value > 0 else "above 0"


def some_seconds(value: Any) -> str:
    """Positive, and no longer than a year: `timedelta` takes no infinity."""
    return "" if 0 < value <= 365 * 24 * 3600 else "above 0, at most a year"


def fraction(value: Any) -> str:
    """In (0, 1]."""
    return "" if 0 < value <= 1 else "in (0, 1]"


def parse_size(option: str, text: str) -> int:
    """Parses a number of bytes such as `64K`, `1M`, `1G` or `4096`; units are powers of two.

    Raises:
        ConfigError: the text is no such number; names the option.
    """
    found = re.fullmatch(r"(\d+)([KMG]?)B?", text.upper())
    if found is None or not int(found[1]):
        raise ConfigError(
            f"{option} is not a size", expected="a number, or one with K, M or G", got=repr(text)
        )
    return int(found[1]) * _UNITS[found[2]]


def parse_list[Value](
    option: str, text: str, convert: Callable[[str], Value], expected: str
) -> tuple[Value, ...]:
    """Parses values separated by commas.

    `convert` parses one value, and raises ValueError where it cannot. `expected` says what the
    values should be; it and `option` are for the error.

    Raises:
        ConfigError: a value cannot be parsed.
    """
    try:
        return tuple(convert(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{option} is not a list of {expected}", expected=expected, got=repr(text)
        ) from None


parse_names = partial(parse_list, convert=str, expected="names")
parse_numbers = partial(
    parse_list, convert=float, expected="numbers with commas between, such as 0.001,0.01"
)
"""Fractions, learning rates."""


def parse_counts(option: str, text: str, low: int = 1) -> tuple[int, ...]:
    """Parses whole numbers from `low` on, separated by commas.

    Raises:
        ConfigError: one of them is no such number.
    """

    def count(part: str) -> int:
        if not part.isdecimal() or int(part) < low:
            raise ValueError
        return int(part)

    return parse_list(
        option, text, count, f"numbers from {low} on with commas between, such as 2,4,8"
    )


_METAVARS: dict[object, str] = {
    parse_size: "SIZE",
    parse_numbers: "X,...",
    parse_counts: "N,...",
    parse_names: "NAME,...",
}


class _Declared(NamedTuple):
    """What `option` stores in a field: its arguments, with `among` and `min` as tests in `fits`."""

    flag: str
    default: Any
    parse: Callable[[str, str], Any] | None
    fits: Sequence[Fits]
    settings: dict[str, Any]


def option(
    default: Any,
    help: str = "",
    parse: Callable[[str, str], Any] | None = None,
    *,
    flag: str = "",
    among: Names | None = None,
    fits: Fits | None = None,
    **typer_settings: Any,
) -> Any:
    """Makes a field of an `Options` dataclass that is an option of the command line.

    Args:
        default: the value where the flag is not given; where there is `parse`, a text for it.
        help: one line; if it is empty, the values `among`.
        parse: gets the flag and a text, returns the value; None: Typer parses by the field's type.
        flag: such as `--dtype`; if it is empty, it follows from the field's name.
        among: the allowed values, or a function that returns them; the value None is allowed too.
        fits: another test of the value; of a list, each value is tested.
        typer_settings: more arguments of `typer.Option`; `min` is tested too.
    """
    if among is not None and not callable(among):
        help = help or " | ".join(map(str, among))
    settings = {"help": help, "metavar": _METAVARS.get(parse), **typer_settings}
    tests = [] if fits is None else [fits]
    if among is not None:
        tests.append(_among(among))
    if (low := typer_settings.get("min")) is not None:
        tests.append(at_least(low))
    metadata = {_KEY: _Declared(flag, default, parse, tests, settings)}
    if parse is None or default is None:
        return field(default=default, metadata=metadata)
    # Parsed only when it is needed: some parsers import a registry for its names.
    return field(default_factory=lambda: parse(flag, default), metadata=metadata)


def names_option(usual: str | None, help: str = "", flag: str = "", **more: Any) -> Any:
    """An option of names with commas between."""
    return option(usual, help, parse_names, flag=flag, **more)


def density_option(usual: str, help: str) -> Any:
    """The option `--density`, of fractions with commas between."""
    return option(usual, help, parse_numbers, flag="--density", metavar="D,...", fits=fraction)


class Options:
    """A dataclass whose fields are options of the command line.

    Raises:
        ConfigError: a value does not fit, whether a command line or a program gave it.
    """

    NAME: ClassVar[str] = ""
    """The command's, such as `bench codecs`."""
    RUNNER: ClassVar[str] = ""
    """Of a bench: the module of this package whose `run` it calls. The first line of the class's
    docstring is the command's help."""

    def __post_init__(self) -> None:
        check_arguments(self.NAME, [*self._declared_checks(), *self.checks()])

    def _declared_checks(self) -> Iterator[Check]:
        """Yields a check for each test of each value. An option that is None has no checks."""
        for option_field, flag, declared in _options(type(self)):
            name = flag.partition("/")[0]  # --peers of --peers/--no-peers
            values = _values(getattr(self, option_field.name))
            known = [value for value in values if value is not None]
            for test, value in product(declared.fits, known):
                expected = test(value)  # empty if the value fits
                yield name, value, not expected, expected

    def checks(self) -> list[Check]:
        """Further checks, such as of two options together; subclasses override it."""
        return []

    @classmethod
    def parameters(cls) -> Iterator[inspect.Parameter]:
        """Yields a function parameter for each option; from its annotation Typer makes the flag."""
        # Imported here, so that a machine without Typer can run a sweep, as GPU tests do.
        import typer

        types = get_type_hints(cls)
        for option_field, flag, declared in _options(cls):
            default, parse, settings = declared.default, declared.parse, declared.settings
            kind = types[option_field.name]
            if parse is not None:  # Typer passes on the text, which `of` parses
                kind = str | None if default is None else str
            kind = Annotated[kind, typer.Option(flag, **settings)]
            yield inspect.Parameter(
                option_field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
            )

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        """Makes the options from Typer's arguments by name; removes those it uses from `given`.

        Raises:
            ConfigError: a value cannot be parsed, or does not fit.
        """
        values = {}
        for option_field, flag, declared in _options(cls):
            value, parse = given.pop(option_field.name), declared.parse
            if parse is not None and value is not None:
                value = parse(flag, value)
            values[option_field.name] = value
        return cls(**values)

    def arguments(self) -> list[str]:
        """Writes the options as arguments of a command line; leaves out those at their default."""
        written, defaults = [], type(self)()
        for option_field, flag, _ in _options(type(self)):
            value = getattr(self, option_field.name)
            if value == getattr(defaults, option_field.name):
                continue
            on, _, off = flag.partition("/")  # such as --peers/--no-peers
            if isinstance(value, bool):
                written.append(on if value else off)
                continue
            written.append(f"{on}={','.join(map(str, _values(value)))}")
        return written


def _values(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _options(kind: Any) -> Iterator[tuple[Field, str, _Declared]]:
    """Yields, of a dataclass, each field that `option` made, its flag, and what `option` stored."""
    for each in fields(kind):
        if _KEY in each.metadata:
            declared = each.metadata[_KEY]
            yield each, declared.flag or f"--{each.name.replace('_', '-')}", declared


def add_command(
    app: typer.Typer,
    name: str,
    help: str,
    action: Callable[..., None],
    signature: Signature,
    panel: str | None = None,
) -> None:
    """Registers a command: a parameter of type `Options` is replaced by all options of that class.

    `signature` is the action's. `panel` is the part of the program's help that lists the command.
    """
    parameters: list[inspect.Parameter] = []
    bundles: dict[str, type[Options]] = {}
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if is_dataclass(kind) and issubclass(kind, Options):  # type: ignore[arg-type]
            bundles[parameter.name] = kind
            parameters += kind.parameters()
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def run(**given: Any) -> None:
        # `of` removes the arguments that it reads from `given`; the action gets those that remain.
        made = {name: bundle.of(given) for name, bundle in bundles.items()}
        action(**made, **given)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    app.command(name, help=help, rich_help_panel=panel)(run)


@dataclass(frozen=True, kw_only=True)
class Sizes(Options):
    """Sizes of gradients, and how often each is measured.

    Each size is `SIZE_FACTOR` times the one before.
    """

    LEAST_BYTES: ClassVar[int] = 64

    min_bytes: int = option("1M", "Such as 64K, 1M.", parse_size)
    max_bytes: int = option("64M", "Such as 64M, 1G.", parse_size)
    warmup: int = option(3, "Runs that are not timed.", min=0)
    iters: int = option(20, "Runs that are timed.", min=1)

    def checks(self) -> list[Check]:
        """Checks the range from `min_bytes` to `max_bytes`."""
        least = self.LEAST_BYTES
        fitting = f"{least} to max_bytes ({self.max_bytes})"
        return [
            ("min_bytes", self.min_bytes, least <= self.min_bytes <= self.max_bytes, fitting),
            # All elements are one segment of the message, and a segment's size is limited.
            ("max_bytes", self.max_bytes, self.max_bytes < 2**32, "less than 4 GiB"),
        ]

    def sizes(self) -> Iterator[int]:
        """Yields the bytes of each gradient."""
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size
            size *= SIZE_FACTOR
