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
    case = case.of_numel(SMALL_NUMEL + 17)
    grad_N, wrong = _sparse(case, case.numel, case.density), 0
    for place in _places(case):
        h0, partition = place.partition_hash, place.partition
        elements = h0.element_at(partition, torch.arange(place.positions)).tolist()
        fields = (partition, PARTITIONS, h0.seed, h0.code)
        record = bitmap_oracle.encode(grad_N.cpu(), elements, fields, 0, STEP)
        wrong += differing(hash_bitmap.encode(_by_position(grad_N, place), place), record)
    return wrong


def _bitmap_tasks(case: Case) -> Iterator[Task]:
    wrong, places = _wrong_bitmaps(case), _places(case)
    grad_N = _sparse(case, case.numel, case.density)
    values = [_by_position(grad_N, place) for place in places]

    def encode() -> list[torch.Tensor]:
        return [hash_bitmap.encode(*pair) for pair in zip(values, places, strict=True)]

    records = encode()
    used = sum(record.numel() for record in records)
    peers: dict[str, Action] = {"torch nonzero": lambda: [(v.nonzero(), v[v != 0]) for v in values]}
    moved = grad_N.nbytes + used
    yield Task("encode", case.form, moved, wrong, encode, peers)

    acc_N = torch.zeros(case.numel, device=case.device)
    peer_acc_N = torch.zeros_like(acc_N)

    def decode_add() -> None:
        for record, place in zip(records, places, strict=True):
            hash_bitmap.decode_add_(acc_N, record, place, rank=0)

    decode_add()
    wrong += _unequal(acc_N, grad_N.float())
    index_K = grad_N.nonzero().squeeze(1)
    values_K = grad_N[index_K].float()
    peers = {"torch index_add_": lambda: peer_acc_N.index_add_(0, index_K, values_K)}
    moved = used + 2 * case.touched_bytes(grad_N)
    yield Task("decode_add", case.form, moved, wrong, decode_add, peers=peers)


def _pair_tasks(case: Case) -> Iterator[Task]:
    places = _places(case)
    h0 = places[0].partition_hash
    grad_N = _sparse(case, case.numel, case.density)
    index_K = grad_N.nonzero().squeeze(1)
    values_K = grad_N[index_K]
    entry_bytes, given = index_K.nbytes + values_K.nbytes, (h0, index_K, values_K)

    cut, memory = hierarchical_hash.split(*given), hierarchical_hash.hierarchical_hash(*given)
    order_K = h0.partition_of(index_K).argsort(stable=True)
    wrong = _unequal(cut.indices_K, index_K[order_K]) + _unequal(cut.values_K, values_K[order_K])
    wrong += _unequal(cut.indices_K, memory.indices_K)
    peers: dict[str, Action] = {"Algorithm 1": lambda: hierarchical_hash.hierarchical_hash(*given)}
    split = partial(hierarchical_hash.split, *given)
    yield Task("hash_partition", case.form, 2 * entry_bytes, wrong, split, peers=peers)

    def encode() -> list[torch.Tensor]:
        return [hash_pairs.encode(*cut.of(place.partition), place) for place in places]

    records = encode()
    used = sum(record.numel() for record in records)
    accs = [torch.zeros(place.positions, device=case.device) for place in places]

    def decode_add() -> None:
        for acc_P, record, place in zip(accs, records, places, strict=True):
            hash_pairs.accumulate_(acc_P, record, place, rank=0)

    decode_add()
    expected = [_by_position(grad_N, place).float() for place in places]
    wrong += sum(map(_unequal, accs, expected))
    touched = sum(map(case.touched_bytes, expected))
    yield Task("encode", case.form, entry_bytes + used, wrong, encode)
    yield Task("decode_add", case.form, used + 2 * touched, wrong, decode_add)


def _touched_rows(case: Case, num_rows: int) -> torch.Tensor:
    """A fraction of all rows, drawn at random."""
    generator = torch.Generator().manual_seed(num_rows)
    count = max(round(num_rows * case.density), 1)
    return torch.randperm(num_rows, generator=generator)[:count].sort().values.to(case.device)


def _rows_of(case: Case, count: int) -> torch.Tensor:
    return _sparse(case, count * COLUMNS, 1.0).view(-1, COLUMNS)


def _row_tasks(case: Case) -> Iterator[Task]:
    """Times the encoder of a row-sparse record, whose decoded rows must be those that went in."""
    num_rows = max(case.numel // COLUMNS, 1)
    local_K = _touched_rows(case, num_rows)
    rows_KD = _rows_of(case, local_K.numel())
    gradient = RowSparse(local_K, rows_KD, num_rows)
    part = RowPart(num_rows, COLUMNS, case.dtype, part=0, parts=1, step=STEP)
    positions = part.positions(gradient)
    record = rows_KD.new_zeros(part.record_bytes(local_K.numel()), dtype=torch.uint8)

    encode = partial(part.encode, gradient, positions, record)
    encode()  # fills the record
    decoded = part.decode(record, rank=0)
    wrong = _unequal(decoded.indices_K, local_K) + _unequal(decoded.rows_KD, rows_KD)
    moved = local_K.nbytes + rows_KD.nbytes + record.nbytes
    yield Task("encode", case.form, moved, wrong, encode)


MAKERS = {"hash_bitmap": _bitmap_tasks, "pairs": _pair_tasks, "row_sparse": _row_tasks}
"""The operations of each format on one gradient."""
