"""Fixtures of the collectives' tests."""

from __future__ import annotations

import multiprocessing as mp

import pytest

from tests import ranks


@pytest.fixture(scope="module")
def forked_ranks():
    """A module's ranks are forked from a server that has imported everything, in about a second."""
    mp.set_forkserver_preload(["tests.collectives.fault_ranks"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "START_METHOD", "forkserver")
        yield
