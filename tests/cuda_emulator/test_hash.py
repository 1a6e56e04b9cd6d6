"""Hashing, hash bitmaps, pairs and row-sparse gradients on CUDA tensors: the CPU's results.

The same tests run on a GPU, if there is one, and in the emulator; the ops themselves there in
several schedules. The CPU's are compared with slow oracles in tests/formats. Shape suffixes: K
entries or local rows, P positions, M elements, D columns.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from megatron_sparse.cuda_ext import hash_ops, row_sparse_ops
from megatron_sparse.cuda_ext.arguments import call
from megatron_sparse.cuda_ext.hash_ops import BitmapPlace, HashMemory
from megatron_sparse.errors import ExtensionError, WireFormatError
from megatron_sparse.formats import hash_bitmap, hash_pairs, row_sparse
from megatron_sparse.formats.hash_partition import PermutationHash
from megatron_sparse.formats.hierarchical_hash import hierarchical_hash, split
from megatron_sparse.formats.row_record import RowPart
from megatron_sparse.formats.row_sparse import RowSparse
from tests.codec import one_nan
from tests.cuda_emulator.conftest import on_gpu
from tests.cuda_emulator.device import Place, to_gpu
from tests.cuda_emulator.emulator import DTYPE_CODES, SCHEDULES
from tests.cuda_ext import cases
from tests.cuda_ext.cases import scattered_grad as gradient
from tests.formats.hash_cases import STEP, place_of

dtypes = pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)


@pytest.fixture(params=[*SCHEDULES, pytest.param("gpu", marks=pytest.mark.gpu)], ids=str)
def scheduled(request: pytest.FixtureRequest) -> Place:
    """As `place`, under one schedule of the emulator, with tensors that are aligned or not."""
    if request.param == "gpu":
        return on_gpu
    order, seed, resident = request.param
    request.getfixturevalue("emulated_gpu")
    request.getfixturevalue("emulator").schedule(order, seed, resident, multiprocessors=2)
    return lambda tensor: to_gpu(tensor, 4 * seed // tensor.element_size())


def error_of(op: Callable[..., Any], *given: Any) -> str:
    with pytest.raises((ExtensionError, WireFormatError)) as caught:
        op(*given)
    return str(caught.value)


def same_error(place: Place, op: Callable[..., Any], *given: Any) -> str:
    """The error of the CPU, which must be that of the device too."""
    text = error_of(op, *given)
    assert error_of(op, *tree_map_only(torch.Tensor, place, given)) == text
    return text


def same(place: Place, op: Callable[..., Any], *given: Any, is_sum: bool = False) -> Any:
    """Calls an op with tensors of the CPU and of the device: the bits must be the same.

    In-place ops must return what they change. `is_sum`: a NaN's payload is the machine's. Returns
    the result on the CPU.
    """
    wanted = op(*tree_map_only(torch.Tensor, torch.clone, given))
    found = op(*tree_map_only(torch.Tensor, place, given))
    for got, value in zip(tree_flatten(found)[0], tree_flatten(wanted)[0], strict=True):
        if not isinstance(value, torch.Tensor):
            assert got == value
            continue
        assert got.is_cuda
        assert got.shape == value.shape
        sides = got.cpu().reshape(-1), value.reshape(-1)
        cases.assert_same_bits(*(map(one_nan, sides) if is_sum else sides), str(op))
    return wanted


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("numel", [1, 2, 5, 4097, 2**31 - 1])
def test_partition_hashes(scheduled: Place, numel: int) -> None:
    element_K = torch.cat(
        [torch.tensor([0, numel - 1]), torch.randint(numel, (700,), generator=generator(numel))]
    )
    for seed in (0, 2**63 - 1):
        position_K = same(scheduled, hash_ops.permute, element_K, numel, seed)
        same(scheduled, hash_ops.unpermute, position_K, numel, seed)
        for partitions in (1, 3, 2**16):
            same(scheduled, hash_ops.partition_of, element_K, numel, partitions, seed)


@pytest.mark.parametrize("partitions", [1, 3, 256, 257, 5000])
@pytest.mark.parametrize("count", [0, 1, 33, 2048, 5001])
def test_split(scheduled: Place, count: int, partitions: int) -> None:
    partition_K = torch.randint(partitions, (count,), generator=generator(count))
    for chosen_K in (partition_K, torch.full_like(partition_K, partitions // 2)):
        same(scheduled, hash_ops.split, chosen_K, partitions)


def test_what_is_out_of_range_is_named(scheduled: Place) -> None:
    for wrong in (-1, 50, 2**40, -(2**63)):
        number_K = torch.arange(50).repeat(60)
        number_K[[123, 2340]] = wrong
        text = same_error(scheduled, hash_ops.permute, number_K, 50, 3)
        assert "out of range at position 123" in text


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
def test_algorithm_1_loses_nothing(scheduled: Place, memory: tuple[int, ...]) -> None:
    count, numel, partitions, parallel, serial, rehashes = memory
    index_K = torch.randperm(numel, generator=generator(count))[:count]
    for seed, crowded in ((5, False), (2**63 - 1, True)):
        partition_K = PermutationHash(numel, partitions, seed).partition_of(index_K)
        if crowded:
            partition_K.zero_()
        counts = []

        def entries(*given: Any, seed: int = seed, counts: list[Any] = counts) -> Sequence[Any]:
            slots = HashMemory(parallel, serial, rehashes, seed)
            *results, found = hash_ops.hierarchical_hash(*given, numel, partitions, slots)
            counts.append(found.tolist())
            return results

        value_K = torch.arange(float(count))  # the number of its entry
        offsets = same(scheduled, entries, index_K, value_K, partition_K)[2]
        through_serial, grown = counts[1]  # on the device
        fullest = int(offsets.diff().max())
        assert 0 <= grown <= through_serial <= count
        # Entries without room in the memory must have used all rehashes.
        assert grown >= fullest - parallel - serial
        # The first rehash places as many as there are different slots.
        if rehashes == 1 and parallel == 1:
            taken = int((offsets.diff() > 0).sum())
            assert (through_serial, grown) == (count - taken, count - taken)


def test_algorithm_1_refuses_what_is_out_of_range(scheduled: Place) -> None:
    given = {"indices": torch.arange(600), "partition_of": torch.arange(600) % 4}
    for name, wrong in itertools.product(given, (-1, 2**40)):
        bad = {key: entries_K.clone() for key, entries_K in given.items()}
        bad[name][77] = wrong
        index_K, partition_K = map(scheduled, bad.values())
        memory = HashMemory(300, 30, 3, 1)
        text = error_of(
            hash_ops.hierarchical_hash, index_K, index_K.float(), partition_K, 600, 4, memory
        )
        assert f"hierarchical_hash: {name} is out of range at position 77" in text


def pack(values_P: torch.Tensor, words: torch.Tensor, packed: torch.Tensor) -> Sequence[Any]:
    """The bitmap, and of the values what is defined."""
    nnz = hash_ops.bitmap_pack(values_P, words, packed)
    return words, packed[: nnz * values_P.element_size()]


def to_pack(values_P: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Arguments of `pack`."""
    words = torch.full((8 * -(-values_P.numel() // 64),), 0xEE, dtype=torch.uint8)
    return values_P, words, torch.zeros(values_P.nbytes, dtype=torch.uint8)


@dtypes
@pytest.mark.parametrize("positions", [0, 1, 63, 64, 65, 4095, 4096, 4097, 13_000])
def test_pack(scheduled: Place, positions: int, dtype: torch.dtype) -> None:
    for density in (0.0, 0.05, 1.0):
        same(scheduled, pack, *to_pack(gradient(positions, density, dtype, seed=positions)))


def add(acc: torch.Tensor, *given: Any) -> Sequence[Any]:
    return hash_ops.bitmap_add_(acc, *given), acc


@dtypes
def test_sums_of_bitmaps(scheduled: Place, dtype: torch.dtype) -> None:
    for numel, partitions, partition in ((1, 1, 0), (9000, 2, 1), (5000, 3, 0), (2, 5, 4)):
        h = PermutationHash(numel, partitions, 11)
        values_P = gradient(h.partition_numel(partition), 0.1, dtype, seed=numel)
        words, values = pack(*to_pack(values_P))
        nnz = values.numel() // dtype.itemsize
        where = BitmapPlace(partition, partitions, 11)
        acc_M = torch.randn(numel, generator=generator(3))
        given = (acc_M, words, values, DTYPE_CODES[dtype], nnz, where)
        assert same(scheduled, add, *given, is_sum=True)[0] == ("", nnz)
        by_position = (acc_M[: values_P.numel()], *given[1:-1], BitmapPlace(0, 1, 0, False))
        summed_P = same(scheduled, add, *by_position, is_sum=True)[1]
        wanted_P = by_position[0] + values_P.float()
        torch.testing.assert_close(summed_P, wanted_P, rtol=0, atol=0, equal_nan=True)


def test_a_bitmap_that_does_not_fit_adds_nothing(scheduled: Place) -> None:
    numel, good = 9000, torch.zeros(8 * 141, dtype=torch.uint8)
    good[[3, 700]] = 0x11
    stray = good.clone()
    stray[-1] = 0x80  # position 9023
    for words, nnz, wanted in ((good, 3, [1, 4]), (good, 5, [1, 4]), (stray, 5, [2, numel])):
        acc_M, values = scheduled(torch.ones(numel)), scheduled(torch.ones(nnz).view(torch.uint8))
        status = call("hash_bitmap_add_", acc_M, scheduled(words), values, 0, nnz, 0, 1, 7, True)
        assert status.tolist() == wanted
        assert bool((acc_M == 1).all())


@dtypes
def test_sums_of_rows(scheduled: Place, dtype: torch.dtype) -> None:
    for count, columns in ((1, 1), (40, 7), (300, 16)):
        rows_KD = torch.randn(count, columns, generator=generator(count)).to(dtype)
        rows_KD[0] = -0.0
        group_K = torch.randint(1 + count // 3, (count,), generator=generator(columns))
        order_K = torch.sort(group_K, stable=True).indices
        sizes = group_K.unique(return_counts=True)[1]
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        same(scheduled, row_sparse_ops.sum_rows, rows_KD, order_K, offsets)
    # Rounded, overflowing, and of Inf and NaN.
    rows_KD = gradient(900, 1.0, dtype).view(30, 30) * 100
    rows_KD[::7] = torch.finfo(dtype).max
    given = (rows_KD, torch.arange(30), torch.tensor([0, 1, 10, 30]))
    same(scheduled, row_sparse_ops.sum_rows, *given, is_sum=True)


def test_wrong_groups_are_refused(scheduled: Place) -> None:
    rows_KD, order_K = torch.ones(10, 2), torch.arange(10)
    wrong_K = order_K.clone()
    wrong_K[6] = 10
    text = same_error(scheduled, row_sparse_ops.sum_rows, rows_KD, wrong_K, torch.tensor([0, 10]))
    assert "order is out of range at position 6" in text
    for offsets in ([0, 4, 4, 10], [1, 10], [0, 9], [0, 12, 10], [-5, 10]):
        there = map(scheduled, (rows_KD, order_K, torch.tensor(offsets)))
        text = error_of(row_sparse_ops.sum_rows, *there)
        assert "offsets does not cut the order into groups" in text


def test_a_partition(place: Place) -> None:
    h = PermutationHash(3000, 7, 5)
    element_K = torch.randperm(3000)[:900]
    same(place, h.partition_of, element_K)
    same(place, partial(h.locate, 3), element_K)
    same(place, partial(h.element_at, 3), torch.arange(h.partition_numel(3)))
    text = same_error(place, h.partition_of, torch.tensor([0, 2999, 3000]))
    assert "elements is out of range at position 2" in text


@pytest.mark.parametrize("partitions", [1, 5, 300])
@dtypes
def test_algorithm_1_and_the_split(place: Place, dtype: torch.dtype, partitions: int) -> None:
    h = PermutationHash(4000, partitions, 9)
    values_K = gradient(1000, 1.0, dtype)
    index_K = torch.randint(4000, (1000,), generator=generator(1))

    def parted(by: Callable[..., Any], *given: torch.Tensor) -> Any:
        made = by(h, *given)
        return made.offsets, made.indices_K, made.values_K

    # Repeated and in any order; the smallest memory overflows.
    smallest = partial(hierarchical_hash, parallel_slots=1, serial_slots=2, rehashes=1)
    for by in (hierarchical_hash, smallest):
        same(place, partial(parted, by), index_K, values_K)
    same(place, partial(parted, split), index_K.sort().values, values_K)
    text = same_error(place, partial(parted, hierarchical_hash), index_K, values_K[1:])
    assert "values has the wrong length" in text


@pytest.mark.parametrize("density", [0.0, 0.05, 1.0])
@dtypes
def test_bitmaps(place: Place, dtype: torch.dtype, density: float) -> None:
    h = PermutationHash(9001, 2, 3)
    values_P, where = gradient(h.partition_numel(1), density, dtype), place_of(h, 1, dtype)

    shifts = {9001: 3, h.partition_numel(1): 1}
    shifted = lambda tensor: place(tensor, shifts.get(tensor.numel(), 0))  # noqa: E731
    record = same(shifted, lambda values_P: hash_bitmap.encode(values_P, where), values_P)
    acc_M, op = torch.randn(9001), partial(added, hash_bitmap.decode_add_, where)
    same(shifted, op, acc_M, record, is_sum=True)


def added(op: Callable[..., Any], where: Any, acc: torch.Tensor, record: torch.Tensor) -> Any:
    """The sum; a record that is refused must leave it as it was."""
    before = acc.clone()
    try:
        op(acc, record, where, rank=6)
    except WireFormatError:
        assert torch.equal(acc, before)
        raise
    return acc


def test_a_bad_bitmap_has_the_same_error_and_adds_nothing(place: Place) -> None:
    where = place_of(PermutationHash(4000, 2, 3), 0)
    record = hash_bitmap.encode(gradient(2000, 0.05, torch.float32), where)
    add_bitmap = partial(added, hash_bitmap.decode_add_, where)
    for at in (0, 8, 16, 24, 40, 50, 64, 70, 80, 90, 329):
        damaged = record.clone()
        damaged[at] ^= 0x5A
        assert "rank 6: field" in same_error(place, add_bitmap, torch.ones(4000), damaged)


@pytest.mark.parametrize("count", [0, 20, 300, 1500])
def test_pairs(place: Place, count: int) -> None:
    """As pairs, as a bitmap and dense."""
    where = place_of(PermutationHash(3000, 2, 8), 1, torch.bfloat16)
    position_K = torch.randperm(where.positions, generator=generator(count))[:count]
    index_K = where.partition_hash.element_at(1, position_K).sort().values
    values_K = torch.ones(index_K.numel()).to(torch.bfloat16)
    record = same(place, lambda *given: hash_pairs.encode(*given, where), index_K, values_K)
    accumulate, acc_P = partial(added, hash_pairs.accumulate_, where), torch.zeros(where.positions)
    same(place, accumulate, acc_P, record)
    if count == 20:
        stranger = where.partition_hash.element_at(0, torch.tensor([0]))
        record[80:84] = stranger.to(torch.int32).view(torch.uint8)
        assert "field indices" in same_error(place, accumulate, acc_P, record)


@pytest.mark.parametrize("value_dtype", ["fp32", "bf16", "fp16"])
def test_row_sparse(place: Place, value_dtype: str) -> None:
    dtype = list(DTYPE_CODES)[["fp32", "bf16", "fp16"].index(value_dtype)]
    index_K = torch.randint(90, (60,), generator=generator(2))
    rows_KD = torch.randn(60, 6, generator=generator(2)).to(dtype)
    part = RowPart(90, 6, value_dtype, part=1, parts=3, step=STEP)

    def everything(index_K: torch.Tensor, rows_KD: torch.Tensor) -> Any:
        summed = row_sparse.coalesce(index_K, rows_KD, 90)
        positions = part.positions(summed)
        record = rows_KD.new_empty(part.record_bytes(positions.numel()), dtype=torch.uint8)
        part.encode(summed, positions, record)
        read = part.decode(record, 0)
        record[80] = 0
        with pytest.raises(WireFormatError, match="rank 5: field row indices"):
            part.decode(record, 5)
        rows = summed.indices_K, summed.rows_KD, read.indices_K, read.rows_KD
        return *rows, record

    same(place, everything, index_K, rows_KD)


def test_a_coo_gradient_of_a_gpu(place: Place) -> None:
    if place is to_gpu:
        pytest.skip("sparse tensors of the emulated GPU cannot be made")
    rows = place(torch.tensor([1.0, 2.0, 4.0])).view(3, 1)
    gradient_of = torch.sparse_coo_tensor(place(torch.tensor([3, 1, 3])).view(1, 3), rows, (5, 1))
    assert RowSparse.from_coo(gradient_of).rows_KD.tolist() == [[2.0], [5.0]]
