"""Callbacks for options that name an output file or folder.

Typer calls them while it parses: a path that cannot be written ends the command before its work,
not after. If torchrun starts the command as several ranks, only rank 0 writes and checks.
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
    """Makes a callback that refuses a file which cannot be written.

    `makes_folder`: whether the command makes the file's folder if it is missing.
    """

    def check(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
        if path is None or not _is_writer():
            return path
        if not path.exists():
            # A missing folder can be made if the nearest folder above it can be written.
            problem = _problem_of_folder(_nearest(path.parent) if makes_folder else path.parent)
        else:
            problem = f"{path} is a folder" if path.is_dir() else _read_only(path)
        remedy = "give another path, or make the folder"
        _refuse(parameter, path, problem, "a file that can be made or replaced", remedy)
        return path

    return check


def writable_folder(parameter: typer.CallbackParam, folder: Path | None) -> Path | None:
    """A callback that refuses a folder which cannot be made or written; returns the folder."""
    if folder is not None and _is_writer():
        expected = "a folder that exists or can be made"
        problem = _problem_of_folder(_nearest(folder))
        _refuse(parameter, folder, problem, expected, "give another folder")
    return folder


def _is_writer() -> bool:
    """Whether this process is rank 0, or none of several ranks."""
    return os.environ.get("RANK", "0") == "0"


def _refuse(
    parameter: typer.CallbackParam, path: Path, problem: str, expected: str, remedy: str
) -> None:
    """Raises a `ConfigError` about an option's path unless `problem` is empty."""
    if problem:
        what = f"{parameter.opts[0]} {path} cannot be written"
        raise ConfigError(what, expected=expected, got=problem, remedy=remedy)


def figures_folder(parameter: typer.CallbackParam, folder: Path | None) -> Path | None:
    """Like `writable_folder`, but also refuses the option if matplotlib is missing."""
    if folder is not None:
        require_figures()
    return writable_folder(parameter, folder)


def report_files(parameter: typer.CallbackParam, paths: list[Path] | None) -> list[Path]:
    """A callback that refuses a report file which is neither a page nor a table.

    Returns the files, one for each time that the option is given; an empty list if it is not.

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
