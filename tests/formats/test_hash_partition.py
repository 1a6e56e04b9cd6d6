"""h0 is a bijection that all ranks share; Algorithm 1 loses nothing and is balanced as proven."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.cuda_ext import hash_ops
from megatron_sparse.cuda_ext.hash_ops import HashMemory
from megatron_sparse.errors import ConfigError, ExtensionError
from megatron_sparse.formats.hash_partition import PermutationHash
from megatron_sparse.formats.hierarchical_hash import hierarchical_hash, split
from tests.codec import on_threads
from tests.cuda_ext import cases
from tests.oracles import hash_partition as oracle

SEGMENT_LIMIT = 2**31 - 1


def _entries(numel, count, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(numel, generator=generator)[:count]
    return indices, cases.make("special", count, dtype, seed)


@settings(max_examples=60)
@given(st.integers(1, 5000), st.integers(0, 2**63 - 1))
def test_permutation_is_a_bijection_and_the_oracles(numel, seed):
    elements = torch.arange(numel)
    positions = hash_ops.permute(elements, numel, seed)
    assert torch.equal(positions.sort().values, elements)
    assert torch.equal(hash_ops.unpermute(positions, numel, seed), elements)
    some = range(0, numel, 1 + numel // 20)
    assert positions[list(some)].tolist() == [oracle.permute(e, numel, seed) for e in some]


@pytest.mark.parametrize("numel", [SEGMENT_LIMIT, 2**30, 2**30 + 1])
def test_permutation_of_the_largest_segments(numel):
    generator = torch.Generator().manual_seed(numel)
    elements = torch.cat(
        [torch.tensor([0, 1, numel - 1]), torch.randint(numel, (100_000,), generator=generator)]
    )
    positions = hash_ops.permute(elements, numel, 7)
    assert int(positions.min()) >= 0
    assert int(positions.max()) < numel
    assert torch.equal(hash_ops.unpermute(positions, numel, 7), elements)
    assert positions[:30].tolist() == [oracle.permute(e, numel, 7) for e in elements[:30].tolist()]
    h = PermutationHash(numel, 65_536, 7)
    got = h.partition_of(elements)
    assert torch.equal(got, positions * 65_536 // numel)
    partition = int(got[2])
    assert 0 <= int(h.locate(partition, elements[2:3])) < h.partition_numel(partition)


@settings(max_examples=40)
@given(st.integers(0, 700), st.integers(1, 130), st.integers(0, 2**63 - 1))
def test_elements_and_positions_follow_from_one_another(numel, partitions, seed):
    h = PermutationHash(numel, partitions, seed)
    elements = torch.arange(numel)
    partition = h.partition_of(elements)
    sizes = [h.partition_numel(p) for p in range(partitions)]
    assert sum(sizes) == numel
    for p in range(partitions):
        mine, position = partition == p, h.locate(p, elements)
        assert torch.equal(position >= 0, mine)
        assert position[mine].sort().values.tolist() == list(range(sizes[p]))
        assert torch.equal(h.element_at(p, position[mine]), elements[mine])
    assert max(sizes) - min(sizes) <= 1
    expected = [oracle.partition_of(e, numel, partitions, seed) for e in range(numel)]
    assert partition.tolist() == expected


def test_seeds_give_different_partitions():
    elements = torch.arange(10_000)
    one, two = (PermutationHash(10_000, 16, seed).partition_of(elements) for seed in (0, 1))
    # Independent hashes agree on 1 in 16: 625 of 10,000, standard deviation 24.
    assert 500 < int((one == two).sum()) < 750


PATTERNS = {
    "uniform": lambda numel, count: torch.randperm(numel)[:count],
    "clustered": lambda numel, count: torch.arange(numel // 3, numel // 3 + count),
    "rows": lambda numel, count: (
        (torch.randperm(numel // 512)[: count // 512] * 512).unsqueeze(1) + torch.arange(512)
    ).view(-1),
    "every n-th": lambda numel, count: torch.arange(count) * (numel // count),
    "powers of two": lambda numel, count: torch.arange(count) * 64,
    "bits reversed": lambda numel, count: (
        torch.arange(count) % 32 * (numel // 32) + torch.arange(count) // 32
    ),
}


@pytest.mark.parametrize("partitions", [2, 3, 8, 16, 64, 128])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_imbalance_stays_within_theorem_2(pattern, partitions):
    """The theorem's constant, by Chernoff: sqrt(6), with probability 1 - 1/n for each mapping.

    P(load > (1 + d) m / n) <= exp(-d^2 m / 3n); over n partitions that is 1 / n at
    d = sqrt(6 n ln n / m). The seeds are fixed, so the expected number of exceptions is allowed.
    """
    torch.manual_seed(0)
    numel, count, seeds = 2**21, 2**15, 8
    indices = PATTERNS[pattern](numel, count)
    assert indices.unique().numel() == count
    bound = 1 + math.sqrt(6 * partitions * math.log(partitions) / count)
    above = 0
    for seed in range(seeds):
        got = PermutationHash(numel, partitions, seed).partition_of(indices)
        imbalance = partitions * int(got.bincount().max()) / count
        above += imbalance > bound
    assert above <= seeds / partitions


@settings(max_examples=60)
@given(
    st.integers(1, 400),
    st.integers(1, 20),
    st.integers(1, 12),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 1000),
)
def test_hierarchical_hash_equals_the_oracle(numel, partitions, r1, r2, rehashes, seed):
    count = seed % (numel + 1)
    indices, values = _entries(numel, count, seed)
    h = PermutationHash(numel, partitions, seed)
    partition, memory = h.partition_of(indices), HashMemory(r1, r2, rehashes, seed)
    with on_threads(1):  # one thread places entries in order, as the oracle does
        got_indices, got_values, offsets, counts = hash_ops.hierarchical_hash(
            indices, values, partition, numel, partitions, memory
        )
    expected, serial, grown = oracle.hierarchical_hash(
        indices.tolist(), partition.tolist(), partitions, r1, r2, rehashes, seed
    )
    assert counts.tolist() == [serial, grown]
    for entries, (begin, end) in zip(expected, pairwise(offsets.tolist()), strict=True):
        assert torch.equal(got_indices[begin:end], indices[entries])
        cases.assert_same_bits(got_values[begin:end], values[entries], f"from {begin}")


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(
    ("r1", "r2"), [(None, None), (1, 0), (1, 5), (5000, 0)], ids=["default", "1+0", "1+5", "wide"]
)
def test_nothing_is_lost_with_any_memory_and_any_threads(dtype, r1, r2):
    indices, values = _entries(1_000_003, 60_000, 1, dtype)
    h = PermutationHash(1_000_003, 7, 3)
    results = []
    for count in (1, 2, 4):
        with on_threads(count):
            got = hierarchical_hash(h, indices, values, parallel_slots=r1, serial_slots=r2)
        results.append(got)
    ordered, order = indices.sort()
    expected = split(h, ordered, values[order])
    for got in results:
        assert got.offsets == expected.offsets
        assert torch.equal(got.indices_K, expected.indices_K)
        cases.assert_same_bits(got.values_K, expected.values_K, f"{r1} + {r2}")
        sizes = torch.tensor(got.offsets).diff()
        assert 1 <= 7 * int(sizes.max()) / int(sizes.sum()) < 1.1, "paper, definition 8"


def test_threads_that_compete_for_slots_lose_nothing():
    """Every task has the same indices, so threads compete for the same free slots.

    With check, write and read-back as three steps (the paper's), this loses entries.
    """
    h = PermutationHash(2**14, 1, 0)
    indices = torch.arange(2**14).repeat(16)
    values = torch.arange(2**18, dtype=torch.float32)
    ordered, order = indices.sort(stable=True)
    for attempt in range(20):
        with on_threads(4):
            got = hierarchical_hash(h, indices, values, seed=attempt)
        assert torch.equal(got.indices_K, ordered)
        assert torch.equal(got.values_K, values[order])


@pytest.mark.parametrize("numel", [0, 1, 5])
def test_empty_and_tiny(numel):
    h = PermutationHash(numel, 4, 0)
    got = hierarchical_hash(h, torch.arange(numel), torch.ones(numel))
    assert got.offsets[-1] == numel
    assert got.indices_K.sort().values.tolist() == list(range(numel))


X = torch.arange(4)
V = torch.ones(4)
H = PermutationHash(10, 3, 0)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: PermutationHash(2**31, 3, 0), ConfigError, "numel"),
        (lambda: PermutationHash(10, 0, 0), ConfigError, "partitions"),
        (lambda: PermutationHash(10, 2**16 + 1, 0), ConfigError, "partitions"),
        (lambda: PermutationHash(10, 3, -1), ConfigError, "seed"),
        (lambda: H.partition_of(torch.tensor([3, 10])), ExtensionError, "position 1"),
        (lambda: H.partition_of(torch.tensor([-1])), ExtensionError, "0 to 9"),
        (lambda: H.partition_of(torch.tensor([1], dtype=torch.int32)), ExtensionError, "dtype"),
        (lambda: H.partition_of(torch.zeros(2, 2, dtype=torch.int64)), ExtensionError, "1-D"),
        (lambda: H.partition_numel(3), ExtensionError, "no such partition"),
        (lambda: hierarchical_hash(H, X, V[:3]), ExtensionError, "values"),
        (lambda: hierarchical_hash(H, X, V.double()), ExtensionError, "dtype"),
        (lambda: hierarchical_hash(H, X, V, rehashes=0), ExtensionError, "rehashes"),
        (lambda: hierarchical_hash(H, X, V, parallel_slots=0), ExtensionError, "memory"),
        (lambda: hierarchical_hash(H, X, V, parallel_slots=2**31 - 1), ExtensionError, "2\\^32"),
        (lambda: hierarchical_hash(H, X + 7, V), ExtensionError, "out of range"),
    ],
)
def test_arguments_that_do_not_match_are_one_typed_error(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_partition_out_of_range_cannot_write_outside_the_memory():
    for bad in (-1, 2):
        partition = torch.tensor([0, 1, bad, 0])
        with pytest.raises(ExtensionError, match="partition_of is out of range at position 2"):
            hash_ops.hierarchical_hash(X, V, partition, 10, 2, HashMemory(4, 1, 3, 0))
