"""Reads back what programs have written: JSON lines, and the dashboards' own files."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wandb_records(run_dir: Path) -> Iterator[Any]:
    """The records of every `.wandb` file in `run_dir`.

    wandb's reader of its own file left Python with release 0.22; what it read is LevelDB's log
    format: after 7 bytes of file header, blocks of 32 KiB with chunks of (crc, length, type).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        data = path.read_bytes()
        assert data[:4] == b":W&B"
        offset, body = 7, b""
        while offset + 7 <= len(data):
            left = 32768 - offset % 32768
            if left < 7:
                offset += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, offset)
            body += data[offset + 7 : offset + 7 + length]
            offset += 7 + length
            if kind in (1, 4):  # a whole record, or its last chunk
                record = Record()
                record.ParseFromString(body)
                body = b""
                yield record


def wandb_history(run_dir: Path) -> list[dict[str, Any]]:
    rows = []
    for record in wandb_records(run_dir):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in items})
    return rows


def tensorboard_scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """By name: the points (step, value), in fp32, as TensorBoard keeps them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
