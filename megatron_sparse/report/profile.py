"""`megatron-sparse profile`: the sparsity of the gradients that a run recorded (a gradient dump).

The table has a row for each bucket, and one for all buckets of a process group as if they were one;
its numbers are means over the recorded iterations.
"""

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
COLUMNS = ("elements", "density", "overlap", "min-max", "of the sum", "densified", "skewness")


@dataclass(frozen=True)
class Sample:
    """One bucket in one iteration, on all ranks of its group.

    Attributes:
        iteration: number of the iteration, as the training loop counts.
        bucket: name of the bucket; ends in `ALL` for all buckets of the group.
        elements: for each rank, the indices of its non-zero elements: int64, ascending.
        profile: density, overlap and skewness, computed from all elements.
    """

    iteration: int
    bucket: str
    elements: Sequence[np.ndarray]
    profile: SparsityProfile


def run(path: Path, kind: str | None) -> list[dict[str, Any]]:
    """Prints the table of a dump, and returns its profiles for JSON.

    `path` is a run's folder, or the folder of a dump. `kind` is `gradient` or `selected`; None
    takes `selected` if that was recorded.

    Returns:
        A JSON object for each bucket and iteration: `iteration`, `bucket`, `kind`, `profile`.

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
    """The kind that --kind names; without it, `selected` if any bucket has selected gradients."""
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
    """For each iteration, a sample of each bucket, then one of each group's buckets together.

    A bucket that was synchronised densely has no `selected` gradient.

    Raises:
        ProfileError: no gradient of the kind was recorded, or a file is missing or damaged.
    """
    found = False
    for iteration in dump.iterations:
        samples_of_group: dict[str, list[Sample]] = {}
        for name, bucket in dump.buckets.items():
            if kind not in dump.kinds(iteration, name):
                continue
            gradients = dump.read(iteration, name, kind)
            elements = [nonzero_elements(gradient) for gradient in gradients]
            sample = Sample(iteration, name, elements, profile_of(elements, gradients[0].numel()))
            samples_of_group.setdefault(bucket.group, []).append(sample)
            found = True
            yield sample
        for group, samples in samples_of_group.items():
            name = ALL if len(samples_of_group) == 1 else f"{group}/{ALL}"
            yield _together(iteration, name, samples)
    if not found:
        raise ProfileError(
            f"{dump.folder} holds no {kind} gradients",
            expected="a run that compresses, or --kind gradient",
            got=f"iterations {_listed(dump.iterations)} without",
            remedy="read the other kind with --kind, or record again",
        )


def _together(iteration: int, name: str, samples: list[Sample]) -> Sample:
    """Makes one sample of several buckets, as if they were concatenated into one bucket."""
    sizes = [sample.profile.numel for sample in samples]
    starts = np.cumsum([0, *sizes[:-1]])
    elements: list[np.ndarray] = []
    for of_rank in zip(*(sample.elements for sample in samples), strict=True):
        shifted = [own_K + start for own_K, start in zip(of_rank, starts, strict=True)]
        elements.append(np.concatenate(shifted))
    return Sample(iteration, name, elements, profile_of(elements, sum(sizes)))


def print_table(samples: Sequence[Sample], title: str) -> None:
    """Prints a line for each bucket: means over the iterations. Lines of `ALL` are bold."""
    print(title)
    table = plain_table("", "bucket", *COLUMNS)
    by_bucket: dict[str, list[Sample]] = {}
    for sample in samples:
        by_bucket.setdefault(sample.bucket, []).append(sample)
    for name, members in by_bucket.items():
        bold = name.rpartition("/")[2] == ALL
        cells = _cells([sample.profile for sample in members])
        table.add_row(name, *cells, style="bold" if bold else None)
    # In a pipe or file rich would assume 80 columns, and cut the cells.
    console = Console(highlight=False)
    Console(highlight=False, width=None if console.is_terminal else 132).print(table)
    print("overlap: median over pairs of ranks; skewness: at as many partitions as ranks")


def _cells(profiles: Sequence[SparsityProfile]) -> list[str]:
    """A bucket's cells, in the order of `COLUMNS`: means over its profiles, one an iteration."""
    n = profiles[0].world_size  # `skewness` lacks it if it is 1 or larger than the bucket
    # `overlap` has the quantiles 0, 0.25, 0.5, 0.75 and 1 over pairs of ranks.
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
