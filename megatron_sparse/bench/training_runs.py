"""What benches that train whole runs share: results on disk, validation curves, failed runs."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_sparse.bench.training import TAIL_LINES
from megatron_sparse.errors import MegatronSparseError

_VALIDATION = re.compile(
    r"validation loss at iteration (\d+)( on validation set)? \| lm loss value: (\S+)"
)


def saved_result(path: Path, arguments: list[str]) -> dict[str, Any] | None:
    """The fields of a result that a run with the same arguments has left; None if there is none."""
    if not path.is_file():
        return None
    values: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if values["arguments"] != arguments:
        return None
    values["curve"] = [(iteration, loss) for iteration, loss in values["curve"]]
    return values


def save_result(path: Path, result: dict[str, Any]) -> None:
    """Writes a result for `saved_result`. Plain Megatron has made no folder of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n", "utf-8")


def finished_curve(bench: str, log: Path, code: int, iters: int) -> list[tuple[int, float]]:
    """The validation curve of a run that has ended.

    Args:
        bench: name of the bench, for errors.
        log: what the run printed.
        code: its exit code.
        iters: the iteration of the last validation.

    Raises:
        MegatronSparseError: the run failed; the end of its log is in the message.
    """
    printed = log.read_text("utf-8", errors="replace")
    curve = read_curve(printed)
    if code or not curve or curve[-1][0] != iters:
        tail = "\n".join(printed.splitlines()[-TAIL_LINES:])
        raise MegatronSparseError(
            f"bench {bench}: the run {log.stem} failed",
            expected=f"exit code 0 and a validation after iteration {iters}",
            got=f"exit code {code} and {len(curve)} validations; it ends with\n{tail}",
            remedy=f"see {log}",
        )
    return curve


def read_curve(printed: str) -> list[tuple[int, float]]:
    """(iteration, validation loss) of each of Megatron's validations.

    Example:
        >>> read_curve("validation loss at iteration 5 | lm loss value: 4.5E+00 | lm loss PPL")
        [(5, 4.5)]
    """
    curve = [(int(number), float(loss)) for number, _, loss in _VALIDATION.findall(printed)]
    assert all(first[0] <= second[0] for first, second in pairwise(curve))
    return curve
