"""The cases of `bench codecs` for ZEN's hashing and for row-sparse gradients.

`hash_bitmap` and `pairs` are the records of the Pull and of the Push, for all of `PARTITIONS`
servers one after the other; `hash_partition` cuts a rank's entries into partitions. `row_sparse`
reads the gradient as rows of `COLUMNS` elements and touches a fraction `density` of them.

Results are compared with the oracles on a small gradient, and with one another on the timed one. On
a GPU a time is that between two events of the device. It includes waits for the host, because these
operations read sizes and checks before they continue.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from megatron_sparse.bench.codec.frame import DTYPES, KEY, STEP, Case, Task, differing
from megatron_sparse.bench.table import Action
from megatron_sparse.calibration.codec import sparse_vector
from megatron_sparse.formats import hash_bitmap, hash_pairs, hierarchical_hash
from megatron_sparse.formats.hash_partition import PermutationHash
from megatron_sparse.formats.hash_record import PartitionRecord
from megatron_sparse.formats.row_record import RowPart
from megatron_sparse.formats.row_sparse import RowSparse
from megatron_sparse.reference import hash_bitmap as bitmap_oracle

PARTITIONS = 8
COLUMNS = 64
SMALL_NUMEL = 2**13
"""Elements that are compared with the oracles, which work bit by bit."""


def _sparse(case: Case, numel: int, density: float) -> torch.Tensor:
    """Normally distributed values at a fraction `density` of the positions, zeros elsewhere."""
    return sparse_vector(numel, density, case.device).to(DTYPES[case.dtype])


def _unequal(got: torch.Tensor, expected: torch.Tensor) -> int:
    return int((got != expected).sum())


def _places(case: Case) -> list[PartitionRecord]:
    h0 = PermutationHash(case.numel, PARTITIONS, KEY)
    return [PartitionRecord(h0, p, DTYPES[case.dtype], 0, STEP) for p in range(PARTITIONS)]


def _by_position(grad_N: torch.Tensor, place: PartitionRecord) -> torch.Tensor:
    """The values of a partition, as its server holds them."""
    position_P = torch.arange(place.positions, device=grad_N.device)
    return grad_N[place.partition_hash.element_at(place.partition, position_P)]


def _wrong_bitmaps(case: Case) -> int:
    """Bytes of all partitions' records that differ from the oracle's on a small gradient."""
    case = case.of_numel(SMALL_NUMEL + 17)  # partitions differ in length
    grad_N, wrong = _sparse(case, case.numel, case.density), 0
    for place in _places(case):
        h0, partition = place.partition_hash, place.partition
        elements = h0.element_at(partition, torch.arange(place.positions)).tolist()
        hash_fields = (partition, PARTITIONS, h0.seed)
        expected = bitmap_oracle.encode(grad_N.cpu(), elements, hash_fields, offset=0, step=STEP)
        record = hash_bitmap.encode(_by_position(grad_N, place), place)
        wrong += differing(record, expected)
    return wrong


def _bitmap_tasks(case: Case) -> Iterator[Task]:
    """Yields `encode` and `decode_add` of the bitmap records of all partitions of a gradient."""
    wrong, places = _wrong_bitmaps(case), _places(case)
    grad_N = _sparse(case, case.numel, case.density)
    values = [_by_position(grad_N, place) for place in places]

    def encode() -> list[torch.Tensor]:
        return [hash_bitmap.encode(*pair) for pair in zip(values, places, strict=True)]

    def nonzero() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(values_P.nonzero(), values_P[values_P != 0]) for values_P in values]

    records = encode()
    record_bytes = sum(record.numel() for record in records)
    peers: dict[str, Action] = {"torch nonzero": nonzero}
    yield Task("encode", case.form, grad_N.nbytes + record_bytes, wrong, encode, peers)

    acc_N = torch.zeros(case.numel, device=case.device)
    peer_acc_N = torch.zeros_like(acc_N)

    def decode_add() -> None:
        for record, place in zip(records, places, strict=True):
            hash_bitmap.decode_add_(acc_N, record, place, rank=0)

    decode_add()  # to zeros, so that the sum is the gradient
    wrong += _unequal(acc_N, grad_N.float())
    index_K = grad_N.nonzero().squeeze(1)
    values_K = grad_N[index_K].float()
    peers = {"torch index_add_": lambda: peer_acc_N.index_add_(0, index_K, values_K)}
    moved_bytes = record_bytes + 2 * case.touched_bytes(grad_N)  # the sum is read and written
    yield Task("decode_add", case.form, moved_bytes, wrong, decode_add, peers)


def _pair_tasks(case: Case) -> Iterator[Task]:
    """Yields `hash_partition`, then `encode` and `decode_add` of the partitions' pair records.

    `hash_partition` is timed beside another way, Algorithm 1, whose entries must be the same.
    """
    places = _places(case)
    h0 = places[0].partition_hash
    grad_N = _sparse(case, case.numel, case.density)
    index_K = grad_N.nonzero().squeeze(1)
    values_K = grad_N[index_K]
    entry_bytes = index_K.nbytes + values_K.nbytes

    split = partial(hierarchical_hash.split, h0, index_K, values_K)
    algorithm_1 = partial(hierarchical_hash.hierarchical_hash, h0, index_K, values_K)
    entries, peer_entries = split(), algorithm_1()
    by_partition_K = h0.partition_of(index_K).argsort(stable=True)
    wrong = _unequal(entries.indices_K, index_K[by_partition_K])
    wrong += _unequal(entries.values_K, values_K[by_partition_K])
    wrong += _unequal(entries.indices_K, peer_entries.indices_K)
    peers: dict[str, Action] = {"Algorithm 1": algorithm_1}
    moved_bytes = 2 * entry_bytes  # read and written
    yield Task("hash_partition", case.form, moved_bytes, wrong, split, peers)

    def encode() -> list[torch.Tensor]:
        return [hash_pairs.encode(*entries.of(place.partition), place) for place in places]

    records = encode()
    record_bytes = sum(record.numel() for record in records)
    sums = [torch.zeros(place.positions, device=case.device) for place in places]

    def decode_add() -> None:
        for sum_P, record, place in zip(sums, records, places, strict=True):
            hash_pairs.accumulate_(sum_P, record, place, rank=0)

    decode_add()  # to zeros, so that each sum is its partition of the gradient
    expected = [_by_position(grad_N, place).float() for place in places]
    wrong += sum(map(_unequal, sums, expected))
    touched_bytes = sum(map(case.touched_bytes, expected))
    yield Task("encode", case.form, entry_bytes + record_bytes, wrong, encode)
    yield Task("decode_add", case.form, record_bytes + 2 * touched_bytes, wrong, decode_add)


def _touched_rows(case: Case, num_rows: int) -> torch.Tensor:
    """A fraction of all rows, drawn at random."""
    generator = torch.Generator().manual_seed(num_rows)
    count = max(round(num_rows * case.density), 1)
    return torch.randperm(num_rows, generator=generator)[:count].sort().values.to(case.device)


def _row_tasks(case: Case) -> Iterator[Task]:
    """Yields `encode` of a row-sparse record, whose decoded rows must be those that went in."""
    num_rows = max(case.numel // COLUMNS, 1)
    index_K = _touched_rows(case, num_rows)
    rows_KD = _sparse(case, index_K.numel() * COLUMNS, 1.0).view(-1, COLUMNS)
    gradient = RowSparse(index_K, rows_KD, num_rows)
    whole = RowPart(num_rows, COLUMNS, case.dtype, part=0, parts=1, step=STEP)
    positions = whole.positions(gradient)  # all rows
    record = rows_KD.new_zeros(whole.record_bytes(index_K.numel()), dtype=torch.uint8)

    encode = partial(whole.encode, gradient, positions, record)
    encode()  # fills the record
    decoded = whole.decode(record, rank=0)
    wrong = _unequal(decoded.indices_K, index_K) + _unequal(decoded.rows_KD, rows_KD)
    moved_bytes = index_K.nbytes + rows_KD.nbytes + record.nbytes
    yield Task("encode", case.form, moved_bytes, wrong, encode)


MAKERS = {"hash_bitmap": _bitmap_tasks, "pairs": _pair_tasks, "row_sparse": _row_tasks}
"""The operations of each format on one gradient."""
