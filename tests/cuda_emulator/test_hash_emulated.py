"""The CUDA kernels of hashing and of row-sparse gradients on the emulator, against the CPU's ops.

The CPU's ops are compared with slow oracles in tests/cuda_ext. Shape suffixes: K entries or local
rows, P positions, M elements, U rows of the union, D columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from megatron_sparse.cuda_ext import hash_ops, row_sparse_ops
from megatron_sparse.cuda_ext.arguments import refusing
from megatron_sparse.cuda_ext.hash_ops import BitmapPlace
from megatron_sparse.errors import ExtensionError
from megatron_sparse.formats.hash_partition import IndexSetHash, PermutationHash
from tests.cuda_emulator.device import OnDevice, to_gpu, unwrapped
from tests.cuda_emulator.emulator import DTYPE_CODES, SCHEDULES, Emulator
from tests.cuda_ext.cases import scattered_grad as gradient


class Kernels:
    """The ops on the emulated GPU, with tensors of the CPU that are copied there and back."""

    def __init__(self, emulator: Emulator, shift: int) -> None:
        """`shift`: bytes, a multiple of 4, by which tensors miss a 256-byte border."""
        self._emulator, self._shift = emulator, shift

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, *given: Any) -> Any:
        there = [
            self._placed(value) if isinstance(value, torch.Tensor) else value for value in given
        ]
        result = self._emulator.call(name, *there)
        for value, placed in zip(given, there, strict=True):
            if isinstance(placed, OnDevice):
                value.copy_(placed.inner)
        return tree_map(unwrapped, result)

    def _placed(self, value: torch.Tensor) -> OnDevice:
        return to_gpu(value.contiguous(), max(self._shift // value.element_size(), 0))


@pytest.fixture(params=SCHEDULES, ids=str)
def kernels(request: pytest.FixtureRequest, emulator: Emulator) -> Kernels:
    """The ops under one schedule, with buffers that are aligned or not."""
    order, seed, resident = request.param
    emulator.schedule(order, seed, resident, multiprocessors=2)
    return Kernels(emulator, shift=4 * seed)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_same(got, wanted) -> None:
    """Bit for bit, whatever the dtype."""
    assert got.shape == wanted.shape
    assert torch.equal(
        got.contiguous().view(-1).view(torch.uint8), wanted.contiguous().view(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("numel", [1, 2, 5, 4097, 2**31 - 1])
def test_partition_hashes(kernels: Kernels, numel: int) -> None:
    element_K = torch.cat(
        [torch.tensor([0, numel - 1]), torch.randint(numel, (700,), generator=generator(numel))]
    )
    for seed in (0, 2**63 - 1):
        position_K = hash_ops.permute(element_K, numel, seed)
        assert_same(kernels.hash_permute(element_K, numel, seed), position_K)
        assert_same(kernels.hash_unpermute(position_K, numel, seed), element_K)
        for partitions, general in itertools.product((1, 3, 2**16), (False, True)):
            wanted = hash_ops.partition_of(element_K, numel, partitions, seed, general=general)
            got = kernels.hash_partition_of(element_K, numel, partitions, seed, general)
            assert_same(got, wanted)


def outcome(op, *arguments) -> str:
    try:
        refusing(op, *arguments)
    except ExtensionError as error:
        return str(error)
    return "no error"


def test_elements_out_of_range_have_the_same_error(kernels: Kernels) -> None:
    for wrong in (-1, 50, 2**40, -(2**63)):
        element_K = torch.arange(50).repeat(7)
        element_K[[123, 234]] = wrong
        wanted = outcome(hash_ops.permute, element_K, 50, 3)
        assert "out of range at position 123" in wanted
        assert outcome(kernels.hash_permute, element_K, 50, 3) == wanted


@pytest.mark.parametrize("partitions", [1, 3, 256, 257, 5000])
@pytest.mark.parametrize("count", [0, 1, 33, 2048, 5001])
def test_split(kernels: Kernels, count: int, partitions: int) -> None:
    partition_K = torch.randint(partitions, (count,), generator=generator(count))
    for chosen_K in (partition_K, torch.full_like(partition_K, partitions // 2)):
        order_K, offsets = kernels.hash_split(chosen_K, partitions)
        wanted_K, wanted_offsets = hash_ops.split(chosen_K, partitions)
        assert_same(order_K, wanted_K)
        assert_same(offsets, wanted_offsets)


def test_a_partition_out_of_range_is_refused(kernels: Kernels) -> None:
    for wrong in (-1, 9, 2**40):
        partition_K = torch.arange(9).repeat(300)
        partition_K[100] = wrong
        text = outcome(kernels.hash_split, partition_K, 9)
        assert "partition_of is out of range at position 100" in text
        assert f"got:      {wrong}" in text


MEMORIES = [
    # entries, numel, partitions, r1, r2, rehashes
    (0, 10, 3, 1, 0, 1),
    (1, 10, 1, 1, 0, 1),
    (3000, 20_000, 8, 750, 75, 3),
    (3000, 20_000, 8, 40, 5, 2),  # most overflow
    (700, 700, 5, 1, 0, 1),  # nearly all
    (2500, 10_000, 300, 17, 2, 64),
]


@pytest.mark.parametrize("memory", MEMORIES, ids=str)
def test_algorithm_1_loses_nothing(kernels: Kernels, memory: tuple[int, ...]) -> None:
    count, numel, partitions, parallel, serial, rehashes = memory
    index_K = torch.randperm(numel, generator=generator(count))[:count]
    for seed, crowded in ((5, False), (2**63 - 1, True)):
        partition_K = PermutationHash(numel, partitions, seed).partition_of(index_K)
        if crowded:
            partition_K.zero_()
        entry_K, offsets, counts = kernels.hash_memory(
            index_K, partition_K, numel, partitions, parallel, serial, rehashes, seed
        )
        wanted_K, wanted_offsets = hash_ops.split(partition_K, partitions)
        assert_same(offsets, wanted_offsets)
        cut = offsets.tolist()
        for first, last in itertools.pairwise(cut):
            assert_same(entry_K[first:last].sort().values, wanted_K[first:last])
        through_serial, grown = counts.tolist()
        fullest = int(offsets.diff().max())
        assert 0 <= grown <= through_serial <= count
        # Entries without room in the memory must have used all rehashes.
        assert grown >= fullest - parallel - serial
        # The first rehash places as many as there are different slots.
        if rehashes == 1 and parallel == 1:
            taken = int((offsets.diff() > 0).sum())
            assert (through_serial, grown) == (count - taken, count - taken)


def test_algorithm_1_refuses_what_is_out_of_range(kernels: Kernels) -> None:
    index_K, partition_K = torch.arange(600), torch.arange(600) % 4
    memory = (600, 4, 300, 30, 3, 1)
    for entries_K, name in ((index_K, "indices"), (partition_K, "partition_of")):
        for wrong in (-1, 2**40):
            kept = int(entries_K[77])
            entries_K[77] = wrong
            text = outcome(kernels.hash_memory, index_K, partition_K, *memory)
            assert f"hierarchical_hash: {name} is out of range at position 77" in text
            entries_K[77] = kept


POSITIONS = [0, 1, 63, 64, 65, 4095, 4096, 4097, 13_000]


@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
@pytest.mark.parametrize("positions", POSITIONS)
def test_pack(kernels: Kernels, positions: int, dtype: torch.dtype) -> None:
    for density in (0.0, 0.05, 1.0):
        values_P = gradient(positions, density, dtype, seed=positions)
        outputs = []
        for pack in (kernels.hash_bitmap_pack, hash_ops.bitmap_pack):
            words = torch.full((8 * -(-positions // 64),), 0xEE, dtype=torch.uint8)
            packed = torch.zeros(values_P.nbytes, dtype=torch.uint8)
            nnz = int(pack(values_P, words, packed))
            outputs.append((words, packed[: nnz * values_P.element_size()]))
        for got, wanted in zip(*outputs, strict=True):
            assert_same(got, wanted)


@pytest.mark.parametrize("kind", [PermutationHash, IndexSetHash])
@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
def test_elements_and_sums(kernels: Kernels, dtype: torch.dtype, kind: type) -> None:
    for numel, partitions, partition in ((1, 1, 0), (9000, 2, 1), (5000, 3, 0), (2, 5, 4)):
        h = kind(numel, partitions, 11)
        positions = h.partition_numel(partition)
        values_P = gradient(positions, 0.1, dtype, seed=numel)
        words = torch.zeros(8 * -(-positions // 64), dtype=torch.uint8)
        packed = torch.zeros(values_P.nbytes, dtype=torch.uint8)
        nnz = hash_ops.bitmap_pack(values_P, words, packed)
        values = packed[: nnz * values_P.element_size()]
        place = (partition, partitions, 11, h.index_set(partition, words.device))
        wanted_K, _, found = hash_ops.bitmap_elements(words, nnz, numel, BitmapPlace(*place))
        assert found == nnz
        got_K, status = kernels.hash_bitmap_elements(words, nnz, numel, *place)
        assert status.tolist() == [0, nnz]
        assert_same(got_K, wanted_K)
        sums_M = [torch.randn(numel, generator=generator(3)) for _ in range(2)]
        code = DTYPE_CODES[dtype]
        assert hash_ops.bitmap_add_(sums_M[0], words, values, code, nnz, BitmapPlace(*place)) == (
            "",
            nnz,
        )
        status = kernels.hash_bitmap_add_(sums_M[1], words, values, code, nnz, *place)
        assert status.tolist() == [0, nnz]
        torch.testing.assert_close(sums_M[1], sums_M[0], rtol=0, atol=0, equal_nan=True)


def test_a_bitmap_that_does_not_fit_adds_nothing(kernels: Kernels) -> None:
    numel, good = 9000, torch.zeros(8 * 141, dtype=torch.uint8)
    good[[3, 700]] = 0x11
    place = (0, 1, 7)
    stray = good.clone()
    stray[-1] = 0x80  # position 9023
    wrong_set = torch.arange(numel, dtype=torch.int32)
    twice, beyond = wrong_set.clone(), wrong_set.clone()
    twice[4500], beyond[-1] = 4499, numel
    for words, nnz, index_set, wanted in (
        (good, 3, None, [1, 4]),
        (good, 5, None, [1, 4]),
        (stray, 5, None, [2, numel]),
        (good, 4, twice, [3, 4500]),
        (good, 4, beyond, [3, numel - 1]),
    ):
        acc_M, values = torch.ones(numel), torch.ones(nnz).view(torch.uint8)
        status = kernels.hash_bitmap_add_(acc_M, words, values, 0, nnz, *place, index_set)
        assert status.tolist() == wanted
        assert bool((acc_M == 1).all())
        elements_K, status = kernels.hash_bitmap_elements(words, nnz, numel, *place, index_set)
        assert status.tolist() == wanted
        assert bool((elements_K == -1).all())


def row_sets(ranks: int, num_rows: int, most: int) -> list[torch.Tensor]:
    chance = generator(ranks + most)
    sizes = torch.randint(most + 1, (ranks,), generator=chance).tolist()
    return [torch.randperm(num_rows, generator=chance)[:size].sort().values for size in sizes]


@pytest.mark.parametrize(("ranks", "num_rows", "most"), [(1, 9, 5), (3, 40, 30), (9, 9000, 900)])
def test_union_and_match(kernels: Kernels, ranks: int, num_rows: int, most: int) -> None:
    sets = [*row_sets(ranks, num_rows, most), torch.empty(0, dtype=torch.int64)]
    entries = torch.cat(sets)
    offsets = torch.tensor([0, *(each.numel() for each in sets)]).cumsum(0)
    union_U, status = kernels.row_sparse_union(entries, offsets, num_rows)
    wanted_U, wrong = row_sparse_ops.union(entries, offsets, num_rows)
    assert wrong is None
    assert status.tolist() == [0, 0, 0, 0]
    assert_same(union_U, wanted_U)
    for local_K in sets:
        assert_same(
            kernels.row_sparse_match(local_K, union_U), row_sparse_ops.match(local_K, union_U)
        )


def test_union_of_nothing(kernels: Kernels) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    for offsets in (torch.tensor([0]), torch.tensor([0, 0, 0])):
        union_U, status = kernels.row_sparse_union(nothing, offsets, 5)
        assert union_U.numel() == 0
        assert status.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("place", [0, 1, 250, 251, 499])
@pytest.mark.parametrize("wrong", [-1, 1000, 2**62, "same"])
def test_a_wrong_set_is_named(kernels: Kernels, place: int, wrong: int | str) -> None:
    entries = torch.cat([torch.arange(250), torch.arange(250) * 4])
    offsets = torch.tensor([0, 250, 250, 500])
    entries[place] = entries[place - 1] if wrong == "same" else wrong
    _, status = kernels.row_sparse_union(entries, offsets, 1000)
    _, found = row_sparse_ops.union(entries, offsets, 1000)
    assert status.tolist() == ([0, 0, 0, 0] if found is None else [1, *found])


@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
@pytest.mark.parametrize("columns", [1, 3, 8, 70])
def test_expand(kernels: Kernels, columns: int, dtype: torch.dtype) -> None:
    union_U = torch.arange(0, 130, 3)
    for local_K in (union_U[::4].clone(), union_U, union_U[:0]):
        rows_KD = gradient(local_K.numel() * columns, 1.0, dtype).view(-1, columns)
        wanted = row_sparse_ops.expand(local_K, rows_KD, union_U)
        assert_same(kernels.row_sparse_expand(local_K, rows_KD, union_U), wanted)


def test_wrong_rows_have_the_same_errors(kernels: Kernels) -> None:
    union_U = torch.arange(0, 2000, 2)
    missing, repeated, falling = union_U[::3].clone(), union_U[::3].clone(), union_U.clone()
    missing[100], repeated[100], falling[0] = 601, repeated[99], -1
    for local_K, all_U in ((missing, union_U), (repeated, union_U), (union_U[:5], falling)):
        rows_KD = torch.ones(local_K.numel(), 4)
        wanted = outcome(row_sparse_ops.match, local_K, all_U)
        assert wanted != "no error"
        assert outcome(kernels.row_sparse_match, local_K, all_U) == wanted
        wanted = outcome(row_sparse_ops.expand, local_K, rows_KD, all_U)
        assert wanted != "no error"
        assert outcome(kernels.row_sparse_expand, local_K, rows_KD, all_U) == wanted


@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
def test_sums_of_rows(kernels: Kernels, dtype: torch.dtype) -> None:
    for count, columns in ((1, 1), (40, 7), (300, 16)):
        rows_KD = torch.randn(count, columns, generator=generator(count)).to(dtype)
        rows_KD[0] = -0.0
        group_K = torch.randint(1 + count // 3, (count,), generator=generator(columns))
        order_K = torch.sort(group_K, stable=True).indices
        sizes = group_K.unique(return_counts=True)[1]
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        wanted = row_sparse_ops.sum_rows(rows_KD, order_K, offsets)
        assert_same(kernels.row_sparse_sum(rows_KD, order_K, offsets), wanted)


def test_sums_round_and_overflow_as_on_the_cpu(kernels: Kernels) -> None:
    """Inf and NaN too; a NaN's payload is the machine's."""
    for dtype in DTYPE_CODES:
        rows_KD = gradient(900, 1.0, dtype).view(30, 30) * 100
        rows_KD[::7] = torch.finfo(dtype).max
        order_K, offsets = torch.arange(30), torch.tensor([0, 1, 10, 30])
        wanted = row_sparse_ops.sum_rows(rows_KD, order_K, offsets)
        got = kernels.row_sparse_sum(rows_KD, order_K, offsets)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_wrong_groups_are_refused(kernels: Kernels) -> None:
    rows_KD, order_K = torch.ones(10, 2), torch.arange(10)
    wrong_K = order_K.clone()
    wrong_K[6] = 10
    text = outcome(kernels.row_sparse_sum, rows_KD, wrong_K, torch.tensor([0, 10]))
    assert text == outcome(row_sparse_ops.sum_rows, rows_KD, wrong_K, torch.tensor([0, 10]))
    assert "order is out of range at position 6" in text
    for offsets in ([0, 4, 4, 10], [1, 10], [0, 9], [0, 12, 10], [-5, 10]):
        text = outcome(kernels.row_sparse_sum, rows_KD, order_K, torch.tensor(offsets))
        assert "offsets does not cut the order into groups" in text
