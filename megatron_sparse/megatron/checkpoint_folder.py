"""A folder of Megatron's checkpoints: which of them are complete, and which one a run resumes from.

Megatron writes a checkpoint in this order: the data of each rank, `.metadata`, `metadata.json`, and
at last the *tracker*, the file that names the checkpoint to load. A run that ends in between, such
as on a full disk, leaves a partial folder, or a tracker that is cut off. A *release* is a converted
checkpoint, which has no iteration. Imports no megatron.
"""

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
"""The tracker's text in place of an iteration, and the folder's name, for a release."""
_FOLDER = re.compile(r"iter_(\d{7,})")
_COMMON = ("common_state/shard_0_1", "common_state")


@dataclass(frozen=True)
class ChosenCheckpoint:
    """The checkpoint that a run resumes from.

    Attributes:
        iteration: the checkpoint's; 0 for a release; None if no complete one may be taken.
        damage: why the checkpoint is not the one that the tracker names; empty if it is.
    """

    iteration: int | None
    damage: str = ""


def checkpoint(folder: Path, iteration: int) -> Path:
    """The folder of one checkpoint."""
    return folder / f"iter_{iteration:07d}"


def with_temporary(folder: Path, settings: Mapping[str, Any]) -> list[Path]:
    """The folders that Megatron loads from: `folder`, and that of temporary checkpoints if any.

    Args:
        folder: the run's permanent checkpoints.
        settings: Megatron's arguments, or the `megatron:` section.
    """
    folders = [folder]
    if settings.get("non_persistent_ckpt_type") == "global":
        other = settings.get("non_persistent_global_ckpt_dir")
        folders.append(Path(other) if other else folder / "non_persistent")
    return folders


def tracked(folder: Path) -> int | None:
    """The iteration that the tracker names, 0 for a release; None without a readable tracker."""
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
    """Chooses the checkpoint that the tracker names; if damaged, the newest complete older one.

    A newer one is not taken: a user who goes back to an older checkpoint writes its number into the
    tracker. If the tracker itself is damaged, the newest complete checkpoint is taken.
    """
    if is_release(folder):
        return ChosenCheckpoint(0)
    named = tracked(folder)  # None: the tracker cannot be read
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
    """The iterations that have a checkpoint's folder, complete or not; the newest first."""
    if not folder.is_dir():
        return []
    matches = [_FOLDER.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()]
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def track(folder: Path, iteration: int) -> None:
    """Makes the tracker name `iteration`. A failed write leaves the old tracker.

    Raises:
        OSError: the tracker cannot be written.
    """
    write_whole(folder / TRACKER, str(iteration))


def damage(saved: Path) -> str | None:
    """Says why a checkpoint is not complete; None if it is.

    Reads sizes and metadata, not the data: a byte that was changed is not found.

    Args:
        saved: the folder of one checkpoint, in any of Megatron's formats.
    """
    if not saved.is_dir():
        return "it has no folder"
    legacy = sorted(saved.glob("mp_rank_*/*.pt"))  # the format `--ckpt-format torch`
    if legacy:
        # torch.save writes a zip, whose directory is at its end: a file that is cut off is no zip.
        cut = [path for path in legacy if not zipfile.is_zipfile(path)]
        return f"{cut[0].relative_to(saved)} is cut off" if cut else None
    return _damage_of_distributed(saved)


def _damage_of_distributed(saved: Path) -> str | None:
    """Says why a checkpoint in a distributed format is not complete; None if it is.

    Its metadata must be readable, and its files as long as the metadata says.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if not (saved / ".metadata").is_file():
        return ".metadata is missing"
    try:
        metadata = FileSystemReader(saved).read_metadata()
    except Exception as error:  # a cut pickle raises almost anything
        return f".metadata is damaged ({type(error).__name__})"
    # The formats torch_dcp and fsdp_dtensor write no metadata.json, and no common state. The format
    # torch_dist has both; its common state is an entry of the metadata or the file common.pt.
    has_common_state = any(key in metadata.state_dict_metadata for key in _COMMON)
    if has_common_state or (saved / "common.pt").exists():
        try:
            json.loads((saved / "metadata.json").read_text("utf-8"))
        except (OSError, ValueError):
            return "metadata.json is missing or damaged"
    return _short_file(saved, metadata)


def _short_file(saved: Path, metadata: Any) -> str | None:
    """The first file that is missing, or shorter than the metadata says; None if all are whole."""
    file_sizes: dict[str, int] = {}
    for entry in (metadata.storage_data or {}).values():
        end = entry.offset + entry.length
        file_sizes[entry.relative_path] = max(file_sizes.get(entry.relative_path, 0), end)
    for name, size in sorted(file_sizes.items()):
        path = saved / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size < size:
            return f"{name} has {path.stat().st_size} of {size} bytes"
    return None
