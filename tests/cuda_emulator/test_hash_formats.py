"""Hash bitmaps, pairs, Algorithm 1 and row-sparse records on CUDA tensors: the CPU's results.

The same tests run on a GPU, if there is one, and on the emulated one.
"""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.errors import ExtensionError, WireFormatError
from megatron_sparse.formats import hash_bitmap, hash_pairs, row_sparse
from megatron_sparse.formats.hash_partition import IndexSetHash, PermutationHash
from megatron_sparse.formats.hierarchical_hash import hierarchical_hash, split
from megatron_sparse.formats.row_record import RowPart
from megatron_sparse.formats.row_sparse import RowSparse
from tests.cuda_emulator.device import Place
from tests.cuda_ext.cases import scattered_grad as gradient
from tests.formats.hash_cases import STEP, place_of

HASHES = (PermutationHash, IndexSetHash)
DTYPE_OF = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """On a GPU, and with the same bits as on the CPU."""
    assert got.is_cuda
    torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


def gpu_of(place: Place) -> torch.device:
    return place(torch.zeros(1)).device


@pytest.mark.parametrize("kind", HASHES)
def test_partition_hashes(place: Place, kind: type) -> None:
    h = kind(3000, 7, 5)
    element_K = torch.randperm(3000)[:900]
    on_gpu = place(element_K)
    partition_K = h.partition_of(element_K)
    assert_same(h.partition_of(on_gpu), partition_K)
    assert_same(h.locate(3, on_gpu), h.locate(3, element_K))
    position_K = torch.arange(h.partition_numel(3))
    assert_same(h.element_at(3, place(position_K)), h.element_at(3, position_K))
    with pytest.raises(ExtensionError, match="elements is out of range at position 2"):
        h.partition_of(place(torch.tensor([0, 2999, 3000])))


@pytest.mark.parametrize("partitions", [1, 5, 300])
@pytest.mark.parametrize("dtype", DTYPE_OF.values(), ids=str)
def test_algorithm_1_and_the_split_give_what_the_cpu_does(
    place: Place, dtype: torch.dtype, partitions: int
) -> None:
    h = PermutationHash(4000, partitions, 9)
    values_K = gradient(1000, 1.0, dtype)
    index_K = torch.randint(4000, (1000,), generator=torch.Generator().manual_seed(1))
    # Repeated and in any order; the smallest memory overflows.
    for memory in ({}, {"parallel_slots": 1, "serial_slots": 2, "rehashes": 1}):
        wanted = hierarchical_hash(h, index_K, values_K, **memory)
        got = hierarchical_hash(h, place(index_K), place(values_K), **memory)
        assert got.offsets == wanted.offsets
        assert_same(got.indices_K, wanted.indices_K)
        assert_same(got.values_K, wanted.values_K)
    ascending_K = index_K.sort().values
    wanted = split(h, ascending_K, values_K)
    got = split(h, place(ascending_K), place(values_K))
    assert got.offsets == wanted.offsets
    assert_same(got.indices_K, wanted.indices_K)
    assert_same(got.values_K, wanted.values_K)
    with pytest.raises(ExtensionError, match="values has the wrong length"):
        hierarchical_hash(h, place(index_K), place(values_K[1:]))
    with pytest.raises(ExtensionError, match="do not ascend"):
        split(h, place(index_K), place(values_K))


