"""Puts the numbers of `gpu_check.sh` into docs/results/gpu.md.

    python scripts/gpu_results.py runs/gpu-call-1.tar.gz [ARCHIVE...]

Each row of the table is a question; its numbers are milliseconds and the share of a copy's speed,
the copy moving the fewest bytes that the work can do with. Without archives the table is empty.
"""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "gpu.md"
BEGIN, END = "<!-- the table of scripts/gpu_results.py -->", "<!-- its end -->"
SIZES = {2**26: "64 MiB", 2**28: "256 MiB", 2**30: "1 GiB"}
"""Bytes of the gradient, or of the parameters."""
BF16_BYTES = 2


@dataclass(frozen=True)
class Question:
    """A row of the table.

    Attributes:
        text: the row's name.
        op: of `bench codecs`, or `encode` or `decode` of `bench parameters`.
        form: the record's format, or the coder of parameters.
        goal: the share of a copy's speed that is wanted from 256 MiB on, in percent.
    """

    text: str
    op: str
    form: str
    goal: int | None = None


QUESTIONS = (
    Question("select and encode 1 %, COO", "prune_encode", "coo", 85),
    Question("`safe`: select 22 %, 4 bits, Rice", "prune_encode", "rice_q4", 60),
    Question("`dense_q`: every element in 4 bits", "prune_encode", "dense_q4", 60),
    Question("add one record, 1 %, COO", "decode_add", "coo"),
    Question("add one record of `safe`", "decode_add", "rice_q4"),
    Question("sum of 8 records, 1 %, COO", "decode_sum", "coo"),
    Question("sum of 8 records of `safe`", "decode_sum", "rice_q4"),
    Question("sum of 8 records of `dense_q`", "decode_sum", "dense_q4"),
    Question("place a gathered sum, 86 %, 8 bits", "place", "rice_q8", 50),
    Question("encode moves, rANS", "encode", "rans"),
    Question("decode moves, rANS", "decode", "rans"),
)


@dataclass(frozen=True)
class Answer:
    """What one run found.

    Attributes:
        wrong: bytes that are not the CPU's; then the rest means nothing.
        time_us: median.
        share: of a copy's speed.
    """

    wrong: int
    time_us: float
    share: float


def main(archives: list[str]) -> int:
    """Rewrites the table; returns the exit code."""
    rows = [row for archive in archives for row in rows_of(Path(archive))]
    text = PAGE.read_text("utf-8")
    head, rest = text.split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{table(answers(rows))}\n{END}{rest.split(END)[1]}", "utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(rows)} rows read")
    return 0


def rows_of(archive: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines of the stage `speed`."""
    with tarfile.open(archive) as files:
        for member in files:
            name = Path(member.name).name
            file = files.extractfile(member) if name.startswith("speed.") else None
            if file is not None and name.endswith(".jsonl"):
                yield from map(json.loads, file.read().decode().splitlines())


def answers(rows: list[dict[str, Any]]) -> dict[tuple[str, str, int], Answer]:
    """Answers by op, format or coder, and bytes of the gradient or the parameters."""
    found, copied_bytes_per_us = {}, {}
    codec_rows = [row for row in rows if "op" in row]
    for row in codec_rows:
        size = row["count"] * 4  # fp32
        share = 0.0 if row["wrong"] else 1 / row["ratio"]
        found[row["op"], row["format"], size] = Answer(row["wrong"], row["time_us"] or 0.0, share)
        if row["copy_us"]:
            copied_bytes_per_us[size] = row["bytes_moved"] / row["copy_us"]
    parameter_rows = [row for row in rows if "coder" in row]
    for row in parameter_rows:
        size = row["numel"] * BF16_BYTES
        # Each way reads or writes both numbers and the record.
        moved = row["numel"] * (2 * BF16_BYTES + row["bits"] / 8)
        for op in ("encode", "decode"):
            time_us = size / row[f"{op}_gbps"] / 1e3  # 1 GB/s is 1e3 bytes a microsecond
            share = moved / time_us / copied_bytes_per_us[size]
            found[op, row["coder"], size] = Answer(row["wrong"], time_us, share)
    return found


def table(found: dict[tuple[str, str, int], Answer]) -> str:
    """The table, in Markdown."""
    rows = [["", "goal", *SIZES.values()], ["---"] * (2 + len(SIZES))]
    for question in QUESTIONS:
        cells = [cell(found.get((question.op, question.form, size))) for size in SIZES]
        goal = "" if question.goal is None else f"{question.goal} %"
        rows.append([question.text, goal, *cells])
    return "\n".join(f"|{'|'.join(row)}|" for row in rows)


def cell(answer: Answer | None) -> str:
    """Milliseconds and share, or what is wrong; empty if it has not run."""
    if answer is None:
        return ""
    if answer.wrong:
        return f"{answer.wrong} bytes WRONG"
    return f"{answer.time_us / 1e3:.2f}, {100 * answer.share:.0f} %"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
