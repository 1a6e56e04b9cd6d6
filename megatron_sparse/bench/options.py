"""Options of benches, declared once: a dataclass of them, a command, and a rank's command line.

A field made by `option` carries its flag, its help and how its text is read. `command` makes the
Typer options of all dataclasses that a function takes; `Options.arguments` writes them down again
for the ranks. Imports nothing heavy: the command line reads this for `--help`.
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
"""An argument's name, its value, whether that fits, and what would."""
type Fits = Callable[[Any], str]
"""Tests one value: the text is empty, or says what would fit."""
type Names = Iterable[object] | Callable[[], Iterable[object]]
"""What a value may be; a function is asked when there is one, such as for a registry's names."""


def check_arguments(bench: str, checks: Iterable[Check]) -> None:
    """Refuses the first argument that does not fit.

    Raises:
        ConfigError: names the bench and the argument.
    """
    for name, value, fits, expected in checks:
        if not fits:
            raise ConfigError(f"{bench}: {name} is out of range", expected=expected, got=value)


def _among(names: Names) -> Fits:
    """Makes the test whether a value, as text, is one of these names."""

    def fits(value: Any) -> str:
        known = [str(name) for name in (names() if callable(names) else names)]
        return "" if str(value) in known else " | ".join(known)

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
    """Bytes of `64K`, `1M`, `1G` or a plain number; the units are powers of two.

    Raises:
        ConfigError: it is none of these.
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
    """Values separated by commas.

    Args:
        option: named in the error.
        text: the values.
        convert: reads one; raises ValueError where it cannot.
        expected: what the error says.

    Raises:
        ConfigError: one cannot be read.
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
    """Whole numbers from `low` on, separated by commas.

    Raises:
        ConfigError: one of them is not.
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
        default: the value without the flag; text for `parse` where there is one.
        help: one line; without it, `among`.
        parse: gets the flag and its text, returns the value; None: Typer reads the field's type.
        flag: such as `--dtype`; that of the field's name where it is left out.
        among: the allowed values, or a function that returns them; the value None is allowed too.
        fits: another test of the value, or of each of its values.
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
    """Of a bench that has no more options: the module of this package whose `run` it calls. The
    first line of the class's docstring is the command's help."""

    def __post_init__(self) -> None:
        check_arguments(self.NAME, [*self._declared(), *self.checks()])

    def _declared(self) -> Iterator[Check]:
        """Yields a check for each test of each value; an option without a value has none."""
        for option_field, flag, declared in _options(type(self)):
            name = flag.partition("/")[0]  # --peers of --peers/--no-peers
            values = _values(getattr(self, option_field.name))
            known = [value for value in values if value is not None]
            for fits, value in product(declared.fits, known):
                expected = fits(value)
                yield name, value, not expected, expected

    def checks(self) -> list[Check]:
        """What the options do not say one by one."""
        return []

    @classmethod
    def parameters(cls) -> Iterator[inspect.Parameter]:
        """Yields a parameter for each option, with the annotation of which Typer makes it."""
        # Here, so that a machine without Typer can run a sweep, as GPU tests do.
        import typer

        types = get_type_hints(cls)
        for option_field, flag, declared in _options(cls):
            default, parse, settings = declared.default, declared.parse, declared.settings
            kind = types[option_field.name]
            if parse is not None:  # Typer hands over the text, which `of` parses
                kind = str | None if default is None else str
            kind = Annotated[kind, typer.Option(flag, **settings)]
            yield inspect.Parameter(
                option_field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
            )

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        """Makes the options of Typer's arguments; removes those that it takes from `given`.

        Raises:
            ConfigError: one of them cannot be read, or does not fit.
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
        written, usual = [], type(self)()
        for option_field, flag, _ in _options(type(self)):
            value = getattr(self, option_field.name)
            if value == getattr(usual, option_field.name):
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
    """Yields each field that `option` made, its flag, and the other arguments of `option`."""
    for made in fields(kind):
        if _KEY in made.metadata:
            declared = made.metadata[_KEY]
            yield made, declared.flag or f"--{made.name.replace('_', '-')}", declared


def add_command(
    app: typer.Typer,
    name: str,
    help: str,
    action: Callable[..., None],
    signature: Signature,
    panel: str | None = None,
) -> None:
    """Registers a command; parameters of the signature that are `Options` become their options.

    `panel` is the part of the program's help that lists it.
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


def command(
    app: typer.Typer, help: str, panel: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a decorator that registers a function as the command of its name; see `add_command`."""

    def register(action: Callable[..., None]) -> Callable[..., None]:
        name = action.__name__.replace("_", "-")
        add_command(app, name, help, action, inspect.signature(action, eval_str=True), panel)
        return action

    return register


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
        """The checks of the range from `min_bytes` to `max_bytes`."""
        least = self.LEAST_BYTES
        fitting = f"{least} to max_bytes ({self.max_bytes})"
        return [
            ("min_bytes", self.min_bytes, least <= self.min_bytes <= self.max_bytes, fitting),
            # One wire segment holds the measured elements.
            ("max_bytes", self.max_bytes, self.max_bytes < 2**32, "less than 4 GiB"),
        ]

    def sizes(self) -> Iterator[int]:
        """Bytes of each gradient."""
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size
            size *= SIZE_FACTOR
