"""Options that name an output: each is checked before the command works, not when it writes.

Of several ranks, rank 0 checks, because it writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from megatron_sparse.errors import ConfigError
from megatron_sparse.extras import require_figures

PAGE, TABLE = ".html", ".csv"
"""Endings of what `report` writes."""

Check = Callable[[typer.CallbackParam, Path | None], Path | None]
"""A callback of an option: raises a `ConfigError`, or returns the path."""


def writable_file(*, makes_folder: bool = False) -> Check:
    """Makes the callback of an option that names a file: it refuses one that cannot be written.

    Args:
        makes_folder: whether the command makes the file's folder.
    """

    def problem_of(path: Path) -> str:
        """Why the file cannot be written; empty if it can."""
        if path.exists() and path.is_dir():
            return f"{path} is a folder"
        if path.exists():
            return _read_only(path)
        return _problem_of_folder(_nearest(path.parent) if makes_folder else path.parent)

    def check(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
        remedy = "give another path, or make the folder"
        return _checked(parameter, path, problem_of, "a file that can be made or replaced", remedy)

    return check


def writable_folder(parameter: typer.CallbackParam, folder: Path | None) -> Path | None:
    """A callback of an option that names a folder: refuses one that cannot be made or written to.

    Returns the folder.
    """

    def problem_of(folder: Path) -> str:
        """Why nothing can be written there; empty if it can."""
        return _problem_of_folder(_nearest(folder))

    expected = "a folder that exists or can be made"
    return _checked(parameter, folder, problem_of, expected, "give another folder")


def _checked(
    parameter: typer.CallbackParam,
    path: Path | None,
    problem_of: Callable[[Path], str],
    expected: str,
    remedy: str,
) -> Path | None:
    """Returns the path of an option, if rank 0, which writes, can write there.

    Args:
        parameter: the option.
        path: None if the option was not given.
        problem_of: says why a path cannot be written; empty if it can.
        expected: for the error.
        remedy: for the error.

    Raises:
        ConfigError: on rank 0: there is a problem.
    """
    is_writer = os.environ.get("RANK", "0") == "0"
    if path is None or not is_writer:
        return path
    if problem := problem_of(path):
        flag = parameter.opts[0]
        raise ConfigError(
            f"{flag} {path} cannot be written", expected=expected, got=problem, remedy=remedy
        )
    return path


def figures_folder(parameter: typer.CallbackParam, folder: Path | None) -> Path | None:
    """A callback of an option: figures can be drawn, and written into its folder."""
    if folder is not None:
        require_figures()
    return writable_folder(parameter, folder)


def report_files(parameter: typer.CallbackParam, paths: list[Path] | None) -> list[Path]:
    """A callback of an option that may be repeated: each file is a page, or a table.

    Returns the files, none if the option was not given.

    Raises:
        ConfigError: a name ends in neither `.html` nor `.csv`, or the file cannot be written.
    """
    check_writable = writable_file(makes_folder=True)
    for path in paths or ():
        if path.suffix.lower() not in (PAGE, TABLE):
            flag = parameter.opts[0]
            raise ConfigError(
                f"{flag} cannot write this kind of file",
                expected=f"a name that ends in {PAGE} or {TABLE}",
                got=path,
                remedy=f"write {flag} {path.with_suffix(PAGE)}, which has the charts as SVG",
            )
        check_writable(parameter, path)
    return paths or []


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest folder above it that exists."""
    nearest = folder.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    return nearest


def _read_only(path: Path) -> str:
    return "" if os.access(path, os.W_OK) else f"{path} is read-only"


def _problem_of_folder(folder: Path) -> str:
    """Why nothing can be written into a folder; empty if it can."""
    if not folder.exists():
        return f"there is no folder {folder}"
    if not folder.is_dir():
        return f"{folder} is a file"
    return _read_only(folder)


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", callback=writable_file(), help="Write one JSON object a line."
    ),
]
"""The option that most commands have."""
