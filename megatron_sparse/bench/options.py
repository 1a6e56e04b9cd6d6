"""Options of benches, declared once: a dataclass of them, a command, and a rank's command line.

A field made by `option` carries its flag, its help and how its text is read. `command` makes the
Typer options of all dataclasses that a function takes; `Options.arguments` writes them down again
for the ranks. Imports nothing heavy: the command line reads this for `--help`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self, get_type_hints

from megatron_sparse.errors import ConfigError

if TYPE_CHECKING:
    import typer

AUTO = "auto"
DTYPE_NAMES = ("fp32", "bf16", "fp16")
SIZE_FACTOR = 4
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_KEY = "option"

type Check = tuple[str, object, bool, str]
"""An argument's name, its value, whether that fits, and what would."""


def check_arguments(bench: str, checks: Iterable[Check]) -> None:
    """Refuses the first argument that does not fit.

    Raises:
        ConfigError: names the bench and the argument.
    """
    for name, value, fits, expected in checks:
        if not fits:
            raise ConfigError(f"{bench}: {name} is out of range", expected=expected, got=value)


def known(name: str, values: Collection[str], names: Iterable[object]) -> Check:
    """All values are among some names."""
    known_names = list(map(str, names))
    return name, values, set(values) <= set(known_names), " | ".join(known_names)


def at_least(name: str, value: Any, low: int) -> Check:
    """A number, or None, is not below a bound."""
    return name, value, value is None or value >= low, f"{low} or more"


def above_zero(name: str, value: Any, unit: str = "") -> Check:
    """A number, or None, is positive."""
    return name, value, value is None or value > 0, f"above 0{unit}"


def fractions(name: str, values: Iterable[float]) -> Check:
    """All values lie in (0, 1]."""
    return name, values, all(0 < value <= 1 for value in values), "above 0, at most 1"


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


def parse_names(option: str, text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return parse_list(option, text, str, "names")


def parse_densities(option: str, text: str) -> tuple[float, ...]:
    """Fractions in (0, 1], separated by commas.

    Raises:
        ConfigError: one of them is not.
    """

    def fraction(part: str) -> float:
        if not 0 < float(part) <= 1:
            raise ValueError
        return float(part)

    return parse_list(
        option, text, fraction, "fractions: numbers in (0, 1] with commas between, as 0.001,0.01"
    )


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
    parse_densities: "D,...",
    parse_counts: "N,...",
    parse_names: "NAME,...",
}


def option(
    default: Any,
    help: str,
    parse: Callable[[str, str], Any] | None = None,
    *,
    flag: str = "",
    **typer_settings: Any,
) -> Any:
    """A field of an `Options` dataclass that is an option of the command line.

    Args:
        default: as text where there is a `parse`.
        help: one line.
        parse: makes the value of the flag and its text; None lets Typer do it by the field's type.
        flag: such as `--dtype`; that of the field's name where it is left out.
        typer_settings: more arguments of `typer.Option`.
    """
    settings = {"help": help, "metavar": _METAVARS.get(parse), **typer_settings}
    metadata = {_KEY: (flag, default, parse, settings)}
    if parse is None or default is None:
        return field(default=default, metadata=metadata)
    # Read when it is needed: some names are those of a registry.
    return field(default_factory=lambda: parse(flag, default), metadata=metadata)


class Options:
    """A dataclass whose fields are options of the command line."""

    @classmethod
    def parameters(cls) -> Iterator[inspect.Parameter]:
        """What Typer makes options of."""
        # Here, so that a machine without Typer can run a sweep, as GPU tests do.
        import typer

        types = get_type_hints(cls)
        for each, flag, default, parse, settings in _options(cls):
            kind = types[each.name]
            if parse is not None:
                kind = str | None if default is None else str
            kind = Annotated[kind, typer.Option(flag, **settings)]
            yield inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
            )

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        """The options, taken from Typer's arguments.

        Raises:
            ConfigError: one of them cannot be read, or does not fit.
        """
        values = {}
        for each, flag, _, parse, _ in _options(cls):
            value = given.pop(each.name)
            values[each.name] = value if parse is None or value is None else parse(flag, value)
        return cls(**values)

    def arguments(self) -> list[str]:
        """The command line that asks for the same."""
        found = []
        for each, flag, _, _, _ in _options(type(self)):
            value = getattr(self, each.name)
            usual = each.default if each.default_factory is MISSING else each.default_factory()
            if value == usual:
                continue
            on, _, off = flag.partition("/")
            if isinstance(value, bool):
                found.append(on if value else off)
                continue
            many = value if isinstance(value, list | tuple) else [value]
            found.append(f"{on}={','.join(AUTO if one is None else str(one) for one in many)}")
        return found


def _options(kind: Any) -> Iterator[tuple[Field, str, Any, Callable[..., Any] | None, dict]]:
    for each in fields(kind):
        if _KEY in each.metadata:
            flag, *rest = each.metadata[_KEY]
            yield each, flag or f"--{each.name.replace('_', '-')}", *rest


def command(app: typer.Typer, help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function as a command; parameters that are `Options` become their options."""

    def register(action: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        bundles: dict[str, type[Options]] = {}
        for each in inspect.signature(action, eval_str=True).parameters.values():
            if is_dataclass(each.annotation) and issubclass(each.annotation, Options):  # type: ignore[arg-type]
                bundles[each.name] = each.annotation
                parameters += each.annotation.parameters()
            else:
                parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        def run(**given: Any) -> None:
            made = {name: bundle.of(given) for name, bundle in bundles.items()}
            action(**made, **given)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        app.command(action.__name__.replace("_", "-"), help=help)(run)
        return action

    return register


@dataclass(frozen=True, kw_only=True)
class Sizes(Options):
    """Sizes of gradients, and how often each is measured.

    Each size is `SIZE_FACTOR` times the one before.
    """

    min_bytes: int = option("1M", "Such as 64K, 1M.", parse_size)
    max_bytes: int = option("64M", "Such as 64M, 1G.", parse_size)
    warmup: int = option(3, "Runs that are not timed.", min=0)
    iters: int = option(20, "Runs that are timed.", min=1)

    def range_checks(self, smallest: int) -> list[Check]:
        """For `check_arguments`; `smallest` is the least number of bytes."""
        at_most = f"{smallest} to max_bytes ({self.max_bytes})"
        return [
            ("min_bytes", self.min_bytes, smallest <= self.min_bytes <= self.max_bytes, at_most),
            # One wire segment holds the measured elements.
            ("max_bytes", self.max_bytes, self.max_bytes < 2**32, "less than 4 GiB"),
            at_least("warmup", self.warmup, 0),
            at_least("iters", self.iters, 1),
        ]

    def sizes(self) -> Iterator[int]:
        """Bytes of each gradient."""
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size
            size *= SIZE_FACTOR
