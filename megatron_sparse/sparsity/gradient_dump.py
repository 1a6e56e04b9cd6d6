"""Gradient dumps: the gradients of a training run on disk, per iteration, rank and bucket.

A dump is a folder with one file for each tensor: ranks write independently, and a reader loads only
the tensors it needs:

    iteration-000003/group-0-4/rank-0002/<bucket>.gradient.pt    before selection
    iteration-000003/group-0-4/rank-0002/<bucket>.selected.pt    the selection

`group-0-4` are the 4 ranks that reduce together; the first is global rank 0. A bucket's name is
percent-encoded. A file is torch's own format (`torch.save`), read with `weights_only=True`: no code
is run. It holds plain numbers and tensors: the values, and their indices where that is smaller.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Sequence
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import torch

from megatron_sparse.bucket import Bucket
from megatron_sparse.config.sparse import TrackingConfig
from megatron_sparse.errors import ConfigError, ProfileError, first_line
from megatron_sparse.formats.message import Message, MessageBuffers
from megatron_sparse.sparsity.sampling import selected_values

logger = logging.getLogger("megatron_sparse")

FOLDER = "gradients"
"""Of a run's folder."""
VERSION = 1
_ITERATION, _GROUP = re.compile(r"iteration-(\d+)"), re.compile(r"group-(\d+)-(\d+)")


class Kind(StrEnum):
    """The tensor of a bucket that is dumped: its gradient, or the selection from it."""

    GRADIENT = "gradient"
    SELECTED = "selected"


class GradientDumpWriter:
    """Writes one rank's gradients in some iterations.

    If the disk fails, the dump ends with one line in the log, and training goes on.

    Args:
        folder: of the dump; made when something is written.
        iterations: the iterations to dump; the training loop counts from 1.
        rank: in the group.
        world_size: of the group.
        first_rank: the group's first global rank.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> GradientDumpWriter(folder, [1]).write("b", 1, Kind.GRADIENT, torch.tensor([0.0, 2.0]))
        >>> GradientDump(folder).read(1, "b")[0].to_dense()
        tensor([0., 2.])
    """

    def __init__(
        self,
        folder: Path,
        iterations: Collection[int],
        *,
        rank: int = 0,
        world_size: int = 1,
        first_rank: int = 0,
    ) -> None:
        """Stores the arguments; makes no folder yet."""
        self._iterations, self._folder, self._is_broken = frozenset(iterations), folder, False
        self._rank_folder = Path(f"group-{first_rank}-{world_size}") / f"rank-{rank:04d}"

    @classmethod
    def of(
        cls, tracking: TrackingConfig, run_dir: Path | None, ranks: Sequence[int], rank: int
    ) -> GradientDumpWriter | None:
        """The writer that a run's configuration asks for.

        Args:
            tracking: the iterations to dump.
            run_dir: the run's folder, if it has one.
            ranks: global ranks of the group.
            rank: this rank's number in the group.

        Raises:
            ConfigError: gradients are to be dumped, but there is no folder.
        """
        if not tracking.record_gradients_iters:
            return None
        if run_dir is None:
            raise ConfigError(
                "tracking.record_gradients_iters needs a run's folder to write to",
                expected="install(config, run_dir=...)",
                got="no folder",
                remedy="give one, or leave tracking.record_gradients_iters out",
            )
        return cls(
            run_dir / FOLDER,
            tracking.record_gradients_iters,
            rank=rank,
            world_size=len(ranks),
            first_rank=min(ranks),
        )

    def on_gradient(self, bucket: Bucket, step: int) -> None:
        """Writes a bucket's gradient before selection. Steps count from 0, iterations from 1."""
        self.write(bucket.name, step + 1, Kind.GRADIENT, bucket.grad_N)

    def on_selected(
        self, bucket: Bucket, step: int, message: Message, buffers: MessageBuffers
    ) -> None:
        """Writes the selection from a bucket, if its iteration is to be dumped.

        Overwrites an fp32 gradient with the selection, else a buffer. Iteration 1 is step 0.
        """
        if self.wants(step + 1):
            selected_N = selected_values(bucket, message, buffers)
            self.write(bucket.name, step + 1, Kind.SELECTED, selected_N)

    def wants(self, iteration: int) -> bool:
        """Whether `write` would write anything."""
        return iteration in self._iterations and not self._is_broken

    def write(self, bucket: str, iteration: int, kind: Kind, values: torch.Tensor) -> None:
        """Writes one tensor if it is wanted; overwrites one of the same iteration.

        Args:
            bucket: its name.
            iteration: as the training loop counts.
            kind: the kind of the values.
            values: dense of any shape, or torch's sparse COO; only read. On CUDA this waits.
        """
        if not self.wants(iteration):
            return
        folder = self._folder / f"iteration-{iteration:06d}" / self._rank_folder
        path = folder / f"{quote(bucket, safe='')}.{kind}.pt"
        partial = path.with_suffix(".partial")  # so that a reader never sees half a file
        content = _packed(values.detach())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(content, partial)
            os.replace(partial, path)
        except (OSError, RuntimeError) as error:  # the latter is torch's on a full disk
            self._is_broken = True
            logger.error("gradients are not dumped any more: %s", error)


def _packed(values: torch.Tensor) -> dict[str, Any]:
    """The content of a file: non-zero values and indices, or all values if that is no larger."""
    dense_N = values.to_dense().flatten()
    sparse_N = dense_N.to_sparse()
    numel, value_bytes = dense_N.numel(), dense_N.dtype.itemsize
    index_dtype = torch.int32 if numel < 2**31 else torch.int64
    index_K, value_K = sparse_N.indices()[0].to(index_dtype), sparse_N.values()
    content: dict[str, Any] = {"version": VERSION, "numel": numel}
    if value_K.numel() * (index_dtype.itemsize + value_bytes) >= numel * value_bytes:
        # A clone, because `torch.save` writes the whole storage that a view lies in.
        return content | {"values": dense_N.cpu().clone()}
    return content | {"values": value_K.cpu(), "indices": index_K.cpu()}


