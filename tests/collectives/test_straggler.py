"""The straggler-aware schemes: exact and bit-identical for any late and any expected rank."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.collectives.straggler_shares import ALIGNMENT, chunk_cuts, shares_of
from megatron_sparse.errors import CommunicationError, ConfigError, WireFormatError
from megatron_sparse.transport import Link, Topology, VirtualCluster
from tests.collectives.cases import (
    DTYPES,
    Case,
    assert_exact,
    contribution,
    exact_sum,
    make_bucket,
    numel_for,
    run_case,
    steps_of,
)

NAMES = ("straggler", "straggler_direct")
FALLBACKS = {"straggler": "dense_ring", "straggler_direct": "direct"}
BOTH = [(name, op) for name in NAMES for op in CollectiveOp]
SOME_TIME = Link(1e-5, 1e-9)


def _case(name, n, op, dtypes, numel, straggler, density=0.3, *, floats=False):
    dtype, wire = dtypes
    count = numel_for(n, numel, op)
    return Case(name, n, op, dtype, wire, density, count, floats, straggler=straggler)


def _run(case, delays=None, topology=None):
    def late(transport):
        transport.charge(delays[transport.rank] if delays else 0.0)
        return transport

    ran = run_case(case, topology, late)
    return ran.results, ran.cluster


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize(("name", "op"), BOTH)
def test_exact_whichever_rank_is_the_straggler(name, op, n):
    for straggler in range(n):
        for dtypes, numel in zip(DTYPES, (300, 41, 1001), strict=True):
            case = _case(name, n, op, dtypes, numel, straggler)
            assert_exact(case, _run(case)[0])


@pytest.mark.parametrize("n", [10, 12, 16])
@pytest.mark.parametrize(("name", "op"), BOTH)
def test_exact_for_more_ranks(name, op, n):
    for straggler in (0, n // 2, n - 1):
        case = _case(name, n, op, ("fp32", "fp32"), 700, straggler, density=0.1)
        assert_exact(case, _run(case)[0])


@settings(max_examples=40, derandomize=True)
@given(
    which=st.sampled_from(BOTH),
    n=st.integers(1, 9),
    straggler=st.integers(0, 8),
    numel=st.one_of(st.integers(0, 40), st.integers(0, 60_000)),
    density=st.sampled_from((0.0, 0.001, 0.05, 0.6, 1.0)),
    dtypes=st.sampled_from((*DTYPES, ("fp16", "fp16"))),
)
def test_exact_for_any_size_and_density(which, n, straggler, numel, density, dtypes):
    name, op = which
    case = _case(name, n, op, dtypes, numel, straggler % n, density)
    assert_exact(case, _run(case)[0])


@settings(max_examples=25, derandomize=True)
@given(
    which=st.sampled_from(BOTH),
    n=st.integers(2, 8),
    straggler=st.integers(0, 7),
    delays=st.lists(st.floats(0, 1e-2), min_size=8, max_size=8),
)
def test_exact_in_whatever_order_the_ranks_come(which, n, straggler, delays):
    """The guess at the late rank affects only the time."""
    name, op = which
    case = _case(name, n, op, ("fp32", "fp32"), 500, straggler % n)
    assert_exact(case, _run(case, delays, Topology((n,), SOME_TIME, SOME_TIME))[0])


@pytest.mark.parametrize("dtypes", DTYPES[:2])
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_those_of_early_ranks_in_order_and_then_the_straggler(name, dtypes):
    n = 6
    for straggler in range(n):
        case = _case(name, n, CollectiveOp.ALL_REDUCE, dtypes, 3000, straggler, 0.5, floats=True)
        order = [rank for rank in range(n) if rank != straggler] + [straggler]
        expected = torch.zeros(case.numel)
        for rank in order:
            expected += contribution(case, rank).float()
        for result in _run(case)[0]:
            assert torch.equal(result, expected.to(result.dtype)), straggler
        scattered = _case(
            name, n, CollectiveOp.REDUCE_SCATTER, dtypes, 3000, straggler, 0.5, floats=True
        )
        whole = torch.cat(_run(scattered)[0])
        assert torch.equal(whole, expected.to(whole.dtype)), straggler


@pytest.mark.parametrize("name", NAMES)
def test_narrowed_sums_have_the_same_bits_on_all_ranks(name):
    for n, straggler in ((2, 0), (3, 1), (5, 4), (8, 0)):
        case = _case(name, n, CollectiveOp.ALL_REDUCE, DTYPES[2], 900, straggler, floats=True)
        results, _ = _run(case)
        for result in results[1:]:
            assert torch.equal(result, results[0])
        # n additions and two roundings to bf16, of the early sum and of the last.
        magnitude = sum(contribution(case, rank).double().abs() for rank in range(n))
        bound = magnitude * 2 * torch.finfo(torch.bfloat16).eps
        assert ((results[0].double() - exact_sum(case)).abs() <= bound).all()


@pytest.mark.parametrize("other", ["direct", "dense_allpairs", "agsparse"])
@pytest.mark.parametrize("name", NAMES)
def test_with_the_last_rank_late_the_bits_are_those_of_rank_order(name, other):
    case = _case(name, 5, CollectiveOp.ALL_REDUCE, DTYPES[0], 2000, 4, floats=True)
    plain = _case(other, 5, CollectiveOp.ALL_REDUCE, DTYPES[0], 2000, None, floats=True)
    for mine, theirs in zip(_run(case)[0], _run(plain)[0], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("name", "op"), BOTH)
def test_without_a_straggler_it_is_the_plain_scheme(name, op):
    case = _case(name, 4, op, DTYPES[0], 1000, None, floats=True)
    plain = _case(FALLBACKS[name], 4, op, DTYPES[0], 1000, None, floats=True)
    results, cluster = _run(case)
    expected, plain_cluster = _run(plain)
    for mine, theirs in zip(results, expected, strict=True):
        assert torch.equal(mine, theirs)
    if name == "straggler":
        assert cluster.link_bytes == plain_cluster.link_bytes
    assert cluster.link_messages == plain_cluster.link_messages


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_alone_has_no_straggler(name):
    case = _case(name, 1, CollectiveOp.ALL_REDUCE, DTYPES[0], 100, 7)
    assert_exact(case, _run(case)[0])


@pytest.mark.parametrize("straggler", [-1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_straggler_that_is_no_rank_is_refused(name, straggler):
    with pytest.raises(ConfigError, match="not one of the ranks"):
        _run(_case(name, 4, CollectiveOp.ALL_REDUCE, DTYPES[0], 100, straggler))


@pytest.mark.parametrize("thinks", range(5))
@pytest.mark.parametrize(("name", "op"), BOTH)
def test_a_rank_that_takes_another_for_the_straggler_is_found(name, op, thinks):
    """Rank 3 expects another straggler; no rank gets a wrong sum."""
    case = _case(name, 5, op, DTYPES[0], 500, 1)
    other = _case(name, 5, op, DTYPES[0], 500, thinks if thinks != 1 else None)
    cluster = VirtualCluster(5)
    with pytest.raises(CommunicationError):
        cluster.run(lambda t: steps_of(other if t.rank == 3 else case, t))


@pytest.mark.parametrize("name", NAMES)
def test_a_straggler_with_another_bucket_gets_an_error_when_it_comes(name):
    case = _case(name, 4, CollectiveOp.ALL_REDUCE, DTYPES[0], 500, 2)
    other = _case(name, 4, CollectiveOp.ALL_REDUCE, DTYPES[0], 503, 2)
    cluster = VirtualCluster(4)
    with pytest.raises(CommunicationError, match="not in the same collective"):
        cluster.run(lambda t: steps_of(other if t.rank == 2 else case, t))


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_handshake_names_its_sender(name):
    case = _case(name, 4, CollectiveOp.ALL_REDUCE, DTYPES[0], 500, 2)
    cluster = VirtualCluster(4)
    deliver = cluster._deliver

    def tampered(send, receive, start_s, ports):
        deliver(send, receive, start_s, ports)
        if send.rank == 2 and send.data.dtype == torch.int64:
            receive.data[1] ^= 1 << 40

    cluster._deliver = tampered
    with pytest.raises(WireFormatError, match="rank 2: field agreement"):
        cluster.run(lambda t: steps_of(case, t))


def test_early_ranks_with_another_bucket_are_found_before_the_straggler_comes():
    case = _case("straggler_direct", 5, CollectiveOp.ALL_REDUCE, DTYPES[0], 500, 2)
    other = _case("straggler_direct", 5, CollectiveOp.ALL_REDUCE, DTYPES[0], 503, 2)
    cluster = VirtualCluster(5)

    def start(transport):
        if transport.rank == 2:
            transport.charge(1.0)
        return steps_of(other if transport.rank == 4 else case, transport)

    with pytest.raises(CommunicationError, match=r"rank \d of the group is not in the same"):
        cluster.run(start)


def test_shares_cover_everything_once():
    for n in (2, 3, 7, 8):
        for op in CollectiveOp:
            bucket = Bucket("b", torch.zeros(n * 70_000), (), op, n)
            for straggler in range(n):
                shares = shares_of(bucket, straggler)
                assert [share.rank for share in shares] == [r for r in range(n) if r != straggler]
                reduced = sorted(
                    (part.start, part.stop) for share in shares for part in share.reduces
                )
                starts, stops = zip(*reduced, strict=True)
                assert starts == (0, *stops[:-1])
                assert stops[-1] == bucket.numel
                if op is CollectiveOp.REDUCE_SCATTER:
                    assert all(share.takes == bucket.shard(share.rank) for share in shares)


def test_chunks_begin_at_tiles_and_are_nearly_even():
    cuts = chunk_cuts(slice(0, 16_777_216), 7)
    assert all(cut % ALIGNMENT == 0 for cut in cuts)
    sizes = [b - a for a, b in pairwise(cuts)]
    # Less than two units of 4096 among at least 256 of them.
    assert max(sizes) < min(sizes) * (1 + 2 / 256)
    assert chunk_cuts(slice(10, 20), 3) == [10, 13, 16, 20]
    assert chunk_cuts(slice(0, 1), 3) == [0, 0, 0, 1]


def test_the_encoding_does_not_depend_on_the_straggler():
    scheme = SCHEMES["straggler_direct"]
    for op in CollectiveOp:
        case = _case("straggler_direct", 4, op, DTYPES[0], 1000, 0)
        bucket = make_bucket(case, 0)
        cuts = set(bucket.layout(True, scheme.extra_cuts(bucket)).segment_offsets.tolist())
        for straggler in range(4):
            for share in shares_of(bucket, straggler):
                for part in share.reduces:
                    assert {part.start, part.stop} <= cuts
