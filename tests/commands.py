"""Runs `megatron-sparse` in this process, and makes stand-ins for other programs."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_sparse.cli import main
from megatron_sparse.errors import ConfigError


def run(*words: object) -> int:
    """The exit code of a command, such as `run("report", folder, "--output report.html")`.

    A text is split as a shell would; anything else, such as a path, is one word.
    """
    split = [shlex.split(word) if isinstance(word, str) else [str(word)] for word in words]
    with pytest.raises(SystemExit) as caught:
        main.main([word for part in split for word in part])
    return caught.value.code or 0  # type: ignore[return-value]


def is_one_error(text: str, *says: str) -> None:
    """What a command or script printed is one error with all its parts, and has these words."""
    assert text.count("error:") == 1, text
    assert "Traceback" not in text, text
    for word in ("expected:", "got:", *says):
        assert word in text, text


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one error of a command that the user mistyped."""
    assert run(*words) == 2
    error = capsys.readouterr().err
    is_one_error(error)
    return error


def refusal(call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """The text of the `ConfigError` that a call raises, which says what was expected and came."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    assert caught.value.exit_code == 2
    text = str(caught.value)
    assert "expected:" in text
    assert "got:" in text
    return text


def stand_in(path: Path, text: str) -> Path:
    """Makes a shell script that takes a program's place; its folder too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
