"""`megatron-sparse profile`: the sparsity of the gradients in a gradient dump.

The table has a row for each bucket and one for all of a process group, concatenated; its numbers
are means over the recorded iterations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console

from megatron_sparse.config.checks import one_of
from megatron_sparse.errors import ProfileError
from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.sparsity.characteristics import nonzero_elements, profile_of
from megatron_sparse.sparsity.gradient_dump import GradientDump, Kind
from megatron_sparse.telemetry.console import plain_table

ALL = "all"
"""The row of all buckets of a group together."""
COLUMNS = (
    "elements",
    "density",
    "overlap",
    "min-max",
    "of the sum",
    "densified",
    "skewness",
)


@dataclass(frozen=True)
class Sample:
    """One bucket in one iteration, on all ranks of its group.

    Attributes:
        iteration: number of the iteration, as the training loop counts.
        bucket: name of the bucket; ends in `ALL` for all buckets of the group.
        elements: indices of each rank's non-zero elements: int64, ascending.
        profile: the exact profile.
    """

    iteration: int
    bucket: str
    elements: Sequence[np.ndarray]
    profile: SparsityProfile


def run(path: Path, kind: str | None) -> list[dict[str, Any]]:
    """Prints the table.

    Args:
        path: a run's folder, or a dump.
        kind: `gradient` or `selected`; None takes `selected` if that was recorded.

    Returns:
        A JSON object for each bucket and iteration.

    Raises:
        ProfileError: the dump is missing, incomplete or damaged.
        ConfigError: a value is wrong.
    """
    dump = GradientDump(path)
    chosen = _kind(dump, kind)
    samples = list(samples_of(dump, chosen))
    what = "selected gradients" if chosen is Kind.SELECTED else "gradients before selection"
    print_table(samples, f"{path}: {what}; iterations {_listed(dump.iterations)}")
    return [
        {
            "iteration": sample.iteration,
            "bucket": sample.bucket,
            "kind": str(chosen),
            "profile": sample.profile.to_dict(),
        }
        for sample in samples
    ]


def _kind(dump: GradientDump, kind: str | None) -> Kind:
    """The kind of gradients to read, from the flag --kind; refuses a wrong one."""
    if kind is not None:
        one_of("--kind", kind, tuple(Kind))
        return Kind(kind)
    has_selected = any(
        Kind.SELECTED in dump.kinds(iteration, bucket)
        for iteration in dump.iterations
        for bucket in dump.buckets
    )
    return Kind.SELECTED if has_selected else Kind.GRADIENT


def _listed(iterations: Sequence[int]) -> str:
    shown = [str(iteration) for iteration in iterations[:8]]
    return ", ".join(shown) + (f" and {len(iterations) - 8} more" if len(iterations) > 8 else "")


def samples_of(dump: GradientDump, kind: Kind) -> Iterator[Sample]:
    """Every bucket of every iteration that has it, and after a group's buckets all together.

    Args:
        dump: the gradient dump.
        kind: the kind of gradient. A bucket that was synchronised densely has none selected.

    Raises:
        ProfileError: no gradient of the kind was recorded, or a file is missing or damaged.
    """
    found = False
    for iteration in dump.iterations:
        groups: dict[str, list[Sample]] = {}
        for name, bucket in dump.buckets.items():
            if kind not in dump.kinds(iteration, name):
                continue
            gradients = dump.read(iteration, name, kind)
            elements = [nonzero_elements(gradient) for gradient in gradients]
            sample = Sample(iteration, name, elements, profile_of(elements, gradients[0].numel()))
            groups.setdefault(bucket.group, []).append(sample)
            yield sample
        for group, members in groups.items():
            found = True
            yield _together(iteration, ALL if len(groups) == 1 else f"{group}/{ALL}", members)
    if not found:
        raise ProfileError(
            f"{dump.folder} holds no {kind} gradients",
            expected="a run that compresses, or --kind gradient",
            got=f"iterations {_listed(dump.iterations)} without",
            remedy="--kind takes the other; or record again",
        )


def _together(iteration: int, name: str, members: list[Sample]) -> Sample:
    """The sample of a process group's buckets, one behind the other as if they were one bucket."""
    elements: list[np.ndarray] = []
    sizes = [member.profile.numel for member in members]
    starts = np.cumsum([0, *sizes[:-1]])
    for of_rank in zip(*(member.elements for member in members), strict=True):
        placed = [own_K + start for own_K, start in zip(of_rank, starts, strict=True)]
        elements.append(np.concatenate(placed))
    return Sample(iteration, name, elements, profile_of(elements, sum(sizes)))


def print_table(samples: Sequence[Sample], title: str) -> None:
    """A line for each bucket: means over the iterations."""
    print(title)
    table = plain_table("", "bucket", *COLUMNS)
    by_bucket: dict[str, list[Sample]] = {}
    for sample in samples:
        by_bucket.setdefault(sample.bucket, []).append(sample)
    for name, members in by_bucket.items():
        bold = name.rpartition("/")[2] == ALL
        cells = _cells([sample.profile for sample in members])
        table.add_row(name, *cells, style="bold" if bold else None)
    # Without a terminal there is no width to keep to, and a cut table says nothing.
    console = Console(highlight=False)
    Console(highlight=False, width=None if console.is_terminal else 132).print(table)
    print("overlap: median over pairs of ranks; skewness: at as many partitions as ranks")


def _cells(profiles: Sequence[SparsityProfile]) -> list[str]:
    """The `COLUMNS` of a bucket: means over its profiles."""
    n = profiles[0].world_size
    # Quantiles 0, 0.5 and 1 of `QUANTILES`.
    least, median, most = (fmean(p.overlap[index] for p in profiles) for index in (0, 2, 4))
    return [
        f"{profiles[0].numel:,}",
        f"{fmean(p.density for p in profiles):.3%}",
        f"{median:.3f}",
        f"{least:.2f}-{most:.2f}",
        f"{fmean(p.sum_density(n) for p in profiles):.3%}",
        f"{fmean(p.densification[n] for p in profiles):.2f}",
        f"{fmean(p.skewness.get(n, 1.0) for p in profiles):.2f}",
    ]
