"""The straggler-aware schemes: exact and bit-identical for any late and any expected rank."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.collectives import straggler_direct
from megatron_sparse.collectives.base import ALIGNMENT, aligned_cuts
from megatron_sparse.errors import CommunicationError, ConfigError, WireFormatError
from megatron_sparse.transport import Link, Topology, VirtualCluster
from tests.collectives.cases import (
    DTYPES,
    Case,
    assert_exact,
    contribution,
    run_case,
    steps_of,
)

NAMES = ("straggler", "straggler_direct")
FALLBACKS = {"straggler": "dense_ring", "straggler_direct": "direct"}
SOME_TIME = Link(1e-5, 1e-9)


def _case(name, n, dtypes, numel, straggler, density=0.3, *, floats=False):
    dtype, wire = dtypes
    given = {"dtype": dtype, "wire": wire, "density": density, "floats": floats}
    return Case(name, n, numel=numel, straggler=straggler, **given)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 10, 12, 16])
@pytest.mark.parametrize("name", NAMES)
def test_exact_whichever_rank_is_the_straggler(name, n):
    for straggler in range(n) if n <= 8 else (0, n // 2, n - 1):
        for dtypes, numel in zip(DTYPES, (300, 41, 1001), strict=True):
            case = _case(name, n, dtypes, numel, straggler)
            assert_exact(case, run_case(case).results)


@settings(max_examples=60, derandomize=True)
@given(
    name=st.sampled_from(NAMES),
    n=st.integers(1, 9),
    straggler=st.integers(0, 8),
    numel=st.one_of(st.integers(0, 40), st.integers(0, 60_000)),
    density=st.sampled_from((0.0, 0.001, 0.05, 0.6, 1.0)),
    dtypes=st.sampled_from((*DTYPES, ("fp16", "fp16"))),
    delays=st.lists(st.floats(0, 1e-2), min_size=9, max_size=9),
)
def test_exact_for_any_size_and_in_whatever_order_the_ranks_come(
    name, n, straggler, numel, density, dtypes, delays
):
    """The guess at the late rank affects only the time."""
    case = _case(name, n, dtypes, numel, straggler % n, density)
    topology, late = Topology((n,), SOME_TIME, SOME_TIME), dict(enumerate(delays[:n]))
    assert_exact(case, run_case(case, topology, delays_s=late).results)


@pytest.mark.parametrize("dtypes", DTYPES[:2])
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_those_of_early_ranks_in_order_and_then_the_straggler(name, dtypes):
    n = 6
    for straggler in range(n):
        case = _case(name, n, dtypes, 3000, straggler, 0.5, floats=True)
        order = [rank for rank in range(n) if rank != straggler] + [straggler]
        expected = torch.zeros(case.numel)
        for rank in order:
            expected += contribution(case, rank).float()
        for result in run_case(case).results:
            assert torch.equal(result, expected.to(result.dtype)), straggler


@pytest.mark.parametrize("name", NAMES)
def test_without_a_straggler_it_is_the_plain_scheme(name):
    case = _case(name, 4, DTYPES[0], 1000, None, floats=True)
    plain = _case(FALLBACKS[name], 4, DTYPES[0], 1000, None, floats=True)
    ran, wanted = run_case(case), run_case(plain)
    for mine, theirs in zip(ran.results, wanted.results, strict=True):
        assert torch.equal(mine, theirs)
    if name == "straggler":
        assert ran.cluster.link_bytes == wanted.cluster.link_bytes
    assert ran.cluster.link_messages == wanted.cluster.link_messages


@pytest.mark.parametrize("straggler", [-1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_straggler_that_is_no_rank_is_refused(name, straggler):
    with pytest.raises(ConfigError, match="not one of the ranks"):
        run_case(_case(name, 4, DTYPES[0], 100, straggler))


@pytest.mark.parametrize("thinks", range(5))
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_that_takes_another_for_the_straggler_is_found(name, thinks):
    """Rank 3 expects another straggler; no rank gets a wrong sum."""
    case = _case(name, 5, DTYPES[0], 500, 1)
    other = _case(name, 5, DTYPES[0], 500, thinks if thinks != 1 else None)
    with pytest.raises(CommunicationError):
        VirtualCluster(5).run(lambda t: steps_of(other if t.rank == 3 else case, t))


@pytest.mark.parametrize(("name", "differs"), [*((name, 2) for name in NAMES), (NAMES[1], 4)])
def test_a_rank_with_another_bucket_is_found(name, differs):
    """The straggler when it comes; of the sparse form's early ranks, one before that."""
    case, other = (_case(name, 5, DTYPES[0], numel, 2) for numel in (500, 503))

    def start(transport):
        if transport.rank == 2:
            transport.charge(1.0)
        return steps_of(other if transport.rank == differs else case, transport)

    with pytest.raises(CommunicationError, match="not in the same collective"):
        VirtualCluster(5).run(start)


def test_chunks_begin_at_tiles_and_are_nearly_even():
    cuts = aligned_cuts(16_777_216, 7)
    assert all(cut % ALIGNMENT == 0 for cut in cuts)
    sizes = [b - a for a, b in pairwise(cuts)]
    # Less than two units of 4096 among at least 256 of them.
    assert max(sizes) < min(sizes) * (1 + 2 / 256)
    assert aligned_cuts(1, 3) == [0, 0, 0, 1]


@pytest.mark.parametrize("liar", [0, 2])
def test_a_size_that_no_record_has_is_refused_in_the_handshake(monkeypatch, liar):
    """Of an early rank, and of the straggler."""
    original = straggler_direct._Run._shake_hands

    def announcing(run, sizes):
        lies = [2**20] * len(sizes) if run.transport.rank == liar else sizes
        return (yield from original(run, lies))

    monkeypatch.setattr(straggler_direct._Run, "_shake_hands", announcing)
    with pytest.raises(WireFormatError, match=f"rank {liar}: field announced size"):
        run_case(_case("straggler_direct", 4, DTYPES[0], 500, 2))
