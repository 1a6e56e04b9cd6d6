"""Mistakes on the command line of the benches that exchange messages: one typed error each."""

from __future__ import annotations

import pytest

from megatron_sparse.run import local_ranks
from tests.bench.running import run_cli

NOWHERE = "--json=no/such/folder/rows.jsonl"


def check_mistake(capsys, command: str, words: str) -> None:
    """The command ends with one typed error that has these words."""
    assert run_cli(*command.split()) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1
    assert words in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("collectives --scheme=telepathy", "direct"),
        ("collectives --dtype=fp8", "fp32"),
        ("collectives --op=gather", "all_reduce"),
        ("collectives --density=2", "(0, 1]"),
        ("collectives --min-bytes=2M --max-bytes=1M", "64 to max_bytes"),
        ("collectives --min-bytes=64 --max-bytes=64 --ranks=100", "--min-bytes"),
        ("collectives --format=zip", "pici"),
        ("collectives --value-bits=5", "32 | 8 | 4 | 3 | 2"),
        ("collectives --value-bits=q4", "such as 2,4,8"),
        ("collectives --sum-bits=1", "8 | 4 | 3 | 2"),
        ("collectives --value-bits=4 --format=coo --virtual --scheme=direct", "auto | rice"),
        ("collectives --timeout=0", "above 0"),
        (f"collectives {NOWHERE}", "no folder no/such/folder"),
        ("collectives --netbed", "--mbit R"),
        ("collectives --netbed --mbit=100 --virtual", "--virtual"),
        ("collectives --scheme=ssar_rd --op=reduce_scatter", "nothing to measure"),
        ("collectives --nccl-engine", "without a capacity"),
        ("collectives --level=rack", "rank | node"),
        ("collectives --no-prune", "`time_us` less `prune_us`"),
        ("collectives --nccl-engine --capacity=1.25 --virtual", "virtual ranks have no NCCL"),
        ("collectives --ranks=2 --ranks-per-node=2", "expected: --netbed or --virtual"),
        ("collectives --delay-ms=-1", "0 or more"),
        ("collectives --delay-ms=2000 --timeout=1", "less than --timeout"),
        ("gather --virtual --ranks=1", "2 or more"),
        ("row-sparse --virtual", "real ranks"),
        ("gather --way=flat", "both ways"),
        ("bucket --codecs=cuda,rust", "codecs is out of range"),
        ("bucket --min-bytes=1M --max-bytes=64K", "min_bytes is out of range"),
        ("bucket --stub-nccl --scheme=direct", "`host_us`"),
        ("stragglers --netbed --delay-ms=0,auto", "bench collectives --delay-ms"),
        ("planner --quick --json rows.jsonl", "`plan RUN`"),
        ("host --ranks 2 --json rows.jsonl", "use `bench bucket`"),
    ],
)
def test_mistakes_are_one_error(command, words, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    check_mistake(capsys, command, words)


def test_ranks_must_be_those_that_were_started(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_mistake(capsys, "collectives --ranks=3", "--ranks")


def test_no_test_bed_outside_of_a_checkout(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(local_ranks, "NETBED", tmp_path / "netbed.sh")
    check_mistake(capsys, "collectives --netbed --mbit=100", "checkout")
