"""When the ranks were ready: the lines of a run, their statistics, and which rank was last.

`readiness.jsonl` has one line for each bucket and iteration: how long each rank of the group waited
for the last one, in milliseconds (`waited_ms`, 0 for the straggler). Runs write it unless
`straggler.mode` is `off` or `pinned`.
"""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_sparse.errors import ConfigError
from megatron_sparse.recording import ReadinessRecord
from megatron_sparse.straggler.detector import DelayStatistics, delay_s, last_rank
from megatron_sparse.telemetry.lines import other_version, read_lines

READINESS_FILE = "readiness.jsonl"


def readiness_line(record: ReadinessRecord) -> str:
    """The line of `readiness.jsonl` for one bucket in one step."""
    return json.dumps(
        {
            "iteration": record.step + 1,
            "bucket": record.bucket,
            "waited_ms": [round(waited_s * 1e3, 4) for waited_s in record.waited_s],
        },
        separators=(",", ":"),
    )


def load_readiness(run_dir: Path) -> dict[str, list[ReadinessRecord]]:
    """Reads the measured delays of a run: by bucket, in the order of steps.

    Raises:
        ConfigError: nothing was measured, or the file is not what a run writes.
    """
    found: dict[str, list[ReadinessRecord]] = defaultdict(list)
    for record in _records(run_dir):
        found[record.bucket].append(record)
    return dict(found)


def summary_of_run(run_dir: Path) -> dict[str, Any] | None:
    """`summary_of` all delays of a run; of a line it keeps only the delay and the last rank.

    Raises:
        ConfigError: as of `load_readiness`.
    """
    delays: dict[str, array[float]] = defaultdict(lambda: array("d"))
    last_ranks: dict[str, array[int]] = defaultdict(lambda: array("i"))
    for record in _records(run_dir):
        delays[record.bucket].append(delay_s(record.ready_s))
        last_ranks[record.bucket].append(last_rank(record.ready_s))
    return summary_of(DelayStatistics.of_delays(delays.values(), [*last_ranks.values()]))


def _records(run_dir: Path) -> Iterator[ReadinessRecord]:
    """The records of a run, line by line; raises the errors of `load_readiness`."""
    path = Path(run_dir) / READINESS_FILE
    try:
        for line in read_lines(path):
            waited_s = tuple(float(waited_ms) / 1e3 for waited_ms in line["waited_ms"])
            yield ReadinessRecord(line["bucket"], line["iteration"] - 1, waited_s)
    except OSError as error:
        raise ConfigError(
            f"{run_dir} holds no measured delays",
            expected=f"a run's folder with {READINESS_FILE}",
            got=error.strerror,
            remedy="train at least three iterations with straggler.mode=observe or persistent",
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise other_version(path, error, "read it with the version that trained") from None


def statistics_of(buckets: Sequence[Sequence[ReadinessRecord]]) -> DelayStatistics | None:
    """Statistics over the records of all given buckets; None without records."""
    return DelayStatistics.of([[record.ready_s for record in records] for records in buckets])


def summary_of(statistics: DelayStatistics | None) -> dict[str, Any] | None:
    """The statistics as fields of `summary.json`, in milliseconds."""
    if statistics is None:
        return None
    return {
        "count": statistics.count,
        "median_ms": statistics.median_s * 1e3,
        "mean_ms": statistics.mean_s * 1e3,
        "max_ms": statistics.max_s * 1e3,
        "persistence": statistics.persistence,
        "rank": statistics.rank,
        "share": statistics.share,
    }


def step_scalars(records: Sequence[ReadinessRecord], without: int = 0) -> dict[str, float]:
    """A step's straggler metrics for the dashboards.

    `straggler/delay_ms` (summed over buckets) and `straggler/rank` (with the longest delay) belong
    to the step before the last, `straggler/buckets_without` to this one.

    Args:
        records: records of the step before the last; empty if nothing is measured.
        without: number of buckets that skipped a rank.
    """
    if not records:
        return {"straggler/buckets_without": float(without)} if without else {}
    longest = max(records, key=lambda record: delay_s(record.ready_s))
    return {
        "straggler/buckets_without": float(without),
        "straggler/delay_ms": sum(delay_s(record.ready_s) for record in records) * 1e3,
        "straggler/rank": float(last_rank(longest.ready_s)),
    }
