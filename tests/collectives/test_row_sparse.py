"""The row-sparse all-reduce: exact, the same bits on all ranks, its bytes, and its records.

Legend: n ranks, R rows of D values of which a rank has K.
"""

import itertools

import pytest
import torch

import megatron_sparse
from megatron_sparse.bucket import Reduction
from megatron_sparse.collectives.row_sparse import NAME, RowSparseWay, cheapest_way, row_sparse
from megatron_sparse.errors import (
    CommunicationError,
    ConfigError,
    ExtensionError,
    MegatronSparseError,
    WireFormatError,
)
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.formats.row_record import SECTIONS_AT, RowPart
from megatron_sparse.formats.row_sparse import RowSparse
from megatron_sparse.transport import VirtualCluster
from megatron_sparse.wire import HEADER_BYTES, pad16
from tests import damage
from tests.collectives.cases import error_of
from tests.collectives.faults import Fault, FaultyTransport
from tests.oracles import row_sparse as oracle
from tests.ranks import on_ranks

RANKS = (1, 2, 3, 4, 5, 7, 8, 16)
STEP = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _coo(indices, rows, num_rows):
    return torch.sparse_coo_tensor(
        indices.unsqueeze(0), rows, (num_rows, rows.shape[1]), check_invariants=True
    )