def _unpacked(content: dict[str, Any]) -> torch.Tensor:
    """The inverse of `_packed`; raises errors of any class if `content` is not its result."""
    if content["version"] != VERSION:
        raise ValueError(f"version {content['version']}")
    if "indices" not in content:
        return content["values"].view(content["numel"])
    index_1K = content["indices"].unsqueeze(0)
    return torch.sparse_coo_tensor(
        index_1K, content["values"], (content["numel"],), is_coalesced=True, check_invariants=True
    )


class DumpedBucket(NamedTuple):
    """A bucket of a dump, by the names of its folder and its files.

    Attributes:
        group: name of the folder of the ranks that reduce it together.
        stem: the names of its files up to `.<kind>.pt`.
    """

    group: str
    stem: str

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return int(self.group.rsplit("-", 1)[1])


class GradientDump:
    """Reads the files of a `GradientDumpWriter`.

    Attributes:
        folder: of the dump.
        iterations: ascending, those that it holds.
        buckets: by name.
    """

    def __init__(self, path: Path) -> None:
        """Opens the folder of a dump, or of a run that has one.

        Raises:
            ProfileError: there is no dump.
        """
        self.folder = path / FOLDER if (path / FOLDER).is_dir() else path
        names = [entry.name for entry in self.folder.iterdir()] if self.folder.is_dir() else []
        found = filter(None, map(_ITERATION.fullmatch, names))
        self.iterations = sorted(int(match[1]) for match in found)
        if not self.iterations or not self.buckets:
            raise ProfileError(
                f"{path} holds no gradient dump",
                expected=f"a run's folder with {FOLDER}/, or that folder itself",
                got="no such folder" if not path.is_dir() else "none of its files",
                remedy="make one: megatron-sparse train tracking.record_gradients_iters=[10,20]",
            )

    @cached_property
    def buckets(self) -> dict[str, DumpedBucket]:
        """The dump's buckets by name, which is `<group>/<name>` if there are several groups."""
        found: set[DumpedBucket] = set()
        for iteration in self.iterations:
            for file in self._of(iteration).glob("group-*/rank-*/*.pt"):
                group, stem = file.parent.parent.name, file.name.rsplit(".", 2)[0]  # .<kind>.pt
                if _GROUP.fullmatch(group):
                    found.add(DumpedBucket(group, stem))
        has_several_groups = len({bucket.group for bucket in found}) > 1
        named: dict[str, DumpedBucket] = {}
        for bucket in sorted(found):
            name = unquote(bucket.stem)
            named[f"{bucket.group}/{name}" if has_several_groups else name] = bucket
        return named

    def kinds(self, iteration: int, bucket: str) -> list[Kind]:
        """The kinds of tensors that a bucket's first rank dumped in an iteration.

        Raises:
            ProfileError: there is no such iteration or bucket.
        """
        return [kind for kind in Kind if self._files(iteration, bucket, kind)[0].is_file()]

    def read(self, iteration: int, bucket: str, kind: Kind = Kind.GRADIENT) -> list[torch.Tensor]:
        """A bucket's tensor of each rank: 1-D, dense or torch's sparse COO, as it was stored.

        Raises:
            ProfileError: there is no such iteration or bucket; a rank's file is missing, damaged,
                or of another size than the first one's.
        """
        found = [_load(file) for file in self._files(iteration, bucket, kind)]
        sizes = [values.numel() for values in found]
        if len(set(sizes)) > 1:
            raise ProfileError(
                f"{self.folder}: iteration {iteration}, bucket {bucket}: the ranks do not fit",
                expected=f"{sizes[0]} elements on every rank",
                got=sizes,
                remedy="dump again: these are files of different models",
            )
        return found

    def _files(self, iteration: int, bucket: str, kind: Kind) -> list[Path]:
        """Each rank's file of a bucket's tensor, whether or not the file exists.

        Raises:
            ProfileError: there is no such iteration or bucket.
        """
        for what, asked, known in (
            ("iteration", iteration, self.iterations),
            ("bucket", bucket, list(self.buckets)),
        ):
            if asked not in known:
                raise ProfileError(
                    f"{self.folder} does not have that {what}",
                    expected=", ".join(map(str, known)),
                    got=asked,
                )
        dumped = self.buckets[bucket]
        folder, name = self._of(iteration) / dumped.group, f"{dumped.stem}.{kind}.pt"
        return [folder / f"rank-{rank:04d}" / name for rank in range(dumped.world_size)]

    def _of(self, iteration: int) -> Path:
        return self.folder / f"iteration-{iteration:06d}"


def _load(path: Path) -> torch.Tensor:
    """One file's tensor, checked: a dump may come from somebody else."""
    try:
        return _unpacked(torch.load(path, map_location="cpu", weights_only=True))
    except FileNotFoundError:
        raise ProfileError(
            f"a gradient dump is incomplete: {path} is missing",
            expected="a file of every rank",
            got="no such file",
            remedy="bring the folders of all nodes together, or dump again",
        ) from None
    except Exception as error:  # torch's reader may raise anything on damaged bytes
        raise ProfileError(
            f"{path} is no dumped gradient",
            expected=f"numel, values and indices, as version {VERSION} writes them",
            got=first_line(error),
            remedy="dump again",
        ) from None
