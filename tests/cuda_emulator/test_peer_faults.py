"""Faults planted in the peer collectives: every one ends in the right typed error, in time."""

from __future__ import annotations

import random
import struct
import time
import zlib
from collections.abc import Callable

import pytest
import torch

from megatron_sparse.cuda_ext.peer_ops import Operation, PeerLayout, look_at
from megatron_sparse.errors import CommunicationError, MegatronSparseError, WireFormatError
from megatron_sparse.wire import FORMAT_COO, FORMAT_PICI
from tests.cuda_emulator.emulated import IN_ORDER, RANDOM, REVERSED, Codecs
from tests.cuda_emulator.emulated_peer import PeerCluster
from tests.cuda_emulator.peer_cases import check, gradients, uneven_layout
from tests.cuda_emulator.test_peer_emulated import records_of

STEP = 7
SHORT_S = 0.5
"""A deadline that must expire. If all ranks are in one launch, none comes late by itself."""


def error_of(cluster: PeerCluster, rank: int) -> MegatronSparseError:
    """The error from a rank's error words; fails if they report none."""
    with pytest.raises(MegatronSparseError) as caught:
        look_at(cluster.error(rank), cluster.layout, rank, cluster.deadline_s, "b0", STEP)
    return caught.value


@pytest.mark.parametrize(
    ("operation", "silent", "order", "in_order_of_coming"),
    [
        (Operation.ALL_REDUCE, 0, REVERSED, False),
        (Operation.ALL_REDUCE, 0, REVERSED, True),
        (Operation.ALL_REDUCE, 3, RANDOM, False),
        (Operation.ALL_REDUCE, 3, RANDOM, True),
        (Operation.REDUCE_SCATTER, 0, RANDOM, False),
        (Operation.REDUCE_SCATTER, 3, REVERSED, True),
        (Operation.ALL_GATHER, 3, IN_ORDER, False),
    ],
)
def test_a_silent_rank_is_named_by_all_others(
    codecs: Codecs, operation: Operation, silent: int, order: int, in_order_of_coming: bool
) -> None:
    codecs.schedule(order, silent, resident_blocks=4, multiprocessors=4)
    cluster = PeerCluster(codecs, uneven_layout(4), torch.float32, deadline_s=SHORT_S)
    ranks = [rank for rank in range(4) if rank != silent]
    grads = gradients(cluster.layout, (0.1,), torch.float32)
    if operation is Operation.ALL_GATHER:
        grads = [grad[cluster.layout.shard(rank)] for rank, grad in enumerate(grads)]
    outs = cluster.run(operation, grads, ranks=ranks, in_order_of_coming=in_order_of_coming)
    for rank, out in zip(ranks, outs, strict=True):
        error = error_of(cluster, rank)
        assert isinstance(error, CommunicationError)
        assert f"rank {silent} did not come" in error.what
        assert f"bucket b0: {operation} 1" in error.what
        assert bool((out == 77).all()), "an output was written after the failure"


def test_a_failed_rank_does_not_wait_again(codecs: Codecs) -> None:
    """Its error word stays: later operations end at once, with the first error."""
    codecs.schedule(IN_ORDER, 0, resident_blocks=2, multiprocessors=2)
    cluster = PeerCluster(codecs, uneven_layout(3), torch.float32, deadline_s=SHORT_S)
    grads = gradients(cluster.layout, (0.1,), torch.float32)
    cluster.run(Operation.ALL_REDUCE, grads, ranks=[0, 1])
    first = cluster.error(0).tolist()
    cluster.deadline_s = 1000.0
    for operation in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER):
        for in_order_of_coming in (False, True):
            cluster.run(operation, grads, ranks=[0, 1], in_order_of_coming=in_order_of_coming)
    assert cluster.error(0).tolist() == first


@pytest.mark.parametrize("seed", range(6))
def test_threads_that_fail_at_once_tell_one_whole_error(codecs: Codecs, seed: int) -> None:
    """The fields are there before the code is: no flag mixes two errors, or names no rank."""
    codecs.schedule(RANDOM, seed, resident_blocks=4, multiprocessors=4)
    cluster = PeerCluster(codecs, uneven_layout(2), torch.float32)
    flags = cluster.fail_at_once(0, blocks=6, threads=40)
    words = cluster.error(0).tolist()
    number = words[4]
    code = number % 2 + 1
    assert words == [code, Operation.REDUCE_SCATTER, 1, 0, *[number] * 5]
    assert set(flags) == {code << 56 | number << 40 | -(1 << 63)}


