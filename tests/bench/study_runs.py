"""A fake Megatron for the benches that train whole runs: prints its lines, leaves its files."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from megatron_sparse.bench.study import frame
from megatron_sparse.megatron import corpus
from megatron_sparse.run import local_ranks

ITERATION = (
    "[1]  [2026-01-01 00:00:00.000000] iteration  {number}/  9 | consumed samples:   2 | elapsed "
    "time per iteration (ms): {ms} | learning rate: 2.8E-04 | lm loss: {loss:E} | loss scale: 1.0\n"
)
VALIDATION = (
    " validation loss at iteration {number}{again} | lm loss value: {loss:E} | lm loss PPL\n"
)


def overrides(command: Sequence[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in command if "=" in word)


class FakeRuns:
    """Replaces the runs, and keeps their commands and where they ran.

    `train` gets a run's overrides and its log; it returns the exit code.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        train: Callable[[dict[str, str], IO[str]], int | None],
    ) -> None:
        self.commands: list[list[str]] = []
        self.places: list[tuple[object, ...]] = []

        def run(how: str) -> Callable[..., int]:
            def started(command: list[str], *where: Any) -> int:
                *where, log = where
                self.commands.append(command)
                self.places.append((how, *where))
                return train(overrides(command), log) or 0

            return started

        for how in ("run", "run_netbed", "run_loopback"):
            monkeypatch.setattr(local_ranks, how, run(how))
        monkeypatch.setattr(corpus, "prepare", lambda *_: None)
        monkeypatch.setattr(frame, "foreign_share", lambda *_: 0.0)

    @property
    def names(self) -> list[str]:
        return [overrides(command)["name"] for command in self.commands]


def print_run(
    log: IO[str],
    times_ms: Sequence[float],
    losses: Sequence[float],
    curve: Sequence[tuple[int, float]] = (),
    again: float | None = None,
) -> None:
    """Iterations, validations, and the second validation after the last iteration."""
    for number, (ms, loss) in enumerate(zip(times_ms, losses, strict=True), 1):
        log.write(ITERATION.format(number=number, ms=ms, loss=loss))
    for number, loss in curve:
        log.write(VALIDATION.format(number=number, again="", loss=loss))
    if again is not None:
        number = curve[-1][0]
        log.write(VALIDATION.format(number=number, again=" on validation set", loss=again))


def leave(words: dict[str, str], name: str, lines: Sequence[dict[str, Any]]) -> None:
    """One of the run's files."""
    folder = Path(words["runs_dir"], words["name"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
