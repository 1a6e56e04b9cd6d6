"""Parameters before and after an optimizer step, on disk: what `bench parameters --pairs` reads.

A folder has one file for each bucket of each recorded iteration, written by the first rank of the
bucket's data-parallel group, which holds the same parameters as the others:

    iteration-000100/group-0-4/<bucket>.pt

A file is torch's own format (`torch.save`), read with `weights_only=True`: no code is run. It holds
the bucket's parameters back to back, old and new, with their names and sizes.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

import torch

from megatron_sparse.config.sparse import TrackingConfig
from megatron_sparse.errors import ProfileError

logger = logging.getLogger("megatron_sparse")

FOLDER = "parameters"
"""Of a run's folder."""
VERSION = 1
_ITERATION = re.compile(r"iteration-(\d+)")

type Named = Sequence[tuple[str, torch.Tensor]]
"""A bucket's parameters."""
type Place = tuple[str, str]
"""A group of ranks, as a folder's name, and a bucket."""


@dataclass(frozen=True)
class ParameterPair:
    """One bucket's parameters before and after one step.

    Attributes:
        iteration: counted from 1.
        bucket: its name.
        names: of the parameters.
        sizes: their elements.
        old_N: 1-D, all parameters back to back.
        new_N: likewise, after the step.
    """

    iteration: int
    bucket: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    old_N: torch.Tensor
    new_N: torch.Tensor


class ParameterPairWriter:
    """Writes one rank's parameters before and after the steps of some iterations.

    A pair is complete when the next step begins: only then have replicas of a distributed optimizer
    the new parameters for certain. So a run's last iteration cannot be recorded. Between the two
    steps a copy of the parameters is held. If the disk fails, recording ends with one line in the
    log, and training goes on.

    Args:
        folder: made when something is written.
        iterations: the iterations to record, counted from 1.

    Example:
        >>> import tempfile
        >>> folder, w = Path(tempfile.mkdtemp()), torch.zeros(2)
        >>> writer = ParameterPairWriter(folder, [1])
        >>> writer.step_begins(1, {("group-0-1", "b"): [("w", w)]})
        >>> w += 1
        >>> writer.step_begins(2, {("group-0-1", "b"): [("w", w)]})
        >>> [pair.new_N - pair.old_N for pair in read_pairs(folder)]
        [tensor([1., 1.])]
    """

    def __init__(self, folder: Path, iterations: Collection[int]) -> None:
        self._folder, self._iterations = folder, frozenset(iterations)
        self._kept: dict[Place, torch.Tensor] = {}
        self._kept_at = 0

    @classmethod
    def of(cls, tracking: TrackingConfig, run_dir: Path | None) -> ParameterPairWriter | None:
        """The writer that a run's configuration asks for.

        Raises:
            ConfigError: parameters are to be recorded, but there is no folder.
        """
        if not tracking.record_parameters_iters:
            return None
        return cls(
            tracking.folder_for("record_parameters_iters", run_dir) / FOLDER,
            tracking.record_parameters_iters,
        )

    def step_begins(self, iteration: int, parameters: Mapping[Place, Named]) -> None:
        """Completes the pair of the iteration before, and begins this one's.

        On CUDA this waits, in the iterations that are recorded and those after them.

        Args:
            iteration: whose optimizer step is about to begin, counted from 1.
            parameters: of each bucket that this rank records; only read.
        """
        if self._kept and self._kept_at == iteration - 1:
            self._write(parameters)
        self._kept.clear()
        if iteration in self._iterations:
            self._kept_at = iteration
            self._kept = {place: _flat(named) for place, named in parameters.items()}

    def _write(self, parameters: Mapping[Place, Named]) -> None:
        for (group, bucket), named in parameters.items():
            folder = self._folder / f"iteration-{self._kept_at:06d}" / group
            path = folder / f"{quote(bucket, safe='')}.pt"
            partial = path.with_suffix(".partial")
            pair = {
                "version": VERSION,
                "names": [name for name, _ in named],
                "sizes": [values.numel() for _, values in named],
                "old": self._kept[group, bucket],
                "new": _flat(named),
            }
            try:
                folder.mkdir(parents=True, exist_ok=True)
                torch.save(pair, partial)
                os.replace(partial, path)
            except OSError as error:
                self._iterations = frozenset()
                logger.error("parameters are not recorded any more: %s", error)
                return


def read_pairs(path: Path) -> Iterator[ParameterPair]:
    """The pairs of a folder of `ParameterPairWriter`, or of a run that has one; in order.

    Raises:
        ProfileError: there is none, or a file is damaged.
    """
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    files = [file for file in folder.glob("iteration-*/group-*/*.pt")]
    if not files:
        raise ProfileError(
            f"{path} holds no recorded parameters",
            expected=f"a run's folder with {FOLDER}/, or that folder itself",
            got="no such folder" if not path.is_dir() else "none of its files",
            remedy="record some: megatron-sparse train tracking.record_parameters_iters=[10,20]",
        )
    for file in sorted(files):
        match = _ITERATION.fullmatch(file.parent.parent.name)
        if match is not None:
            yield _load(file, int(match[1]))


def _flat(named: Named) -> torch.Tensor:
    """A copy on the CPU."""
    return torch.cat([values.detach().reshape(-1).cpu() for _, values in named])


def _load(path: Path, iteration: int) -> ParameterPair:
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader may raise anything on damaged bytes
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise _damaged(path, "a file that torch.load reads", first) from None
    if not isinstance(held, dict) or held.get("version") != VERSION:
        raise _damaged(path, f"parameters of version {VERSION}", type(held).__name__)
    old, new, names, sizes = (held.get(key) for key in ("old", "new", "names", "sizes"))
    if (
        isinstance(old, torch.Tensor)
        and isinstance(new, torch.Tensor)
        and isinstance(names, list)
        and isinstance(sizes, list)
        and old.dim() == 1
        and (old.shape, old.dtype) == (new.shape, new.dtype)
        and len(names) == len(sizes)
        and all(isinstance(size, int) and size >= 0 for size in sizes)
        and sum(sizes) == old.numel()
    ):
        return ParameterPair(iteration, unquote(path.stem), tuple(names), tuple(sizes), old, new)
    raise _damaged(path, "old and new parameters alike, with names and sizes", sorted(held))


def _damaged(path: Path, expected: object, got: object) -> ProfileError:
    return ProfileError(
        f"{path} holds no recorded parameters", expected=expected, got=got, remedy="record again"
    )
