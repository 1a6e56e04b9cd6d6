"""The cases of `bench codecs` for ZEN's hashing and for row-sparse gradients.

A hash h0 assigns each element of the gradient a partition and a position in it; partition i goes to
server i. `pairs` are the records of (index, value) entries that ranks send to the servers (Push),
`hash_bitmap` those of the sums that servers send back (Pull). Both are timed for `PARTITIONS`
partitions, one after the other. `hash_partition` cuts a rank's entries into partitions.
`row_sparse` takes the gradient as rows of `COLUMNS` elements; a fraction `density` is not zero.

Bitmaps are compared with an oracle's on a small gradient; all results with the timed gradient. On a
GPU times include waits for the host, because these operations read sizes and checks before they
continue. Suffixes: N elements, K non-zero elements or rows, P positions, D columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from megatron_sparse.bench.codec import peers
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


def _specs(case: Case) -> list[PartitionRecord]:
    """What sender and receiver know beforehand of each partition's record."""
    h0 = PermutationHash(case.numel, PARTITIONS, KEY)
    return [PartitionRecord(h0, p, DTYPES[case.dtype], 0, STEP) for p in range(PARTITIONS)]


def _by_position(grad_N: torch.Tensor, spec: PartitionRecord) -> torch.Tensor:
    """The values of a partition in the order of their positions, as its server stores them."""
    position_P = torch.arange(spec.positions, device=grad_N.device)
    return grad_N[spec.partition_hash.element_at(spec.partition, position_P)]


def _wrong_bitmaps(case: Case) -> int:
    """Encodes a small gradient; counts bytes of its bitmap records that differ from an oracle's."""
    case = case.of_numel(SMALL_NUMEL + 17)  # no multiple of `PARTITIONS`: partitions differ in size
    grad_N, wrong = _sparse(case, case.numel, case.density), 0
    for spec in _specs(case):
        h0, partition = spec.partition_hash, spec.partition
        elements = h0.element_at(partition, torch.arange(spec.positions)).tolist()
        hash_fields = (partition, PARTITIONS, h0.seed)
        expected = bitmap_oracle.encode(grad_N.cpu(), elements, hash_fields, offset=0, step=STEP)
        record = hash_bitmap.encode(_by_position(grad_N, spec), spec)
        wrong += differing(record, expected)
    return wrong


def _bitmap_tasks(case: Case) -> Iterator[Task]:
    """Yields `encode` and `decode_add` of the bitmap records of all partitions of a gradient."""
    wrong, specs = _wrong_bitmaps(case), _specs(case)
    grad_N = _sparse(case, case.numel, case.density)
    values = [_by_position(grad_N, spec) for spec in specs]

    def encode() -> list[torch.Tensor]:
        return [hash_bitmap.encode(*arguments) for arguments in zip(values, specs, strict=True)]

    def nonzero() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(values_P.nonzero(), values_P[values_P != 0]) for values_P in values]

    records = encode()
    record_bytes = sum(record.numel() for record in records)
    its_peers: dict[str, Action] = {"torch nonzero": nonzero}
    yield Task("encode", case.form, grad_N.nbytes + record_bytes, wrong, encode, its_peers)
    acc_N = torch.zeros(case.numel, device=case.device)

    def decode_add() -> None:
        for record, spec in zip(records, specs, strict=True):
            hash_bitmap.decode_add_(acc_N, record, spec, rank=0)

    decode_add()  # the accumulator was zero, so the sum must be the gradient
    wrong += _unequal(acc_N, grad_N.float())
    moved_bytes = record_bytes + 2 * case.touched_bytes(grad_N)  # the sum is read and written
    its_peers = peers.decode_add(grad_N)
    yield Task("decode_add", case.form, moved_bytes, wrong, decode_add, its_peers)


def _pair_tasks(case: Case) -> Iterator[Task]:
    """Yields `hash_partition`, then `encode` and `decode_add` of all partitions' pair records.

    The peer of `hash_partition` is ZEN's Algorithm 1, whose entries must have the same indices.
    """
    specs = _specs(case)
    h0 = specs[0].partition_hash
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
    moved_bytes = 2 * entry_bytes  # read and written
    its_peers: dict[str, Action] = {"Algorithm 1": algorithm_1}
    yield Task("hash_partition", case.form, moved_bytes, wrong, split, its_peers)

    def encode() -> list[torch.Tensor]:
        return [hash_pairs.encode(*entries.of(spec.partition), spec) for spec in specs]

    records = encode()
    record_bytes = sum(record.numel() for record in records)
    sums = [torch.zeros(spec.positions, device=case.device) for spec in specs]

    def decode_add() -> None:
        for sum_P, record, spec in zip(sums, records, specs, strict=True):
            hash_pairs.accumulate_(sum_P, record, spec, rank=0)

    decode_add()  # the sums were zero, so each must be its partition of the gradient
    expected = [_by_position(grad_N, spec).float() for spec in specs]
    wrong += sum(map(_unequal, sums, expected))  # checks `encode`, too, which made the records
    touched_bytes = sum(map(case.touched_bytes, expected))
    yield Task("encode", case.form, entry_bytes + record_bytes, wrong, encode)
    yield Task("decode_add", case.form, record_bytes + 2 * touched_bytes, wrong, decode_add)


def _row_tasks(case: Case) -> Iterator[Task]:
    """Yields `encode` of a row-sparse record; its decoded rows must equal the encoded ones."""
    num_rows = max(case.numel // COLUMNS, 1)
    generator, count = torch.Generator().manual_seed(num_rows), round(num_rows * case.density)
    drawn_K = torch.randperm(num_rows, generator=generator)[: max(count, 1)]
    index_K = drawn_K.sort().values.to(case.device)
    rows_KD = _sparse(case, index_K.numel() * COLUMNS, 1.0).view(-1, COLUMNS)
    gradient = RowSparse(index_K, rows_KD, num_rows)
    whole = RowPart(num_rows, COLUMNS, case.dtype, part=0, parts=1, step=STEP)
    positions = whole.positions(gradient)  # of all its rows, because there is one part
    record = rows_KD.new_zeros(whole.record_bytes(index_K.numel()), dtype=torch.uint8)
    encode = partial(whole.encode, gradient, positions, record)
    encode()  # fills the record
    decoded = whole.decode(record, rank=0)
    wrong = _unequal(decoded.indices_K, index_K) + _unequal(decoded.rows_KD, rows_KD)
    moved_bytes = index_K.nbytes + rows_KD.nbytes + record.nbytes
    yield Task("encode", case.form, moved_bytes, wrong, encode)


MAKERS = {"hash_bitmap": _bitmap_tasks, "pairs": _pair_tasks, "row_sparse": _row_tasks}
"""The operations of each format on one gradient."""
