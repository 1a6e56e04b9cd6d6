"""The registry of schemes: all that this package's modules define as `SCHEME`.

A new scheme needs no line here: its file is found. The package is scanned at the first request for
a scheme, once in a process.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path

from megatron_sparse.collectives.scheme import Scheme
from megatron_sparse.errors import ConfigError


class Registry(MutableMapping[str, Scheme]):
    """Schemes by name, sorted by `Scheme.place`; see the module's docstring."""

    @cached_property
    def _schemes(self) -> dict[str, Scheme]:
        return find_schemes()

    def add(self, scheme: Scheme) -> None:
        """Makes a scheme of another package known by its name, in this process.

        Raises:
            ConfigError: there is a scheme of that name.
        """
        if scheme.name in self:
            raise two_of(scheme.name)
        self[scheme.name] = scheme

    def __getitem__(self, name: str) -> Scheme:
        return self._schemes[name]

    def __setitem__(self, name: str, scheme: Scheme) -> None:
        self._schemes[name] = scheme

    def __delitem__(self, name: str) -> None:
        del self._schemes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._schemes)

    def __len__(self) -> int:
        return len(self._schemes)


SCHEMES = Registry()
"""All schemes."""


def find_schemes() -> dict[str, Scheme]:
    """Imports the package's modules and collects their schemes.

    Raises:
        ConfigError: two modules define schemes of one name.
    """
    found: dict[str, Scheme] = {}
    here = str(Path(__file__).parent)
    for module in pkgutil.iter_modules([here], f"{__package__}."):
        scheme = getattr(import_module(module.name), "SCHEME", None)
        if scheme is None:
            continue
        if scheme.name in found:
            raise two_of(scheme.name)
        found[scheme.name] = scheme
    inners = {name: scheme for name, scheme in found.items() if scheme.runs_across_nodes}
    for name, scheme in found.items():
        if scheme.takes_inner:
            cost = None if scheme.cost is None else partial(scheme.cost, inners=inners)
            found[name] = replace(scheme, run=partial(scheme.run, inners=inners), cost=cost)
    return dict(sorted(found.items(), key=lambda item: (item[1].place, item[0])))


def two_of(name: str) -> ConfigError:
    """The error for two schemes of one name."""
    return ConfigError(
        f"two schemes have the name {name!r}",
        expected="a name that no other scheme has",
        got=name,
        remedy="rename one of them: its module and its SCHEME",
    )


def over_groups() -> dict[str, Scheme]:
    """The schemes that run over any process group and on the virtual cluster."""
    return {name: scheme for name, scheme in SCHEMES.items() if not scheme.needs_windows}
