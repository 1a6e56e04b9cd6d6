"""`bench bucket` on the CPU: its rows and its arithmetic, and the host's time beside NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_sparse.bench.exchange import stub_nccl
from megatron_sparse.bench.exchange.bucket import BucketRow, run
from megatron_sparse.bench.exchange.options import BucketSweep
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.errors import WireFormatError
from tests.bench.running import read_rows, run_cli

FIXED_SIZES = [
    "dense",
    "dense_ring",
    "dense_allpairs",
    *(name for name, scheme in SCHEMES.items() if scheme.takes_slots),
]


@pytest.mark.parametrize("scheme", ["direct", "agsparse", "dense_ring"])
def test_rows(scheme: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    sweep = BucketSweep(
        min_bytes=2**14, max_bytes=2**16, schemes=[scheme], codecs=("cuda",), warmup=0, iters=2
    )
    rows = run(sweep, path)
    assert [row.bytes for row in rows] == [2**14, 2**16]
    for row, written in zip(rows, read_rows(path), strict=True):
        assert (row.scheme, row.wrong) == (scheme, 0)
        assert row.codec == ("cuda" if torch.cuda.is_available() else "cpu")
        for name in ("time_us", "floor_us", "host_us", "busy_us", "both_us"):
            assert written[name] == getattr(row, name) > 0
        assert row.waits is None or torch.cuda.is_available()
    assert not dist.is_initialized(), "the group of one rank is gone"


def test_hidden_is_the_share_of_the_shorter_one() -> None:
    row = BucketRow(bytes=4, scheme="direct", codec="cpu", queues=None, wrong=0)
    assert row.hidden is None
    row.time_us, row.busy_us, row.both_us = 10.0, 20.0, 24.0
    assert row.hidden == pytest.approx(0.6)


@pytest.mark.gpu
def test_triton_has_a_row_beside_the_compiled_kernels() -> None:
    rows = run(BucketSweep(min_bytes=2**16, max_bytes=2**16, warmup=0, iters=1))
    assert [(row.codec, row.wrong) for row in rows] == [("cuda", 0), ("torch", 0)]


class TestStubbedNccl:
    """`--stub-nccl`: its posts, decoding of the peers' messages, output."""

    def measure(self, ranks, schemes, **options):
        sweep = BucketSweep(
            stub_nccl=True, ranks=ranks, schemes=schemes, warmup=1, iters=2, **options
        )
        return list(stub_nccl.rows(sweep))

    @pytest.mark.parametrize("n", [2, 5])
    def test_independent_messages_are_one_call_and_the_rounds_of_a_ring_one_each(self, n):
        posts = {row.scheme: row.posts for row in self.measure([n], FIXED_SIZES)}
        assert posts["dense"] == posts["agsparse"] == 1
        assert posts["direct"] == posts["dense_allpairs"] == 2
        assert posts["dense_ring"] == 2 * (n - 1)
        assert not dist.is_initialized()

    def test_the_time_in_c10d_is_a_part_of_the_time(self):
        for row in self.measure([3], ["dense", "direct"]):
            assert 0 < row.c10d_us < row.host_cpu_us

    def test_messages_of_the_peers_are_decoded(self, monkeypatch):
        record = stub_nccl._record

        def damaged(*arguments):
            came = record(*arguments)
            if came:  # dense uses the backend's messages
                came[0][20] ^= 1
            return came

        monkeypatch.setattr(stub_nccl, "_record", damaged)
        with pytest.raises(WireFormatError, match="rank 1: field checksum"):
            self.measure([3], ["direct"])
        assert not dist.is_initialized()

    def test_rows_are_printed_and_written(self, tmp_path, capsys):
        path = tmp_path / "rows.jsonl"
        options = ["--ranks=2", "--scheme=dense,direct", "--iters=2", "--nccl-engine"]
        assert run_cli("bucket", "--stub-nccl", *options, f"--json={path}") == 0
        rows = read_rows(path)
        assert [(row["scheme"], row["nccl_engine"]) for row in rows] == [
            ("dense", False),
            ("direct", False),
            ("direct", True),
        ]
        names = "scheme world_size posts host_cpu_us c10d_us dense_us nccl_engine"
        assert set(rows[0]) == set(names.split())
        printed = capsys.readouterr().out
        assert "no time of launches, of NCCL or of the device" in printed
        assert "direct (engine)" in printed

    def test_the_engine_posts_once_and_asks_c10d_for_nothing(self):
        rows = self.measure([4], ["dense", "agsparse", "direct"], nccl_engine=True)
        engines = [row for row in rows if row.nccl_engine]
        assert [row.scheme for row in engines] == ["agsparse", "direct"]
        for row in engines:
            assert (row.posts, row.c10d_us) == (1, 0)
            assert row.host_cpu_us > 0