@pytest.mark.parametrize("density", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("kind", HASHES)
@pytest.mark.parametrize("dtype", DTYPE_OF.values(), ids=str)
def test_bitmaps(place: Place, dtype: torch.dtype, kind: type, density: float) -> None:
    h = kind(9001, 2, 3)
    values_P = gradient(h.partition_numel(1), density, dtype)
    where = place_of(h, 1, dtype)
    wanted = hash_bitmap.encode(values_P, where)
    record = hash_bitmap.encode(place(values_P, 1), where)
    assert_same(record, wanted)
    decoded = hash_bitmap.decode(wanted, where, rank=4)
    for got, plain in zip(hash_bitmap.decode(record, where, rank=4), decoded, strict=True):
        assert_same(got, plain)
    acc_M = torch.randn(9001)
    sums_M = place(acc_M, 3)
    hash_bitmap.decode_add_(acc_M, wanted, where, rank=4)
    hash_bitmap.decode_add_(sums_M, record, where, rank=4)
    assert_same(sums_M, acc_M)


def test_a_bad_bitmap_has_the_same_error_and_adds_nothing(place: Place) -> None:
    where = place_of(PermutationHash(4000, 2, 3), 0)
    record = hash_bitmap.encode(gradient(2000, 0.05, torch.float32), where)
    for at in (0, 8, 16, 24, 40, 50, 64, 70, 80, 90, 329):
        damaged = record.clone()
        damaged[at] ^= 0x5A
        texts = []
        for to in (torch.clone, place):
            acc_M = to(torch.ones(4000))
            with pytest.raises(WireFormatError) as caught:
                hash_bitmap.decode_add_(acc_M, to(damaged), where, rank=6)
            assert bool((acc_M == 1).all())
            texts.append(str(caught.value))
        assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", HASHES)
@pytest.mark.parametrize("count", [0, 20, 300, 1500])
def test_pairs(place: Place, count: int, kind: type) -> None:
    """As pairs, as a bitmap and dense."""
    where = place_of(kind(3000, 2, 8), 1, torch.bfloat16)
    chance = torch.Generator().manual_seed(count)
    position_K = torch.randperm(where.positions, generator=chance)[:count]
    index_K = where.partition_hash.element_at(1, position_K).sort().values
    values_K = torch.ones(index_K.numel()).to(torch.bfloat16)
    wanted = hash_pairs.encode(index_K, values_K, where)
    record = hash_pairs.encode(place(index_K), place(values_K), where)
    assert_same(record, wanted)
    acc_P, sums_P = torch.zeros(where.positions), place(torch.zeros(where.positions))
    hash_pairs.accumulate_(acc_P, wanted, where, rank=1)
    hash_pairs.accumulate_(sums_P, record, where, rank=1)
    assert_same(sums_P, acc_P)
    if count == 20:
        damaged = wanted.clone()
        stranger = where.partition_hash.element_at(0, torch.tensor([0]))
        damaged[80:84] = stranger.to(torch.int32).view(torch.uint8)
        texts = []
        for to in (torch.clone, place):
            with pytest.raises(WireFormatError, match="field indices") as caught:
                hash_pairs.accumulate_(to(torch.zeros(where.positions)), to(damaged), where, rank=1)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]


@pytest.mark.parametrize("value_dtype", DTYPE_OF)
def test_row_sparse(place: Place, value_dtype: str) -> None:
    dtype, chance = DTYPE_OF[value_dtype], torch.Generator().manual_seed(2)
    index_K = torch.randint(90, (60,), generator=chance)
    rows_KD = torch.randn(60, 6, generator=chance).to(dtype)
    wanted = row_sparse.coalesce(index_K, rows_KD, 90)
    got = row_sparse.coalesce(place(index_K), place(rows_KD.view(-1)).view(60, 6), 90)
    assert_same(got.indices_K, wanted.indices_K)
    assert_same(got.rows_KD, wanted.rows_KD)

    other_K = torch.arange(0, 90, 4)
    union_U = row_sparse.union([wanted.indices_K, other_K], 90)
    on_gpu = row_sparse.union([got.indices_K, place(other_K)], 90)
    assert_same(on_gpu, union_U)
    assert_same(
        row_sparse.match(got.indices_K, on_gpu), row_sparse.match(wanted.indices_K, union_U)
    )
    assert_same(got.expand(on_gpu), wanted.expand(union_U))

    part = RowPart(90, 6, value_dtype, part=1, parts=3, step=STEP)
    records = []
    for gradient_of in (wanted, got):
        positions = part.positions(gradient_of)
        out = gradient_of.rows_KD.new_empty(part.record_bytes(positions.numel()), dtype=torch.uint8)
        part.encode(gradient_of, positions, out)
        records.append(out)
    assert_same(records[1], records[0])
    decoded, plain = part.decode(records[1], 0), part.decode(records[0], 0)
    assert_same(decoded.indices_K, plain.indices_K)
    assert_same(decoded.rows_KD, plain.rows_KD)
    records[1][80] = 0
    with pytest.raises(WireFormatError, match="rank 5: field row indices"):
        part.decode(records[1], 5)


def test_wrong_row_sets_are_named(place: Place) -> None:
    good, wrong = place(torch.tensor([1, 4])), place(torch.tensor([3, 3]))
    with pytest.raises(WireFormatError, match="rank 1: field row indices"):
        row_sparse.union([good, wrong], 9)
    with pytest.raises(ExtensionError, match="a local row is not in the union"):
        row_sparse.match(good, place(torch.tensor([1, 5])))


def test_a_coo_gradient_of_a_gpu(place: Place) -> None:
    if gpu_of(place).type == "cuda" and not torch.cuda.is_available():
        pytest.skip("sparse tensors of the emulated GPU cannot be made")
    rows = place(torch.tensor([1.0, 2.0, 4.0])).view(3, 1)
    gradient_of = torch.sparse_coo_tensor(place(torch.tensor([3, 1, 3])).view(1, 3), rows, (5, 1))
    assert RowSparse.from_coo(gradient_of).rows_KD.tolist() == [[2.0], [5.0]]