@pytest.mark.parametrize("in_order_of_coming", [False, True])
def test_a_late_rank_is_no_fault(codecs: Codecs, in_order_of_coming: bool) -> None:
    codecs.schedule(IN_ORDER, 0, resident_blocks=2, multiprocessors=2)
    cluster = PeerCluster(codecs, uneven_layout(3), torch.float32)
    grads = gradients(cluster.layout, (0.1, 0.4), torch.float32)
    hooks: list[Callable[[], object]] = [lambda: None, lambda: time.sleep(0.3), lambda: None]
    found = cluster.run(
        Operation.ALL_REDUCE, grads, threads=hooks, in_order_of_coming=in_order_of_coming
    )
    check(cluster, Operation.ALL_REDUCE, grads, found, torch.float32)


@pytest.mark.parametrize("in_order_of_coming", [False, True])
def test_a_lost_flag_names_its_sender_everywhere(codecs: Codecs, in_order_of_coming: bool) -> None:
    """Rank 0 never sees rank 1's flag; the others learn it from rank 0 and name rank 1 too."""
    codecs.schedule(IN_ORDER, 0, resident_blocks=2, multiprocessors=2)
    cluster = PeerCluster(codecs, uneven_layout(3), torch.float32)

    def lose_the_flag() -> None:
        flag = cluster.flag(0, 0, 1)
        while int(flag) == 0 or int(cluster.flag(0, 0, 2)) == 0:
            time.sleep(0.001)
        flag.zero_()

    hooks: list[Callable[[], object]] = [lose_the_flag, lambda: None, lambda: None]
    grads = gradients(cluster.layout, (0.1,), torch.float32)
    cluster.run(
        Operation.ALL_REDUCE,
        grads,
        threads=hooks,
        in_order_of_coming=in_order_of_coming,
        deadlines_s=(1, 60, 60),  # the others learn it long before their own deadline
    )
    for rank in range(3):
        error = error_of(cluster, rank)
        assert isinstance(error, CommunicationError)
        assert "rank 1 did not come" in error.what
        assert ("found by rank 0" in error.what) == (rank != 0)


def test_the_host_and_the_device_must_count_alike(codecs: Codecs) -> None:
    """If a captured graph with one operation is replayed, the areas do not alternate."""
    codecs.schedule(IN_ORDER, 0, resident_blocks=2, multiprocessors=2)
    cluster = PeerCluster(codecs, uneven_layout(2), torch.float32)
    grads = gradients(cluster.layout, (0.1,), torch.float32)
    cluster.run(Operation.ALL_REDUCE, grads)
    cluster.counts = [0, 0]
    cluster.run(Operation.ALL_REDUCE, grads)
    for rank in range(2):
        error = error_of(cluster, rank)
        assert "the host counted other operations" in error.what
        assert error.remedy == "capture two steps at a time"


def damaged(record: bytes, at: int, form: str, value: int) -> bytes:
    """The record with a number written at an offset; the checksum stays valid unless changed."""
    data = bytearray(record)
    struct.pack_into("<" + form, data, at, value)
    if at < 44:
        struct.pack_into("<I", data, 44, zlib.crc32(bytes(data[:44])))
    return bytes(data)


DAMAGE = [
    # (format of the record, place in it, type, value, the field that the error names)
    (FORMAT_COO, 0, "I", 1, "magic"),
    (FORMAT_COO, 44, "I", 1, "checksum"),
    (FORMAT_COO, 6, "B", 1, "dtype"),
    (FORMAT_COO, 40, "I", 99, "step"),
    (FORMAT_COO, 8, "Q", 1, "numel"),
    (FORMAT_COO, 16, "Q", 2**40, "nnz"),
    (FORMAT_COO, 48, "I", 2**31, "indices"),
    (FORMAT_COO, 52, "I", 0, "indices"),
    (FORMAT_PICI, 7, "B", 0, "format"),  # the paper's order, which is never written into a window
    (FORMAT_PICI, 48 + 512, "I", 1, "prefix"),
    (FORMAT_PICI, 48 + 516, "I", 2**32 - 1, "prefix"),
    (FORMAT_PICI, 48, "Q", 2**64 - 1, "prefix"),
]


