"""Runs benches in tests: by the command line, on virtual ranks, and between processes."""

from __future__ import annotations

import dataclasses
import json
import subprocess

import pytest

from megatron_sparse.bench.exchange import frame
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.run import local_ranks
from tests.waiting import DEADLINE_S


def run_cli(bench: str, *arguments: str) -> int:
    """The exit code of `megatron-sparse bench`, in this process."""
    # Here, because a GPU machine without Typer runs the tests that call no command.
    from megatron_sparse.cli import main

    with pytest.raises(SystemExit) as ended:
        main.main(["bench", bench, *arguments])
    return int(ended.value.code or 0)


def run_process(bench: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`megatron-sparse bench` as a process of its own, which starts ranks."""
    command = local_ranks.command_line(["bench", bench, *arguments])
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def run_loopback(ranks: int, bench: str, *arguments: str) -> int:
    """The exit code of `megatron-sparse bench` as every rank of a launch on this machine."""
    return local_ranks.run_loopback(local_ranks.command_line(["bench", bench, *arguments]), ranks)


def run_virtual(bench, cases, topology, path=None):
    """The JSON objects of a bench's rows on virtual ranks."""
    return [row.to_dict() for row in frame.run_virtual(bench, cases, topology, path)]


def read_rows(path):
    """The JSON objects that a bench has written."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def break_scheme(monkeypatch, name: str, change) -> None:
    """Lets a scheme's sums be wrong: `change` mutates the bucket's gradient [N] after it."""

    def broken(exchange, *arguments):
        sent = yield from real(exchange, *arguments)
        change(exchange.bucket.grad_N)
        return sent

    real = SCHEMES[name].run
    monkeypatch.setitem(SCHEMES, name, dataclasses.replace(SCHEMES[name], run=broken))


def add_one(grad_N) -> None:
    """For `break_scheme`: one element is off by one."""
    grad_N[3] += 1
