"""`bench codecs`: the speed of encoding and adding messages, beside a copy and beside peers.

The committed baseline holds ratios to the time of a plain copy, and their noise. Ratios are more
comparable between machines than seconds. The copy is measured in the same rounds, so load on the
machine slows both down. Repeated measurements give the noise of each row that is left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megatron_sparse.bench.codec import hashing, records
from megatron_sparse.bench.codec.frame import Case, CodecRow, measure
from megatron_sparse.bench.codec.options import CodecSweep
from megatron_sparse.bench.table import describe_cpu, local
from megatron_sparse.errors import ConfigError, MegatronSparseError
from megatron_sparse.run.rows import write_text

LEAST_NOISE = 0.25
"""The smallest noise stated: other machines differ by more than three runs on one machine show."""

_KEY = ("op", "format", "dtype", "density", "count")

type Key = tuple[Any, ...]


def run(
    sweep: CodecSweep,
    json_path: Path | None = None,
    check: Path | None = None,
    margin: float = 1.0,
    save_baseline: Path | None = None,
) -> list[CodecRow]:
    """Prints the table and returns its rows.

    Args:
        sweep: the options.
        json_path: file for one JSON object a line; None writes none.
        check: a baseline to compare with, as `save_baseline` writes it.
        margin: a row may exceed its baseline by this many times the noise stated there.
        save_baseline: measures three times and writes ratios and noise to this file.

    Raises:
        ConfigError: an argument is out of range, or a file cannot be read or written.
        MegatronSparseError: a row is slower than the baseline allows.
    """
    expected = None if check is None else read_baseline(check)
    runs = [_measure(sweep, json_path) for _ in range(1 if save_baseline is None else 3)]
    if save_baseline is not None:
        method = f"{describe_cpu(sweep.threads)}, {sweep.warmup} + {sweep.iters} rounds, medians"
        write_baseline(save_baseline, runs, method)
    if expected is not None:
        compare(runs[-1], expected, margin)
    return runs[-1]


def _where(sweep: CodecSweep) -> str:
    if sweep.device != "cuda":
        return "CPU, medians"
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, medians of events' times"


def _rows(sweep: CodecSweep) -> Iterator[CodecRow]:
    device, swept = torch.device(sweep.device), (sweep.dtypes, sweep.densities, sweep.forms)
    cases = (
        Case(size, 1.0 if form == "dense_q4" else density, dtype, form, device)
        for size, dtype, density, form in product(sweep.sizes(), *swept)
    )
    for case in dict.fromkeys(cases):
        if case.form in hashing.MAKERS:
            tasks = hashing.MAKERS[case.form](case)
        else:
            tasks = records.make_tasks(case, with_peers=sweep.peers)
        for task in tasks:
            if task.op in sweep.ops:
                yield from measure(case, task, sweep, peers=sweep.peers)


_measure = local(_where, _rows)


def write_baseline(path: Path, runs: Sequence[Sequence[CodecRow]], header: str) -> None:
    """Writes each row's median ratio over several runs, and as noise the largest excess over it.

    Raises:
        ConfigError: a row is wrong, or the file cannot be written.
    """
    measured, lines = [_ratios(rows) for rows in runs], []
    for key in measured[0]:
        found = [ratios[key] for ratios in measured]
        noise = max(LEAST_NOISE, max(found) / median(found) - 1)
        numbers = {"ratio": round(median(found), 3), "noise": round(noise, 3)}
        lines.append("    " + json.dumps(dict(zip(_KEY, key, strict=True)) | numbers))
    rows = ",\n".join(lines)
    write_text(path, f'{{\n  "measured": {json.dumps(header)},\n  "rows": [\n{rows}\n  ]\n}}\n')


def read_baseline(path: Path) -> dict[Key, tuple[float, float]]:
    """The (ratio, noise) of each row of a baseline.

    Raises:
        ConfigError: it cannot be read, or is not a baseline.
    """
    try:
        rows = json.loads(path.read_text())["rows"]
        return {tuple(row[k] for k in _KEY): (row["ratio"], row["noise"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "the baseline cannot be read",
            expected="a file that --save-baseline wrote",
            got=f"{path}: {error!r}",
        ) from error


def compare(
    rows: Sequence[CodecRow], expected: dict[Key, tuple[float, float]], margin: float
) -> None:
    """Compares the rows that have a baseline, and prints how many these are.

    Raises:
        MegatronSparseError: a ratio exceeds `ratio * (1 + noise * margin)` of the baseline.
        ConfigError: no row has a baseline.
    """
    measured = _ratios(rows)
    shared = [key for key in measured if key in expected]
    if not shared:
        raise ConfigError(
            "nothing that was measured is in the baseline",
            expected="sizes, densities, dtypes and formats that it holds",
            got=f"{len(measured)} other rows",
            remedy="measure a row of the baseline's file",
        )
    slower = []
    for key in shared:
        ratio, noise = expected[key]
        limit = ratio * (1 + noise * margin)
        if measured[key] > limit:
            slower.append(f"{' '.join(map(str, key))}: {measured[key]:.2f} > {limit:.2f}")
    if slower:
        raise MegatronSparseError(
            f"{len(slower)} of {len(shared)} rows are slower than the baseline",
            expected="time / copy within the baseline's noise",
            got="; ".join(slower),
            remedy="measure again on a quiet machine; if the rows stay slow, look for the cause",
        )
    print(f"# {len(shared)} rows are within the baseline")


def _ratios(rows: Sequence[CodecRow]) -> dict[Key, float]:
    wrong = [row for row in rows if row.ratio is None]
    if wrong:
        raise MegatronSparseError(
            "a codec is wrong, so its speed means nothing", expected="#wrong 0", got=wrong[0]
        )
    return {tuple(getattr(row, k) for k in _KEY): row.ratio for row in rows if row.ratio}
