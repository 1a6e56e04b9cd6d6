"""A launch that does not fit together: the lines name the rank, the link or the clock."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_sparse.calibration import launch_check
from megatron_sparse.calibration.launch_check import (
    CLOCK_S,
    RankFacts,
    RingLink,
    check_launch,
    describe,
    meet,
    ring_links,
    ring_phase,
)
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.errors import CommunicationError
from megatron_sparse.transport import Link, ProcessGroupTransport, Topology, VirtualCluster
from tests.ranks import command_main, fork, run_ranks
from tests.waiting import DEADLINE_S

RING = 1e-3
"""The clock begins with the ranks up to a gather of a few bytes apart."""
FACTS = RankFacts("n0", "2.11.0", "0.19.0", "1.0", "EPYC")


def _planted(rank, world_size):
    """Rank 1's clock is 30 s ahead, rank 2 has another torch, and sends to rank 0 late."""
    world = dist.group.WORLD
    transport = ProcessGroupTransport(world, SchemeConfig().timeout_s, torch.device("cpu"))
    here, exchange = RankFacts.here, transport.exchange
    if rank == 1:
        true = time.time
        launch_check.time.time = lambda: true() + 30
    if rank == 2:
        launch_check.RankFacts.here = lambda device: replace(here(device), torch="0.0")

        def slow(sent, received, tag):
            if [to for to, _ in sent] == [0]:
                time.sleep(0.5)
            return exchange(sent, received, tag)

        transport.exchange = slow
    lines = check_launch(transport, time.perf_counter)
    transport.close()
    return lines


def test_real_ranks_find_what_is_planted():
    first, *others = run_ranks(_planted, 3)
    assert all(lines == first for lines in others), "the same on every rank"
    text, host = "\n".join(first), socket.gethostname()
    assert len(first) <= 20
    assert "all 3 ranks have met, on 1 hosts" in text
    assert f"torch differs: {torch.__version__} on most ranks, 0.0 on rank 2 ({host})" in text
    assert f"clocks differ: rank 1 ({host}), by +30 s at most" in text
    assert f"slowest link inside a node: rank 2 ({host}) to rank 0 ({host})," in text
    assert "between nodes" not in text


@pytest.mark.parametrize("nic", ["rank", "node"])
def test_links_of_a_virtual_cluster(nic):
    """Two nodes of three: links inside run at one rate, those between at another."""
    intra, inter = Link(0.0, 1e-9), Link(0.0, 4e-9)
    cluster = VirtualCluster(6, Topology((3, 3), intra, inter, nic))
    first, *others = cluster.run(lambda t: ring_links(t, lambda: cluster.clock_s[t.rank]))
    assert all(links == first for links in others)
    inside = {(x.sender, x.receiver): x.gbit_s for x in first if x.kind == "inside a node"}
    between = {(x.sender, x.receiver): x.gbit_s for x in first if x.kind == "between nodes"}
    assert set(inside) == {(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3)}
    assert set(between) == {(a, b) for a in range(6) for b in range(6) if abs(a - b) == 3}
    assert list(inside.values()) == pytest.approx([8.0] * 6, rel=RING)
    # Three lanes at once take turns at a node's port.
    assert max(between.values()) == pytest.approx(2.0, rel=RING)
    assert min(between.values()) == pytest.approx(2.0 if nic == "rank" else 2 / 3, rel=RING)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_phases_have_every_link_once_and_no_rank_twice(n):
    phases = [ring_phase(range(n), phase) for phase in range(3)]
    links = [link for phase in phases for link in phase]
    assert sorted(links) == [(rank, (rank + 1) % n) for rank in range(n if n > 1 else 0)]
    for phase in phases:
        ends = [end for link in phase for end in link]
        assert len(ends) == len(set(ends))


class TestLines:
    """Pure: facts, clocks and links in, lines out."""

    def test_a_healthy_launch(self):
        facts = [replace(FACTS, host=f"n{rank // 2}") for rank in range(4)]
        links = [RingLink("between nodes", 0, 2, 9.0), RingLink("between nodes", 2, 0, 8.5)]
        assert describe(facts, [0.0] * 4, links) == [
            "all 4 ranks have met, on 2 hosts",
            "the same on all ranks: torch 2.11.0, megatron_core 0.19.0, megatron_sparse 1.0, EPYC",
            "clocks agree within 0.1 s",
            "slowest link between nodes: rank 2 (n1) to rank 0 (n0), 8.5 Gbit/s; the median has "
            "8.75",
        ]

    def test_many_ranks_that_differ_are_counted(self):
        facts = [replace(FACTS, device="a" if rank < 12 else "b") for rank in range(22)]
        (line,) = [line for line in describe(facts, [0.0] * 22, []) if "differs" in line]
        assert line.startswith("device differs: a on most ranks, b on rank 12 (n0), ")
        assert line.endswith("rank 19 (n0) and 2 more")

    @pytest.mark.parametrize(("offset_s", "wrong"), [(CLOCK_S * 0.99, False), (-0.2, True)])
    def test_clocks(self, offset_s, wrong):
        lines = describe([FACTS] * 3, [0.0, 0.0, offset_s], [])
        assert any("clocks differ: rank 2 (n0), by -0.2 s" in line for line in lines) is wrong


def test_absent_ranks_are_named():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    store.set("megatron_sparse/met/1", "")
    with pytest.raises(CommunicationError, match=r"2 of 4 ranks have not come") as caught:
        meet(store, 0, 4, 0.2)
    assert "rank 2, rank 3" in str(caught.value)
    for rank in (2, 3):
        store.set(f"megatron_sparse/met/{rank}", "")
    meet(store, 0, 4, 0.2)


@pytest.fixture
def calibrate(tmp_path) -> Callable[[int, int, int], tuple[Any, Path]]:
    """Starts `calibrate` as a rank of three at a port; returns its process and what it prints."""

    def start(rank: int, port: int, timeout_s: int) -> tuple[Any, Path]:
        words = ["megatron-sparse", "calibrate", "--quick", f"--output={tmp_path}/cluster.yaml"]
        place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        printed = tmp_path / f"rank{rank}"
        given = rank, os.environ | place, [*words, f"--timeout={timeout_s}"], printed
        return fork(command_main, given), printed

    return start


def test_a_rank_that_never_comes_ends_the_command(calibrate, monkeypatch):
    """The first of the others to give up says so; all end with the same code."""
    # As torchrun's agent does.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    ranks = [calibrate(rank, store.port, 10) for rank in (0, 1)]
    for process, _ in ranks:
        process.join(DEADLINE_S)
    said = "".join(printed.read_text() for _, printed in ranks)
    assert [process.exitcode for process, _ in ranks] == [3, 3], said
    assert "error: 1 of 3 ranks have not come" in said
    assert "no answer from rank 2" in said
    assert "Traceback" not in said


def test_the_others_report_that_rank_0_is_absent(calibrate):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    process, printed = calibrate(1, port, 2)
    process.join(DEADLINE_S)
    said = printed.read_text()
    assert process.exitcode == 3, said
    assert "error: rank 1 on " in said
    assert "cannot reach rank 0" in said
    assert "Traceback" not in said
