"""The peer-memory collectives on the CPU emulator: the sum in rank order, to the bit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch

from megatron_sparse.cuda_ext.peer_ops import Operation, PeerLayout
from megatron_sparse.cuda_ext.record_spec import RecordSpec, Segments
from megatron_sparse.formats.header import Header
from megatron_sparse.reference import message, peer
from megatron_sparse.wire import (
    FORMAT_ADAPTIVE,
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_PICI,
    HEADER_BYTES,
    payload_bytes,
)
from tests.cuda_emulator.emulated import IN_ORDER, RANDOM, REVERSED, Codecs
from tests.cuda_emulator.emulated_peer import PeerCluster
from tests.cuda_emulator.peer_cases import check, gradients, same_bits, uneven_layout

SCHEDULES = [(IN_ORDER, 0), (REVERSED, 0), (RANDOM, 1), (RANDOM, 2)]
DENSITIES = (0.01, 0.3, 0.0, 1.0)


def inputs_of(
    layout: PeerLayout, operation: Operation, grads: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The operation's part of the gradients: their shards for an all-gather."""
    if operation is not Operation.ALL_GATHER:
        return grads
    return [grad[layout.shard(rank)] for rank, grad in enumerate(grads)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("in_order_of_coming", [False, True])
def test_virtual_ranks_get_the_sum_in_rank_order(
    codecs: Codecs, ranks: int, in_order_of_coming: bool
) -> None:
    """Every operation once, in turn over dtypes and schedules, in the same windows."""
    dtype = torch.bfloat16 if ranks % 2 == 0 else torch.float32
    cluster = PeerCluster(codecs, uneven_layout(ranks, dtype), dtype)
    for turn, operation in enumerate(Operation):
        order, seed = SCHEDULES[(turn + ranks) % len(SCHEDULES)]
        codecs.schedule(order, seed, resident_blocks=2 * ranks, multiprocessors=2 * ranks)
        grads = gradients(cluster.layout, DENSITIES, dtype, seed=turn)
        given = inputs_of(cluster.layout, operation, grads)
        found = cluster.run(operation, given, in_order_of_coming=in_order_of_coming)
        check(cluster, operation, given, found, dtype)
    assert all(cluster.epochs(rank) == [2, 2] for rank in range(ranks))


@pytest.mark.parametrize(("order", "seed"), [*SCHEDULES, (RANDOM, 3), (RANDOM, 4), (RANDOM, 5)])
def test_the_schedule_does_not_change_a_bit(codecs: Codecs, order: int, seed: int) -> None:
    codecs.schedule(order, seed, resident_blocks=6, multiprocessors=6)
    cluster = PeerCluster(codecs, uneven_layout(3), torch.float32)
    grads = gradients(cluster.layout, (0.05, 0.5), torch.float32, seed=9)
    for in_order_of_coming in (False, True):
        found = cluster.run(Operation.ALL_REDUCE, grads, in_order_of_coming=in_order_of_coming)
        check(cluster, Operation.ALL_REDUCE, grads, found, torch.float32)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("operation", list(Operation))
def test_ranks_in_threads_of_their_own(codecs: Codecs, ranks: int, operation: Operation) -> None:
    """Like processes, each launches its own kernels, and they wait for one another."""
    codecs.schedule(IN_ORDER, 0, resident_blocks=2, multiprocessors=2)
    cluster = PeerCluster(codecs, uneven_layout(ranks), torch.float32)
    hooks: list[Callable[[], object]] = [lambda: None] * ranks
    for turn in range(2):
        grads = gradients(cluster.layout, DENSITIES, torch.float32, seed=turn)
        given = inputs_of(cluster.layout, operation, grads)
        found = cluster.run(operation, given, threads=hooks, in_order_of_coming=turn == 1)
        check(cluster, operation, given, found, torch.float32)


def test_a_late_rank_is_taken_last_and_added_in_rank_order(codecs: Codecs) -> None:
    codecs.schedule(IN_ORDER, 0, resident_blocks=2, multiprocessors=2)
    cluster = PeerCluster(codecs, uneven_layout(3), torch.float32)
    # Sums that depend on the order: 1e8 + 1 - 1e8 is 0, in any other order 1.
    grads = [torch.full((cluster.layout.numel,), x) for x in (1e8, 1.0, -1e8)]

    def wait_for_the_others() -> None:
        while not all(int(cluster.flag(rank, 0, rank)) == 1 for rank in (1, 2)):
            time.sleep(0.001)
        while cluster.arrived(2)[0] == 0 and not any(cluster.arrived(2)):
            time.sleep(0.001)

    hooks: list[Callable[[], object]] = [wait_for_the_others, lambda: None, lambda: None]
    found = cluster.run(Operation.ALL_REDUCE, grads, threads=hooks, in_order_of_coming=True)
    check(cluster, Operation.ALL_REDUCE, grads, found, torch.float32)
    assert float(found[0][0]) == 0.0
    assert cluster.arrived(2)[-1] == 0, "rank 0 came last to the owner of the last shard"
    assert sorted(cluster.arrived(2)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("dtype", "value_dtype"),
    [
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_narrower_and_wider_records(
    codecs: Codecs, dtype: torch.dtype, value_dtype: torch.dtype
) -> None:
    """An all-reduce rounds the sum to the records' dtype, a reduce-scatter only to the output's."""
    codecs.schedule(RANDOM, 3, resident_blocks=4, multiprocessors=4)
    cluster = PeerCluster(codecs, uneven_layout(2, value_dtype), dtype)
    for operation in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER):
        grads = gradients(cluster.layout, (0.2, 0.7), dtype, seed=3)
        found = cluster.run(operation, grads)
        check(cluster, operation, grads, found, value_dtype)


def test_nan_infinity_and_negative_zero(codecs: Codecs) -> None:
    """NaN and infinities reach the sum; -0.0 adds nothing, as in any sum that begins with zero."""
    codecs.schedule(RANDOM, 4, resident_blocks=4, multiprocessors=4)
    for density in (0.02, 1.0):  # sparse and dense records
        cluster = PeerCluster(codecs, uneven_layout(2), torch.float32)
        grads = gradients(cluster.layout, (density,), torch.float32, seed=4)
        grads[0][:6] = torch.tensor([math.nan, math.inf, -math.inf, math.inf, -0.0, 1e-40])
        grads[1][:6] = torch.tensor([1.0, 1.0, 1.0, -math.inf, -0.0, 1e-40])
        found = cluster.run(Operation.ALL_REDUCE, grads)
        assert same_bits(found[0], found[1])
        assert found[0][:4].isnan().tolist() == [True, False, False, True]
        assert found[0][1:3].tolist() == [math.inf, -math.inf]
        assert math.copysign(1, float(found[0][4])) == 1
        expected = peer.all_reduce(grads, torch.float32)
        assert same_bits(found[0][4:], expected[4:])


@pytest.mark.parametrize("form", [FORMAT_ADAPTIVE, FORMAT_COO, FORMAT_PICI, FORMAT_DENSE])
def test_formats_are_decided_by_shard_on_the_device(codecs: Codecs, form: int) -> None:
    codecs.schedule(RANDOM, 5, resident_blocks=6, multiprocessors=6)
    layout = uneven_layout(3, record_format=form)
    cluster = PeerCluster(codecs, layout, torch.float32)
    grads = gradients(layout, (0.01, 0.2, 0.35), torch.float32, seed=5)
    thresholds = (0.3, 0.4)
    check(
        cluster,
        Operation.ALL_REDUCE,
        grads,
        cluster.run(Operation.ALL_REDUCE, grads, densities=thresholds),
        torch.float32,
    )
    total = peer.sum_in_rank_order(grads, torch.float32)
    seen = set()
    for owner in range(3):
        first, end = layout.shard_segments[owner : owner + 2].tolist()
        at = layout.segment_offsets[first : end + 1] - layout.segment_offsets[first]
        keep = (layout.segment_kinds[first:end] == FORMAT_DENSE).tolist()
        if form == FORMAT_DENSE:
            keep = [True] * (end - first)
        shard, places = layout.shard(owner), layout.slots[first : end + 1]
        cases = [
            (grads[rank][shard], cluster.message_area(rank, 1), places, thresholds[0])
            for rank in range(3)
        ]
        cases.append((total[shard], cluster.sum_area(owner, 1), places - places[0], thresholds[1]))
        for values, area, slots, threshold in cases:
            wanted = peer.record_formats(values, at.tolist(), keep, form, 0, threshold)
            found = [area[slot + 5].item() for slot in slots[:-1].tolist()]
            assert found == wanted
            seen |= set(found)
    expected = {FORMAT_ADAPTIVE: {FORMAT_DENSE, FORMAT_COO, FORMAT_PICI}}
    assert seen == expected.get(form, {FORMAT_DENSE, form})


def records_of(layout: PeerLayout, grad_N: torch.Tensor, step: int = 7) -> list[bytes]:
    """A message as selection makes it, by the oracle's codec."""
    keep = (layout.segment_kinds == FORMAT_DENSE).to(torch.uint8)
    pieces = grad_N.split(layout.segment_offsets.diff().tolist())
    nnz = torch.tensor([int(piece.count_nonzero()) for piece in pieces])
    return message.encode(
        grad_N,
        Segments(layout.segment_offsets, keep),
        nnz,
        RecordSpec(layout.value_dtype, step, record_format=FORMAT_ADAPTIVE),
    )


@pytest.mark.parametrize("with_slots", [False, True])
def test_messages_that_selection_made(codecs: Codecs, with_slots: bool) -> None:
    codecs.schedule(RANDOM, 6, resident_blocks=6, multiprocessors=6)
    layout = uneven_layout(3)
    cluster = PeerCluster(codecs, layout, torch.float32)
    grads = gradients(layout, (0.01, 0.2, 0.05), torch.float32, seed=6)
    slots, messages = None, []
    for grad in grads:
        records = records_of(layout, grad)
        if with_slots:
            room = [
                HEADER_BYTES + payload_bytes(FORMAT_DENSE, numel, numel, 0)
                for numel in layout.segment_offsets.diff().tolist()
            ]
            slots = [0, *torch.tensor(room).cumsum(0).tolist()]
            records = [r.ljust(size, b"\xee") for r, size in zip(records, room, strict=True)]
        messages.append(torch.frombuffer(bytearray(b"".join(records)), dtype=torch.uint8))
    for operation in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER):
        found = cluster.run(operation, messages, message_slots=slots)
        check(cluster, operation, grads, found, torch.float32)


def test_areas_alternate_so_that_a_late_reader_still_finds_the_last_one(codecs: Codecs) -> None:
    codecs.schedule(IN_ORDER, 0, resident_blocks=4, multiprocessors=4)
    cluster = PeerCluster(codecs, uneven_layout(2), torch.float32)
    before: torch.Tensor | None = None
    for turn in range(4):
        grads = gradients(cluster.layout, (0.1,), torch.float32, seed=turn)
        found = cluster.run(Operation.REDUCE_SCATTER, grads, step=turn)
        check(cluster, Operation.REDUCE_SCATTER, grads, found, torch.float32)
        if before is not None:
            assert torch.equal(before, cluster.message_area(0, turn % 2))
        before = cluster.message_area(0, (turn + 1) % 2).clone()
        header = Header.unpack(before[:HEADER_BYTES].numpy().tobytes(), 0)
        assert header.step == turn


@pytest.mark.parametrize("shift", [1, 3])
def test_unaligned_gradients_and_outputs(codecs: Codecs, shift: int) -> None:
    codecs.schedule(RANDOM, shift, resident_blocks=4, multiprocessors=4)
    for dtype in (torch.float32, torch.bfloat16):
        cluster = PeerCluster(codecs, uneven_layout(2, dtype), dtype)
        grads = gradients(cluster.layout, (0.02, 1.0), dtype, seed=shift)
        for operation in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER):
            found = cluster.run(operation, grads, shift=shift)
            check(cluster, operation, grads, found, dtype)


def test_an_empty_bucket_meets_all_the_same(codecs: Codecs) -> None:
    codecs.schedule(REVERSED, 0, resident_blocks=4, multiprocessors=4)
    layout = PeerLayout.of(torch.tensor([0]), torch.empty(0, dtype=torch.uint8), (0, 0, 0), 0)
    cluster = PeerCluster(codecs, layout, torch.float32)
    for operation in Operation:
        found = cluster.run(operation, [torch.empty(0)] * 2)
        check(cluster, operation, [torch.empty(0)] * 2, found, torch.float32)


def test_python_and_cpp_agree_on_the_window(codecs: Codecs) -> None:
    import ctypes

    from megatron_sparse.cuda_ext.peer_ops import ARRIVED_AT, EPOCHS_AT, ERROR_AT
    from tests.cuda_emulator.emulated_peer import PeerCall

    cluster = PeerCluster(codecs, uneven_layout(1), torch.float32)
    found = [cluster.library_layout(what) for what in range(4)]
    assert found == [ctypes.sizeof(PeerCall), EPOCHS_AT, ARRIVED_AT, ERROR_AT]
