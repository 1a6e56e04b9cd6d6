"""When each rank was ready to synchronise a bucket: written, read, and summarised.

`readiness.jsonl` has one line for each bucket and iteration: how long each rank of the group waited
for the last one, in milliseconds (`waited_ms`, 0 for the last, the straggler). Runs write it unless
`straggler.mode` is `off` or `pinned`. The *delay* of a bucket is how much later than all others the
straggler was ready.
"""

import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megatron_sparse.recording import ReadinessRecord
from megatron_sparse.straggler.detector import delay_s, last_rank
from megatron_sparse.telemetry.lines import other_version, read_lines

READINESS_FILE = "readiness.jsonl"


def readiness_line(record: ReadinessRecord) -> str:
    """Returns the line of `readiness.jsonl` for one bucket in one step."""
    return json.dumps(
        {
            "iteration": record.step + 1,  # steps count from 0, iterations from 1
            "bucket": record.bucket,
            "waited_ms": [round(waited_s * 1e3, 4) for waited_s in record.waited_s],
        },
        separators=(",", ":"),
    )


def read_readiness(run_dir: Path) -> Iterator[ReadinessRecord]:
    """Yields the records of a run's `readiness.jsonl`; none if there is no file.

    Raises:
        ConfigError: the file is not what a run writes.
    """
    path = run_dir / READINESS_FILE
    if not path.exists():
        return
    try:
        for line in read_lines(path):
            waited_s = tuple(float(waited_ms) / 1e3 for waited_ms in line["waited_ms"])
            yield ReadinessRecord(line["bucket"], line["iteration"] - 1, waited_s)
    except (KeyError, TypeError, ValueError) as error:
        raise other_version(path, error) from None


def load_readiness(run_dir: Path) -> dict[str, list[ReadinessRecord]]:
    """Reads the records of a run: bucket -> its records in the order of steps."""
    found: dict[str, list[ReadinessRecord]] = defaultdict(list)
    for record in read_readiness(run_dir):
        found[record.bucket].append(record)
    return dict(found)


def summary_of(records: Iterable[ReadinessRecord]) -> dict[str, Any] | None:
    """Computes statistics of the delays, as fields of `summary.json`; None without records.

    Args:
        records: of all buckets, each bucket's in the order of steps.

    Returns:
        `count` of the records; `median_ms`, `mean_ms` and `max_ms` of the delays; `persistence`,
        the share of steps in which the same rank was last as in the step before (None for fewer
        than two steps); `rank`, the one that was last most often, in `share` of the records.
    """
    delays_ms, last_ranks = array("d"), defaultdict[str, array[int]](lambda: array("i"))
    for record in records:
        delays_ms.append(delay_s(record.ready_s) * 1e3)
        last_ranks[record.bucket].append(last_rank(record.ready_s))
    if not delays_ms:
        return None
    repeats = []  # for each two successive steps of a bucket: whether the same rank was last
    for ranks in last_ranks.values():
        repeats += [rank == following for rank, following in pairwise(ranks)]
    counts = Counter(chain(*last_ranks.values()))
    rank = max(counts, key=lambda rank: (counts[rank], -rank))  # of equals, the lowest
    return {
        "count": len(delays_ms),
        "median_ms": median(delays_ms),
        "mean_ms": fmean(delays_ms),
        "max_ms": max(delays_ms),
        "persistence": fmean(repeats) if repeats else None,
        "rank": rank,
        "share": counts[rank] / len(delays_ms),
    }


def step_scalars(records: Sequence[ReadinessRecord], without: int = 0) -> dict[str, float]:
    """Computes a step's straggler metrics for the dashboards.

    Args:
        records: of an earlier step (see `metrics.bucket_scalars`), for `straggler/delay_ms` (summed
            over buckets) and `straggler/rank` (of the longest delay); empty if nothing is measured.
        without: number of buckets of this step that were synchronised without the straggler.
    """
    if not records:  # nothing is measured, or not known yet (a run's first steps)
        return {"straggler/buckets_without": float(without)} if without else {}
    longest = max(records, key=lambda record: delay_s(record.ready_s))
    return {
        "straggler/buckets_without": float(without),
        "straggler/delay_ms": sum(delay_s(record.ready_s) for record in records) * 1e3,
        "straggler/rank": float(last_rank(longest.ready_s)),
    }
