"""A folder of Megatron's checkpoints: which of them are complete, and which one a run goes on from.

Megatron writes a checkpoint in this order: the data of each rank, `.metadata`, `metadata.json`, and
at last the tracker, the file that names the checkpoint to load. A run that ends in between, such as
on a full disk, leaves a partial folder, or a tracker that is cut off. Imports no megatron.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_sparse.telemetry.lines import write_whole

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""What the tracker of a converted checkpoint says in place of an iteration."""
_FOLDER = re.compile(r"iter_(\d{7,})")
_COMMON = ("common_state/shard_0_1", "common_state")


@dataclass(frozen=True)
class ChosenCheckpoint:
    """The checkpoint that a run goes on from.

    Attributes:
        iteration: of the newest complete one that the tracker allows; None if there is none.
        damage: why `iteration` is not what the tracker says; empty if it is.
    """

    iteration: int | None
    damage: str = ""


def checkpoint(folder: Path, iteration: int) -> Path:
    """The folder of one checkpoint."""
    return folder / f"iter_{iteration:07d}"


def with_temporary(folder: Path, settings: Mapping[str, Any]) -> list[Path]:
    """`folder`, and the folder of temporary checkpoints that Megatron looks into besides.

    Args:
        folder: of the run's checkpoints.
        settings: Megatron's arguments, or the `megatron:` section.
    """
    folders = [folder]
    if settings.get("non_persistent_ckpt_type") == "global":
        other = settings.get("non_persistent_global_ckpt_dir")
        folders.append(Path(other) if other else folder / "non_persistent")
    return folders


def tracked(folder: Path) -> int | None:
    """The iteration that the tracker names, 0 for a release; None if it names none."""
    try:
        text = (folder / TRACKER).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    if text == RELEASE:
        return 0
    return int(text) if text.isascii() and text.isdigit() else None


def is_release(folder: Path) -> bool:
    """Whether the tracker names a release, which has no iteration."""
    return tracked(folder) == 0 and (folder / RELEASE).is_dir()


def choose(folder: Path) -> ChosenCheckpoint:
    """Chooses the checkpoint that the tracker names, else the newest complete one below it.

    With a damaged tracker the newest complete one. A newer one than the tracker names is not
    taken: a user who goes back to an older checkpoint writes its number into the tracker.
    """
    if is_release(folder):
        return ChosenCheckpoint(0)
    named = tracked(folder)
    reason = f"{TRACKER} is missing or damaged"
    if named is not None:
        problem = damage(checkpoint(folder, named))
        if problem is None:
            return ChosenCheckpoint(named)
        reason = f"the checkpoint of iteration {named} is not complete: {problem}"
    for iteration in saved_iterations(folder):
        is_allowed = named is None or iteration < named
        if is_allowed and damage(checkpoint(folder, iteration)) is None:
            return ChosenCheckpoint(iteration, reason)
    return ChosenCheckpoint(None, reason)


def saved_iterations(folder: Path) -> list[int]:
    """Iterations that have a folder, complete or not; the newest first."""
    if not folder.is_dir():
        return []
    matches = [_FOLDER.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()]
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def track(folder: Path, iteration: int) -> None:
    """Writes the tracker; complete or not at all.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(folder / TRACKER, str(iteration))


def damage(saved: Path) -> str | None:
    """Why a checkpoint cannot be read whole; None if it can.

    Reads sizes and metadata, not the data: a byte that was changed is not found.

    Args:
        saved: the folder of one checkpoint, of any format of Megatron's.
    """
    if not saved.is_dir():
        return "it has no folder"
    legacy = sorted(saved.glob("mp_rank_*/*.pt"))
    if legacy:
        # A file of torch.save is a zip, whose directory is at its end.
        cut = [path for path in legacy if not zipfile.is_zipfile(path)]
        return f"{cut[0].relative_to(saved)} is cut off" if cut else None
    return _damage_of_distributed(saved)


def _damage_of_distributed(saved: Path) -> str | None:
    """What is wrong with a distributed checkpoint, else None.

    Its metadata must be readable, and its files as long as the metadata says.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if not (saved / ".metadata").is_file():
        return ".metadata is missing"
    try:
        metadata = FileSystemReader(saved).read_metadata()
    except Exception as error:  # a cut pickle raises almost anything
        return f".metadata is damaged ({type(error).__name__})"
    # torch_dcp and fsdp_dtensor, which have no common state, write no metadata.json either.
    of_megatron = any(key in metadata.state_dict_metadata for key in _COMMON)
    if of_megatron or (saved / "common.pt").exists():
        try:
            json.loads((saved / "metadata.json").read_text("utf-8"))
        except (OSError, ValueError):
            return "metadata.json is missing or damaged"
    return _short_file(saved, metadata)


def _short_file(saved: Path, metadata: Any) -> str | None:
    """The first file that is missing, or shorter than the metadata says; None if all are whole."""
    file_sizes: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        end = place.offset + place.length
        file_sizes[place.relative_path] = max(file_sizes.get(place.relative_path, 0), end)
    for name, size in sorted(file_sizes.items()):
        path = saved / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size < size:
            return f"{name} has {path.stat().st_size} of {size} bytes"
    return None