@pytest.mark.parametrize(("form", "at", "code", "value", "field"), DAMAGE)
@pytest.mark.parametrize("in_order_of_coming", [False, True])
def test_a_damaged_record_is_named_by_its_reader_and_then_by_all(
    codecs: Codecs, form: int, at: int, code: str, value: int, field: str, in_order_of_coming: bool
) -> None:
    codecs.schedule(RANDOM, at, resident_blocks=6, multiprocessors=6)
    layout = uneven_layout(3)
    cluster = PeerCluster(codecs, layout, torch.float32)
    density = 0.01 if form == FORMAT_COO else 0.2
    grads = gradients(layout, (density,), torch.float32)
    messages = []
    for rank, grad in enumerate(grads):
        records = records_of(layout, grad)
        assert records[0][5] == form
        if rank == 2:
            records[0] = damaged(records[0], at, code, value)
        messages.append(torch.frombuffer(bytearray(b"".join(records)), dtype=torch.uint8))
    outs = cluster.run(Operation.ALL_REDUCE, messages, in_order_of_coming=in_order_of_coming)
    owner = error_of(cluster, 0)
    assert isinstance(owner, WireFormatError)
    assert "rank 2" in owner.what
    assert field in owner.what
    for rank in (1, 2):
        error = error_of(cluster, rank)
        assert isinstance(error, WireFormatError)
        assert "rank 0 refused the records of rank 2" in error.what
    assert all(bool((out == 77).all()) for out in outs)


def test_a_bit_behind_the_end_of_a_segment_is_found(codecs: Codecs) -> None:
    """The counts fit; only the place of a bit is wrong."""
    codecs.schedule(RANDOM, 1, resident_blocks=2, multiprocessors=2)
    layout = PeerLayout.of(torch.tensor([0, 5000]), torch.zeros(1, dtype=torch.uint8), (0, 1), 0)
    grad = torch.zeros(5000)
    grad[::7] = 1
    record = bytearray(records_of(layout, grad)[0])
    assert record[5] == FORMAT_PICI
    last_word = 48 + 2 * 512 - 8
    moved = 48 + 512 + 8 * ((4998 - 4096) // 64)  # 4998 is the last element that is not zero
    bits = struct.unpack_from("<Q", record, moved)[0]
    struct.pack_into("<Q", record, moved, bits & ~(1 << (4998 - 4096) % 64))
    struct.pack_into("<Q", record, last_word, 1 << 63)
    cluster = PeerCluster(codecs, layout, torch.float32)
    cluster.run(Operation.ALL_REDUCE, [torch.frombuffer(record, dtype=torch.uint8)])
    assert "words" in error_of(cluster, 0).what


def test_an_own_message_that_is_no_message_is_not_moved(codecs: Codecs) -> None:
    """Sizes that lead out of the message, or out of a slot, are the rank's own error."""
    codecs.schedule(IN_ORDER, 0, resident_blocks=2, multiprocessors=2)
    layout = uneven_layout(2)
    grad = gradients(layout, (0.01,), torch.float32)[0]
    good = b"".join(records_of(layout, grad))
    wrong = [
        good[:-16],
        good + bytes(16),
        damaged(good, 24, "Q", 2**63),
        damaged(good, 24, "Q", 2**20),
    ]
    for bad in wrong:
        cluster = PeerCluster(codecs, layout, torch.float32)
        messages = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in (bad, good)]
        cluster.run(Operation.ALL_REDUCE, messages)
        assert isinstance(error_of(cluster, 0), WireFormatError)
        assert "rank 0 refused the records of rank 0" in error_of(cluster, 1).what


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_stays_in_bounds_and_ends(codecs: Codecs, seed: int) -> None:
    """For any message: no access outside a buffer, no hang; wrong headers are found."""
    codecs.schedule(RANDOM, seed, resident_blocks=4, multiprocessors=4)
    draw = random.Random(seed)
    layout = uneven_layout(2)
    cluster = PeerCluster(codecs, layout, torch.float32)
    data = []
    for grad in gradients(layout, (0.01, 0.2), torch.float32, seed):
        records = records_of(layout, grad)
        spoiled = bytearray(records[0])
        for _ in range(1 + seed):
            spoiled[draw.randrange(48, len(spoiled))] = draw.randrange(256)
        records[0] = bytes(spoiled)
        data.append(torch.frombuffer(bytearray(b"".join(records)), dtype=torch.uint8))
    outs = cluster.run(Operation.ALL_REDUCE, data)  # checks the guards of every buffer
    codes = {int(cluster.error(rank)[0]) for rank in range(2)}
    if codes == {0}:  # only values were hit
        assert torch.equal(outs[0].view(torch.int32), outs[1].view(torch.int32))
    else:
        assert codes == {2}
