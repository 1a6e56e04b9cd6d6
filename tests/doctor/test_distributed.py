"""`doctor --distributed` names exactly the ranks that are absent, cut off, slow or late."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_sparse.cli.main import main
from megatron_sparse.doctor import distributed as doctor
from megatron_sparse.doctor import link_probe
from megatron_sparse.doctor.verdict import CLOCK_S, RankReport, clock_skew, judge
from megatron_sparse.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
WORLD = 8
"""Ranks of the made-up job: two on each of four hosts."""


def job(
    *, latency_us=None, gbit_s=None, broken=None, offset_s=None, without=(), world=WORLD
) -> list[RankReport]:
    """Reports of a healthy job, changed by functions of a pair or a rank."""
    there = [rank for rank in range(world) if rank not in without]
    reports = []
    for rank in there:
        peers = [peer for peer in there if peer != rank]
        cut = {peer: "refused" for peer in peers if broken and broken(rank, peer)}
        reached = [peer for peer in peers if peer not in cut]

        def inter(a: int, b: int) -> bool:
            return a // 2 != b // 2

        reports.append(
            RankReport(
                rank,
                f"n{rank // 2}",
                {
                    p: (latency_us and latency_us(rank, p)) or 20 + 30 * inter(rank, p)
                    for p in reached
                },
                {p: (gbit_s and gbit_s(rank, p)) or 100 - 75 * inter(rank, p) for p in reached},
                cut,
                {p: offset_s(p) - offset_s(rank) if offset_s else 0.0 for p in reached},
            )
        )
    return reports


class TestVerdict:
    """Pure numbers: eight ranks on n0, n1, n2, n3."""

    def test_a_healthy_job_has_no_findings(self):
        assert judge(job(), WORLD) == []

    def test_a_slow_node_is_named_and_no_other(self):
        """All links to n2 are slow, so six others have slow links, too."""
        (found,) = judge(job(gbit_s=lambda a, b: 5 if (a // 2 == 2) != (b // 2 == 2) else 0), WORLD)
        assert (found.status, found.who) == ("warn", "n2")
        assert "bandwidth to other hosts: 5, 5 Gbit/s" in found.detail
        assert "the median rank has 25" in found.detail

    def test_a_slow_rank_of_a_good_node(self):
        """Rank 3's port. Inside n1 there is one link, which does not tell its two ends apart."""
        found = judge(job(gbit_s=lambda a, b: 5 if 3 in (a, b) else 0), WORLD)
        assert {(f.who, f.detail.split(":")[0]) for f in found} == {
            ("rank 3 on n1", "bandwidth to other hosts"),
            ("n1", "bandwidth inside its host"),
        }

    def test_the_threshold_is_what_the_documentation_says(self):
        """A rank is slow when its best link is below half of the median."""
        for rate, slow in ((12.6, False), (12.4, True)):
            reports = job(gbit_s=lambda a, b, r=rate: r if (a // 2 == 2) != (b // 2 == 2) else 0)
            assert bool(judge(reports, WORLD)) is slow

    def test_one_slow_link_is_a_link(self):
        (found,) = judge(job(gbit_s=lambda a, b: 2 if {a, b} == {1, 6} else 0), WORLD)
        assert found.who == "the link of rank 1 on n0 and rank 6 on n3"

    def test_a_node_that_answers_late(self):
        """Only its answers are slow: the others' measurements count for it."""
        (found,) = judge(job(latency_us=lambda a, b: 900 if b // 2 == 1 != a // 2 else 0), WORLD)
        assert (found.status, found.who) == ("warn", "n1")
        assert "latency to other hosts" in found.detail

    def test_small_latencies_are_never_late(self):
        assert judge(job(latency_us=lambda a, b: 200 if 3 in (a, b) else 0), WORLD) == []

    def test_with_two_ranks_the_slow_side_is_unknown(self):
        assert judge(job(world=2, gbit_s=lambda a, b: 1), 2) == []

    def test_absent_ranks_are_named_with_their_host_from_slurm(self):
        reports = job(without=(4, 5))
        (found,) = judge(reports, WORLD, [f"node-{rank // 2}" for rank in range(WORLD)])
        assert (found.status, found.who, found.detail) == (
            "fail",
            "node-2",
            "no answer from ranks 4, 5",
        )
        (found,) = judge(reports, WORLD)
        assert found.who == "a host that is not known"

    def test_a_rank_that_most_cannot_reach_is_one_line(self):
        (found,) = judge(job(broken=lambda a, b: b == 5), WORLD)
        assert (found.status, found.who) == ("fail", "rank 5 on n2")
        assert "7 of 7 ranks cannot reach it: refused" in found.detail

    def test_one_broken_link_names_both_ends(self):
        (found,) = judge(job(broken=lambda a, b: (a, b) == (1, 6)), WORLD)
        assert found.who == "rank 6 on n3"
        assert "rank 1 on n0 cannot reach it: refused" in found.detail

    @pytest.mark.parametrize("host", [0, 3])
    def test_a_wrong_clock_is_named_even_on_the_first_host(self, host):
        reports = job(offset_s=lambda rank: 2.0 * (rank // 2 == host))
        (found,) = judge(reports, WORLD)
        assert found.who == f"n{host}"
        assert "+2 s" in found.detail
        assert clock_skew(reports)[2 * host] == pytest.approx(2.0)

    def test_clocks_within_the_limit_are_fine(self):
        assert judge(job(offset_s=lambda rank: 0.9 * CLOCK_S * (rank // 2 == 1)), WORLD) == []

    def test_a_backend_that_does_not_start_is_a_failure(self):
        reports = job(world=2)
        broken = RankReport(1, "n0", {0: 20.0}, {}, {}, {0: 0.0}, "nccl: unhandled system error")
        (found,) = judge([reports[0], broken], 2)
        assert (found.status, found.who) == ("fail", "rank 1 on n0")
        assert "unhandled system error" in found.detail


@pytest.mark.parametrize("world", range(2, 10))
def test_rounds_have_every_pair_once_and_no_rank_twice_at_a_time(world):
    rounds = link_probe.rounds(world)
    pairs = [pair for one in rounds for pair in one]
    assert sorted(pairs) == [(a, b) for a in range(world) for b in range(a + 1, world)]
    for one in rounds:
        ranks = [rank for pair in one for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert len(rounds) == world - 1 + world % 2


class TestPing:
    """Plain TCP on the loopback."""

    def test_latency_and_clock(self):
        with link_probe.Answerer() as answerer:
            found = link_probe.ping(answerer.invitation)
        assert found.error == ""
        # The loopback takes less than a second even on a loaded machine.
        assert 0 < found.latency_us < 1e6
        assert abs(found.offset_s) < 1.0

    def test_a_peer_that_does_not_listen_is_an_error_and_no_exception(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        found = link_probe.ping(link_probe.Invitation(("127.0.0.1",), port))
        assert found.latency_us is None
        assert f"127.0.0.1, port {port}: " in found.error

    def test_a_peer_that_never_answers_costs_only_the_deadline(self, monkeypatch):
        monkeypatch.setattr(link_probe, "CONNECT_S", 0.2)
        with socket.create_server(("127.0.0.1", 0)) as server:
            begin_s = time.monotonic()
            found = link_probe.ping(link_probe.Invitation(("127.0.0.1",), server.getsockname()[1]))
        assert found.latency_us is None
        assert "timed out" in found.error
        assert time.monotonic() - begin_s < 10

    def test_the_next_address_is_tried(self):
        with link_probe.Answerer() as answerer:
            hosts = ("256.0.0.1", *answerer.invitation.hosts)
            found = link_probe.ping(link_probe.Invitation(hosts, answerer.invitation.port))
        assert found.error == ""


class TestArguments:
    """Mistakes are one typed error."""

    @pytest.fixture(autouse=True)
    def no_launcher(self, monkeypatch):
        for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
            monkeypatch.delenv(name, raising=False)

    def request(self, **changes) -> doctor.Request:
        fields = {
            "ranks": None,
            "cluster": None,
            "timeout_s": 60,
            "strict": False,
            "json": None,
        } | changes
        return doctor.Request(**fields)

    def test_a_job_of_one_rank(self):
        with pytest.raises(ConfigError, match="only one rank"):
            doctor.run(self.request())

    def test_ranks_that_are_not_those_of_the_launcher(self, monkeypatch):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "4")
        with pytest.raises(ConfigError, match="--ranks is not"):
            doctor.run(self.request(ranks=3))

    @pytest.mark.parametrize("timeout", [0, -1, float("nan")])
    def test_timeouts(self, timeout):
        with pytest.raises(ConfigError, match="--timeout"):
            self.request(timeout_s=timeout)

    @pytest.mark.parametrize("flag", [["--ranks", "3"], ["--cluster", "local"], ["--strict"]])
    def test_flags_of_a_job_need_distributed(self, flag, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["doctor", *flag])
        assert caught.value.code == 2
        assert "add --distributed" in capsys.readouterr().err


def start(rank: int, world: int, port: int, report: Path, timeout_s: int, *, code: str):
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    arguments = ["doctor", "--distributed", f"--timeout={timeout_s}", f"--json={report}"]
    program = f"{code}\nfrom megatron_sparse.cli.main import main\nmain({arguments!r})"
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def finish(processes) -> list[tuple[int, str, str]]:
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=200)
            ended.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return ended


PLANTED_SLOW = """
import time
from megatron_sparse.doctor import link_probe
quick = link_probe.exchange
def slow(peer, sent, received):
    if sent.numel() > 1:
        time.sleep(0.8)
    quick(peer, sent, received)
link_probe.exchange = slow
"""
PLANTED_CLOCK = """
import time
true = time.time
time.time = lambda: true() + 30
"""


def test_planted_slow_rank_and_wrong_clock(tmp_path):
    """Rank 2 waits 0.8 s before each exchange, which takes milliseconds; rank 1 is 30 s ahead.

    A warning is no failure: exit code 0.
    """
    world, port, report = 4, free_port(), tmp_path / "report.jsonl"
    planted = {1: PLANTED_CLOCK, 2: PLANTED_SLOW}
    ended = finish(
        [start(rank, world, port, report, 90, code=planted.get(rank, "")) for rank in range(world)]
    )
    assert [code for code, _, _ in ended] == [0] * world, ended
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    links = [row for row in rows if row["kind"] == "link"]
    assert len(links) == 6
    for link in links:
        assert link["latency_us"] > 0
        # 4 MiB in 0.8 s at most where rank 2 is.
        assert (link["gbit_s"] < 4 * 2**20 * 8 / 0.8e9) is (2 in link["ranks"]), links
    details = {row["who"]: row["detail"] for row in rows if row["kind"] == "finding"}
    host = socket.gethostname()
    assert "bandwidth inside its host" in details[f"rank 2 on {host}"]
    assert "its clock is +30 s off" in details[host]
    assert "rank 2 on" in ended[0][1], "rank 0 prints"
    assert not any(out for _, out, _ in ended[1:]), "and nobody else"


def test_planted_absent_rank(tmp_path):
    """Rank 2 of 3 never comes: after the timeout the others report it, with their own links."""
    report, port = tmp_path / "report.jsonl", free_port()
    ended = finish([start(rank, 3, port, report, 15, code="") for rank in range(2)])
    assert [code for code, _, _ in ended] == [1, 1], ended
    assert "no answer from rank 2" in ended[0][1]
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    assert {row["rank"] for row in rows if row["kind"] == "rank"} == {0, 1}
    (link,) = [row for row in rows if row["kind"] == "link"]
    assert link["latency_us"] > 0
    assert link["gbit_s"] is None, "a backend with a rank missing would hang"


def test_the_others_report_that_rank_0_is_absent(tmp_path):
    (ended,) = finish([start(1, 2, free_port(), tmp_path / "report.jsonl", 2, code="")])
    assert ended[0] == 3
    # torch may warn of the socket before it.
    assert "error: doctor: rank 1 on " in ended[2]
    assert "cannot reach rank 0" in ended[2]
    assert "Traceback" not in ended[2]
