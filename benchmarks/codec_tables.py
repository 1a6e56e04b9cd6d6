"""Makes the tables of docs/codecs.md from what `bench codecs --json` wrote.

    python benchmarks/codec_tables.py FILE.jsonl...

One line for each operation: its own numbers, and the first peer's beside them. Of several formats
that all became dense, the first stands for all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COLUMNS = (
    "size (MiB)",
    "dtype",
    "density",
    "operation",
    "record",
    "time (ms)",
    "copy (ms)",
    "time / copy",
    "peer (ms)",
)
_KEY = ("count", "dtype", "density", "op", "format")
_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of some rows, of which each peer has one."""
    groups: dict[tuple[Any, ...], dict[str | None, dict[str, Any]]] = {}
    for row in rows:
        group = groups.setdefault(tuple(row[k] for k in _KEY), {})
        group.setdefault(row["peer"], row)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for group in groups.values():
        lines.append("| " + " | ".join(_cells(list(group.values()))) + " |")
    return "\n".join(lines)


def _cells(rows: list[dict[str, Any]]) -> list[str]:
    own = rows[0]
    size = own["count"] * _ITEM_BYTES[own["dtype"]] / 2**20
    head = [f"{size:g}", own["dtype"], f"{own['density']:g}", own["op"], own["format"]]
    if own["wrong"]:
        return [*head, f"{own['wrong']} wrong", "", "", ""]
    peer = next((row for row in rows if row["peer"]), None)
    return [
        *head,
        _ms(own["time_us"]),
        _ms(own["copy_us"]),
        f"{own['ratio']:.2f}",
        "" if peer is None else f"{_ms(peer['peer_us'])} ({_times(peer)}, {peer['peer']})",
    ]


def _times(row: dict[str, Any]) -> str:
    return f"{row['peer_us'] / row['time_us']:.1f}x"


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(markdown([json.loads(line) for line in Path(name).read_text().splitlines()]))