def _gradient(rank, num_rows, width, count, dtype, *, floats=False):
    """Uncoalesced rows; small integers whose sum over 16 ranks is exact even in bf16."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randint(max(num_rows, 1), (count,), generator=generator)
    if floats:
        rows = torch.randn(count, width, generator=generator)
    else:
        # Mean over 2, 4, 8, 16 ranks: halves of multiples of 16 are integers.
        rows = 16.0 * torch.randint(-1, 2, (count, width), generator=generator)
    return _coo(indices, rows.to(dtype), num_rows)


def _reduce(gradients, reduction, way, cluster=None, wrap=lambda transport: transport, **options):
    options |= {"step": STEP, "way": way}

    def start(transport):
        rows = RowSparse.from_coo(gradients[transport.rank])
        return row_sparse("e", rows, reduction, wrap(transport), MessageBuffers(), **options)

    results = (cluster or VirtualCluster(len(gradients))).run(start)
    _assert_same_on_all_ranks(results)
    return results


def _assert_same_on_all_ranks(results):
    for result in results:
        pair, first = result.gradient, results[0].gradient
        assert torch.equal(pair.indices_K, first.indices_K)
        # As bytes: NaN and -0.0 count as what they are.
        bits, first_bits = pair.rows_KD.view(torch.uint8), first.rows_KD.view(torch.uint8)
        assert torch.equal(bits, first_bits)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("reduction", list(Reduction))
def test_rows_are_added_in_rank_order_in_fp32_and_rounded_once(n, reduction):
    for dtype, shape in itertools.product(DTYPES.values(), ((50, 3, 20), (1, 4, 3), (9, 2, 1))):
        gradients = [_gradient(r, *shape, dtype, floats=True) for r in range(n)]
        own = [oracle.coalesce(g._indices()[0], g._values()) for g in gradients]
        indices = torch.tensor([row for rows, _ in own for row in rows])
        values = torch.cat([rows for _, rows in own]).float()
        rows, total = oracle.coalesce(indices, values)
        if reduction is Reduction.AVG:
            total = total / n
        for way in RowSparseWay:
            results = _reduce(gradients, reduction, way)
            assert results[0].gradient.indices_K.tolist() == rows
            assert torch.equal(results[0].gradient.rows_KD, total.to(dtype))


@pytest.mark.parametrize("way", [RowSparseWay.GATHER, RowSparseWay.DIRECT])
def test_ranks_without_rows_and_with_all_rows(way):
    none = torch.empty(0, dtype=torch.int64)
    every = torch.arange(10)
    for sets in (
        [none, none, none],
        [none, every, none],
        [every, every, every],
        [torch.tensor([9, 0, 9, 9]), none, every],
    ):
        gradients = [_coo(rows, torch.ones(rows.numel(), 2), 10) for rows in sets]
        before = [g._values().clone() for g in gradients]
        results = _reduce(gradients, Reduction.SUM, way)
        expected = sum(g.to_dense() for g in gradients)
        assert torch.equal(results[0].gradient.to_coo().to_dense(), expected)
        for gradient, values in zip(gradients, before, strict=True):
            assert torch.equal(gradient._values(), values), "inputs are only read"
    for shape in ((0, 4), (5, 0)):
        gradients = [_coo(none, torch.empty(0, shape[1]), shape[0])] * 3
        assert _reduce(gradients, Reduction.SUM, way)[1].gradient.to_coo().shape == shape


def test_nan_and_infinity_travel():
    rows = torch.tensor([[float("nan"), float("inf")]])
    gradients = [_coo(torch.tensor([1]), rows, 3), _coo(torch.tensor([1]), torch.ones(1, 2), 3)]
    for way in (RowSparseWay.GATHER, RowSparseWay.DIRECT):
        results = _reduce(gradients, Reduction.AVG, way)
        assert results[0].gradient.rows_KD[0].isnan().tolist() == [True, False]
        assert results[0].gradient.rows_KD[0, 1] == float("inf")


def _record_bytes(rows, width, value_bytes):
    return HEADER_BYTES + 32 + pad16(4 * rows) + pad16(rows * width * value_bytes)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("way", [RowSparseWay.GATHER, RowSparseWay.DIRECT])
def test_bytes_are_those_of_the_module_header(n, way):
    for dtype in DTYPES.values():
        gradients = [_gradient(r, 60, 3, 10 + 7 * r, dtype) for r in range(n)]
        touched = [set(g._indices()[0].tolist()) for g in gradients]
        union = set().union(*touched)
        cluster = VirtualCluster(n)
        results = _reduce(gradients, Reduction.SUM, way, cluster)
        size = dtype.itemsize
        for rank in range(n):
            if way is RowSparseWay.GATHER:
                expected = (n - 1) * _record_bytes(len(touched[rank]), 3, size)
                agreements = 8 * (2 + n)
            else:
                parts = [sum(i % n == part for i in touched[rank]) for part in range(n)]
                sent = [_record_bytes(p, 3, size) for i, p in enumerate(parts) if i != rank]
                own_sum = sum(i % n == rank for i in union)
                expected = sum(sent) + (n - 1) * _record_bytes(own_sum, 3, size)
                agreements = 2 * 8 * (2 + n)
            assert results[rank].sent_bytes == expected
            assert cluster.sent_bytes(rank) == expected + (n - 1) * agreements


def test_auto_takes_the_way_with_fewer_bytes():
    def parts(num_rows, n):
        return [RowPart(num_rows, 64, "fp32", part, n, 0) for part in range(n)]

    sparse = [[100] * 8] * 8  # 800 of 1,000,000 rows each: hardly any row twice
    assert cheapest_way(sparse, parts(1_000_000, 8)) is RowSparseWay.GATHER
    crowded = [[100] * 8] * 8  # 800 of 1,000 rows each: the sum is hardly larger
    assert cheapest_way(crowded, parts(1_000, 8)) is RowSparseWay.DIRECT
    two = [[500] * 2] * 2  # every row on both: as many bytes either way, but fewer headers
    assert cheapest_way(two, parts(1_000, 2)) is RowSparseWay.GATHER


# -- records


PART = RowPart(num_rows=40, columns=3, value_dtype="fp32", part=1, parts=3, step=STEP)


def _record(part=PART, count=30):
    pair = RowSparse.from_coo(_gradient(3, part.num_rows, part.columns, count, torch.float32))
    positions = part.positions(pair)
    out = torch.full((part.record_bytes(positions.numel()),), 0xAA, dtype=torch.uint8)
    part.encode(pair, positions, out)
    return pair, positions, out


def test_a_record_holds_its_part():
    for part in (PART, RowPart(40, 3, "fp32", 0, 1, STEP), RowPart(2**31 + 1, 3, "fp32", 1, 3, 0)):
        pair, positions, out = _record(part)
        got = part.decode(out, rank=0)
        assert torch.equal(got.indices_K, pair.indices_K[positions])
        assert bool((got.indices_K % part.parts == part.part).all())
        assert torch.equal(got.rows_KD, pair.rows_KD[positions])
        index_bytes = 4 if part.num_rows <= 2**31 else 8
        stored = positions.numel()
        size = HEADER_BYTES + 32 + pad16(index_bytes * stored) + pad16(12 * stored)
        assert out.numel() == size


def _refused(data):
    """The field that the decoder names."""
    with pytest.raises(WireFormatError) as caught:
        PART.decode(torch.tensor(list(data), dtype=torch.uint8), rank=2)
    return caught.value.what.removeprefix("rank 2: field ").removesuffix(" is wrong")


GOOD = _record()[2].numpy().tobytes()


def test_damage_is_named():
    for found in damage.headers(GOOD, PART.num_rows * PART.columns):
        assert _refused(found.message) in found.fields, found.what
    for at, width, value, field in (
        (5, 1, 1, "format"),
        (48, 8, 41, "num_rows"),
        (56, 8, 4, "columns"),
        (64, 8, 14, "stored rows"),
        (64, 8, 2**63, "stored rows"),
        (64, 8, 1, "nnz"),
        (72, 4, 2, "part"),
        (76, 4, 4, "parts"),
        # Below the first, another part's, twice the same, beyond the end.
        *(
            (SECTIONS_AT + 4 * position, 4, value, "row indices")
            for position, value in ((0, -2), (0, 3), (1, 1), (1, 43))
        ),
    ):
        assert _refused(damage.put(GOOD, at, value, width)) == field
    assert _refused(GOOD[:60]) == "size"


@pytest.mark.parametrize("way", [RowSparseWay.GATHER, RowSparseWay.DIRECT])
def test_with_the_checksum_no_flipped_bit_goes_unseen(way):
    gradients = [_gradient(rank, 50, 3, 20, torch.float32) for rank in range(3)]
    struck = []
    for at in range(5):
        faulty = []

        def wrapped(transport, at=at, faulty=faulty):
            faulty.append(FaultyTransport(transport, Fault("payload", 1, at), {}))
            return faulty[-1]

        try:
            _reduce(gradients, Reduction.SUM, way, wrap=wrapped, checksum=True)
            refused = False
        except WireFormatError as error:
            refused = "rank 1: field checksum" in str(error)
        assert refused == any(each.struck for each in faulty)
        struck.append(refused)
    assert any(struck)


# -- gloo


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks("world_size")
def test_gloo_ranks_get_the_dense_sum(rank, world_size):
    for dtype, op in itertools.product(DTYPES.values(), ("sum", "avg")):
        gradients = [_gradient(r, 50, 4, 30 if r else 0, dtype) for r in range(world_size)]
        own = gradients[rank]
        reduced = megatron_sparse.row_sparse_all_reduce(own, op=op)
        assert reduced.is_coalesced()
        expected = sum(g.to_dense().float() for g in gradients)
        if op == "avg":
            expected = expected / world_size
        assert torch.equal(reduced.to_dense(), expected.to(dtype)), (dtype, op)


@pytest.mark.parametrize(
    "other",
    [
        {"shape": (11, 2)},
        {"shape": (10, 3)},
        {"dtype": torch.bfloat16},
        {"op": Reduction.AVG},
        {"step": 1},
    ],
)
def test_ranks_that_disagree_all_get_an_error(other):
    usual = {"shape": (10, 2), "dtype": torch.float32, "op": Reduction.SUM, "step": 0}

    def start(transport):
        call = usual | (other if transport.rank else {})
        gradient = _gradient(transport.rank, *call["shape"], 4, call["dtype"])
        how = {"step": call["step"], "way": RowSparseWay.AUTO}
        rows = RowSparse.from_coo(gradient)
        return error_of(row_sparse("wte", rows, call["op"], transport, MessageBuffers(), **how))

    for rank, error in enumerate(VirtualCluster(2).run(start)):
        assert isinstance(error, CommunicationError)
        assert f"rank {1 - rank} of the group is not in the same collective" in str(error)
        assert NAME in str(error)


def test_other_tensors_are_refused_before_anything_is_sent():
    matrix = _coo(torch.tensor([1]), torch.ones(1, 2), 3)
    for wrong in (
        torch.ones(3, 2),
        matrix.to_dense().to_sparse_csr(),
        matrix.to_dense().to_sparse(),
        matrix.double(),
        matrix.to("meta"),
    ):
        with pytest.raises(ExtensionError):
            megatron_sparse.row_sparse_all_reduce(wrong)
    with pytest.raises(ConfigError, match="op is unknown"):
        megatron_sparse.row_sparse_all_reduce(matrix, op="max")
    with pytest.raises(MegatronSparseError, match="no process group"):
        megatron_sparse.row_sparse_all_reduce(matrix)
