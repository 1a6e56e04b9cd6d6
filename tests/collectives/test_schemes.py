"""The registry, the planner's use of it, and the tags that separate concurrent collectives."""

from dataclasses import replace
from math import inf, nan

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import SCHEMES, check
from megatron_sparse.collectives.base import Identity
from megatron_sparse.collectives.checksummed import (
    checksummed_row,
    checksummed_size,
    verified_row,
    verified_size,
)
from megatron_sparse.collectives.registry import find_schemes, register
from megatron_sparse.compression.schedule import Phase
from megatron_sparse.config.sparse import (
    CompressionConfig,
    SchemeConfig,
    SparseConfig,
    StragglerConfig,
)
from megatron_sparse.errors import CommunicationError, ConfigError, WireFormatError
from megatron_sparse.planner import Planner
from megatron_sparse.transport import VirtualCluster
from tests.collectives.cases import OPTIONS, SPARSE, Case, Changing, on_nodes, run_case, steps_of


def _bucket(op=CollectiveOp.ALL_REDUCE, name="b", numel=1000):
    return Bucket(name, torch.zeros(numel), [ParameterSlice("w", 0, numel)], op, 4)


def _plan(scheme, op, step=5, **values):
    compression = CompressionConfig(warmup_iters=2, ramp_iters=0, **values)
    return Planner(compression, SchemeConfig(name=scheme)).plan_for(_bucket(op), step)


def test_two_schemes_of_one_name_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="two schemes have the name 'zen'"):
        register(SCHEMES["zen"], SCHEMES)
    monkeypatch.setattr("megatron_sparse.collectives.zen.SCHEME", SCHEMES["direct"])
    with pytest.raises(ConfigError, match="two schemes have the name 'direct'"):
        find_schemes()


def test_schemes_are_listed_by_their_place():
    places = [scheme.place for scheme in SCHEMES.values()]
    assert places == sorted(set(places)), "of two at one place, the name would decide"


@pytest.mark.parametrize("op", list(CollectiveOp))
@pytest.mark.parametrize("name", SCHEMES)
def test_the_planner_plans_every_scheme_by_name(name, op):
    scheme = SCHEMES[name]
    if op not in scheme.ops:
        for step in (0, 5):
            with pytest.raises(ConfigError, match=f"{name} cannot do the {op}"):
                _plan(name, op, step)
        return
    plan = _plan(name, op, density=0.01)
    assert (plan.scheme, plan.phase) == (name, Phase.TARGET)
    assert plan.density == (1.0 if scheme.takes_all else 0.01)
    assert plan.sharded == scheme.is_sharded(op)
    # The warm-up is the backend's own, unless the scheme sends everything itself.
    assert _plan(name, op, step=0).scheme == ("dense_q" if scheme.sends_whole else "dense")


def test_tags_differ_in_all_that_ranks_must_agree_on():
    base = ("b", CollectiveOp.ALL_REDUCE, 1000, "direct", "fp32", 1)
    others = [
        ("c", *base[1:]),
        (base[0], CollectiveOp.REDUCE_SCATTER, *base[2:]),
        (*base[:2], 1004, *base[3:]),
        (*base[:3], "ssar_rd", *base[4:]),
        (*base[:4], "bf16", 1),
        (*base[:5], 2),
    ]
    tags = {
        Identity(scheme, _bucket(op, name, numel), dtype, step).tag
        for name, op, numel, scheme, dtype, step in [base, *others]
    }
    assert len(tags) == len(others) + 1
    assert all(0 <= tag < 2**31 for tag in tags)


OTHER = [(name, {"numel": 123}) for name in SPARSE] + [
    (name, {"options": replace(OPTIONS, **{key: value})})
    for name, key, value in (
        ("adaptive_ring", "ring_gather_density", 0.8),
        ("omnireduce", "block_size", 128),
    )
]


@pytest.mark.parametrize(("name", "other"), OTHER)
def test_a_rank_with_another_bucket_or_options_is_refused_before_anything_is_sent(name, other):
    case = Case(name, 4, numel=120)
    cluster = VirtualCluster(4)
    with pytest.raises(CommunicationError, match="rank 3 of the group is not in the same"):
        cluster.run(lambda t: steps_of(replace(case, **other) if t.rank == 3 else case, t))
    assert not any(size > 8 * (2 + 4) for size in cluster.link_bytes.values()), "agreements only"


def _lie(own, peer):
    """A size, or a row of sizes, that is too large."""
    if own.dtype != torch.int64:
        return own
    words = own.tolist()
    if len(words) == 1:
        return own.new_tensor([checksummed_size(verified_size(words[0], 1) + 2**40)])
    meant, sizes = verified_row(words, 1)
    lie = checksummed_row(meant, [size + 2**40 for size in sizes])
    return own.new_tensor(lie + words[len(lie) :])


@pytest.mark.parametrize("name", SPARSE)
def test_an_impossible_size_is_refused_before_memory_is_taken(name):
    case = Case(name, 3, density=0.1, numel=900)
    # Inside a node the hierarchy has dense sums, not records.
    with pytest.raises(WireFormatError, match="rank 2: field announced"):
        run_case(case, on_nodes((2, 1)), lambda t: Changing(t, _lie) if t.rank == 2 else t)


OBSERVE = StragglerConfig("observe")
NO_CAPACITIES = (0, -1, nan, inf, True, "much", "AUTO", "null", "1.25")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"scheme": "omnireduce", "format": "pici"}, "messages of its own format"),
        ({"block_size": 96}, r"scheme\.block_size does not fit"),
        ({"block_size": 32}, r"scheme\.block_size is out of range"),
        ({"block_size": 256.5}, r"scheme\.block_size is out of range"),
        ({"hash_rounds": 65}, r"scheme\.hash_rounds is out of range"),
        ({"ring_gather_density": -0.1}, r"scheme\.ring_gather_density"),
        *(({"capacity": factor}, r"scheme\.capacity") for factor in NO_CAPACITIES),
        ({"scheme": "dense_q", "wire_dtype": "bf16"}, "dense_q sends values in few bits"),
        ({"scheme": "direct", "nccl_engine": True, "value_bits": 4}, "no records of format rice"),
        ({"scheme": "direct", "nccl_engine": True, "format": "rice"}, "no records of format rice"),
        ({"scheme": "straggler"}, "needs a straggler"),
        ({"scheme": "straggler_direct", "straggler": OBSERVE}, "needs a straggler"),
        ({"scheme": "direct", "straggler": StragglerConfig("pinned", 0)}, "waits for every rank"),
        ({"straggler": StragglerConfig("persistent")}, "decides from timing"),
        (
            {"scheme": "straggler", "straggler": StragglerConfig("persistent")},
            "decides from timing",
        ),
    ],
)
def test_wrong_parameters_and_sections_that_contradict_one_another_are_one_error(overrides, words):
    with pytest.raises(ConfigError, match=words):
        check(SparseConfig.from_overrides(**overrides))


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "sometimes"},
        {"mode": "pinned"},
        {"mode": "persistent", "rank": 1},
        {"mode": "pinned", "rank": -1},
        {"mode": "persistent", "min_delay_ms": -1.0},
    ],
)
def test_a_wrong_straggler_section_is_one_error_that_names_the_key(values):
    with pytest.raises(ConfigError, match=r"straggler\."):
        StragglerConfig(**values)
