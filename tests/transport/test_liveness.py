"""The side channel, between several of its ends in one process."""

import socket
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_sparse.errors import ConfigError
from megatron_sparse.transport import liveness, peer_links
from megatron_sparse.transport.liveness import PeerLiveness
from megatron_sparse.transport.peer_links import PeerLinks, check_gloo_interfaces, own_hosts
from tests.waiting import DEADLINE_S, until


@pytest.fixture
def star(monkeypatch):
    """Rank 0, and ranks 1 and 2 connected to it; fast beats."""
    monkeypatch.setattr(peer_links, "BEAT_S", 0.05)
    links = [PeerLinks(rank) for rank in range(3)]
    for other in links[1:]:
        other.join(0, links[0].invite())
    yield links
    for end in links:
        end.close(goodbye=True)


def test_a_broken_connection_tells_all_ranks_of_a_death(star):
    star[2].close(goodbye=False)
    until(lambda: 2 in star[0].lost and 2 in star[1].lost)
    liveness = PeerLiveness(star[1], [0, 1, 2], timeout_s=10)
    until(lambda: liveness.trouble() is not None)
    assert liveness.trouble() == "rank 2 has died: its connection to rank 0 is gone"
    assert PeerLiveness(star[1], [0, 1], timeout_s=10).await_trouble() is None, "not of this group"


def test_the_death_of_the_first_rank_is_noticed_too(star):
    star[0].close(goodbye=False)
    until(lambda: 0 in star[1].lost and 0 in star[2].lost)


def test_a_rank_that_says_goodbye_is_not_lost(star):
    star[2].close(goodbye=True)
    time.sleep(0.3)
    assert not star[0].lost
    assert not star[1].lost


@pytest.mark.parametrize(
    ("error", "broken", "says_goodbye"),
    [
        (None, False, True),
        (SystemExit(0), False, True),
        (ValueError(), False, False),
        (None, True, False),
    ],
)
def test_a_rank_that_closes_because_it_fails_says_no_goodbye(
    monkeypatch, error, broken, says_goodbye
):
    said = []
    links = SimpleNamespace(rank=0, close=lambda *, goodbye: said.append(goodbye))
    monkeypatch.setattr(liveness, "_links", links)
    monkeypatch.setattr(liveness, "_users", 1)
    peers = PeerLiveness(cast(Any, links), [0, 1], timeout_s=10)
    with suppress(SystemExit, ValueError):
        try:
            if error is not None:
                raise error
        finally:
            peers.close(broken=broken)
    assert said == [says_goodbye]


def test_a_failure_is_passed_on_and_names_the_rank_of_the_group(star):
    star[2].announce("has given up: bucket b: no")
    until(lambda: star[1].lost)
    liveness = PeerLiveness(star[1], [1, 2], timeout_s=10)
    assert liveness.await_trouble() == "rank 1 (global rank 2) has given up: bucket b: no"


def test_a_rank_that_joins_later_learns_of_earlier_losses(star):
    star[2].announce("has given up")
    until(lambda: star[0].lost)
    late = PeerLinks(3)
    late.join(0, star[0].invite())
    until(lambda: 2 in late.lost)
    late.close(goodbye=True)


def test_silence_is_trouble_only_after_half_of_the_timeout(star, monkeypatch):
    # Rank 2's thread keeps its connection and sends nothing, like a stopped process.
    monkeypatch.setattr(star[2], "_beat", lambda: None)
    until(lambda: star[1].silent_s.get(2, 0) > 0.3)
    liveness = PeerLiveness(star[1], [0, 1, 2], timeout_s=10)
    assert liveness.trouble() is None, "below half of the timeout"
    monkeypatch.setattr(liveness, "_silence_s", 0.3)
    assert "rank 2 is stopped or cut off: silent for" in str(liveness.trouble())
    assert 0 not in star[1].silent_s


@pytest.mark.parametrize(
    "handshake", ['{"hello": 2, "token": "wrong"}', '["hello"]', '"\xff garbage"', "[" * 100_000]
)
def test_a_wrong_handshake_closes_the_connection(star, handshake):
    port = star[0].invite()["port"]
    with socket.create_connection(("localhost", port), timeout=DEADLINE_S) as stranger:
        stranger.sendall(handshake.encode() + b"\n")
        stranger.settimeout(DEADLINE_S)
        assert stranger.recv(100) == b"", "the connection is closed"
    star[2].announce("has given up")
    until(lambda: list(star[0].lost) == [2])


def test_joining_with_a_wrong_invitation_is_an_error(star):
    invitation = {**star[0].invite(), "token": "old", "hosts": ["localhost"]}
    with pytest.raises(OSError, match="localhost"):
        PeerLinks(5).join(0, invitation)
    with pytest.raises(OSError, match="no address"):
        PeerLinks(5).join(0, {**invitation, "hosts": []})


def test_the_interface_that_gloo_uses_comes_first(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_hosts()[0] == "127.0.0.1"
    check_gloo_interfaces()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none_of_that_name")
    with pytest.raises(ConfigError, match=r"got: *none_of_that_name, on "):
        check_gloo_interfaces()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert own_hosts()[0] in ("127.0.0.1", "::1")
