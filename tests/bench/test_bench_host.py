"""`bench host`: its posts, decoding of the peers' messages, output and refusals."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from megatron_sparse.bench import host
from megatron_sparse.bench.host import SCHEMES, HostSweep
from megatron_sparse.cli import main
from megatron_sparse.errors import WireFormatError


def measure(ranks, schemes):
    return list(host.rows(HostSweep(ranks, schemes, warmup=1, iters=2)))


@pytest.mark.parametrize("n", [2, 5])
def test_independent_messages_are_one_call_and_the_rounds_of_a_ring_one_each(n):
    posts = {row.scheme: row.posts for row in measure([n], SCHEMES)}
    assert posts["dense"] == posts["agsparse"] == 1
    assert posts["direct"] == posts["dense_allpairs"] == 2
    assert posts["dense_ring"] == 2 * (n - 1)
    assert not dist.is_initialized()


def test_the_time_in_c10d_is_a_part_of_the_time():
    for row in measure([3], ["dense", "direct"]):
        assert 0 < row.c10d_us < row.host_cpu_us


def test_messages_of_the_peers_are_decoded(monkeypatch):
    record = host._record

    def damaged(*arguments):
        came = record(*arguments)
        if came:  # dense uses the backend's messages
            came[0][20] ^= 1
        return came

    monkeypatch.setattr(host, "_record", damaged)
    with pytest.raises(WireFormatError, match="rank 1: field checksum"):
        measure([3], ["direct"])
    assert not dist.is_initialized()


def test_rows_are_printed_and_written(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    options = ["--ranks", "2", "--scheme", "dense,direct", "--iters", "2", "--json", str(path)]
    with pytest.raises(SystemExit) as ended:
        main.main(["bench", "host", *options])
    assert not ended.value.code
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["scheme"], row["nccl_engine"]) for row in rows] == [
        ("dense", False),
        ("direct", False),
        ("direct", True),
    ]
    assert set(rows[0]) == {
        "scheme",
        "world_size",
        "posts",
        "host_cpu_us",
        "c10d_us",
        "dense_us",
        "nccl_engine",
    }
    printed = capsys.readouterr().out
    assert "no time of launches, of NCCL or of the device" in printed
    assert "direct (engine)" in printed


def test_the_engine_posts_once_and_asks_c10d_for_nothing():
    sweep = HostSweep([4], ["dense", "agsparse", "direct"], warmup=1, iters=2, nccl_engine=True)
    engines = [row for row in host.rows(sweep) if row.nccl_engine]
    assert [row.scheme for row in engines] == ["agsparse", "direct"]
    for row in engines:
        assert (row.posts, row.c10d_us) == (1, 0)
        assert row.host_cpu_us > 0


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--scheme", "zen", "scheme is out of range"),
        ("--ranks", "1", "ranks is out of range"),
        ("--ranks", "two", "--ranks is not a list of numbers"),
        ("--capacity", "0", "capacity is out of range"),
    ],
)
def test_mistakes_are_one_error(option, value, words, capsys):
    with pytest.raises(SystemExit) as caught:
        main.main(["bench", "host", option, value])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
