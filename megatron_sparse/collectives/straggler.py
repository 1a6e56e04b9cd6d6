"""Straggler-aware dense reduction (StragglAR, section 3): early ranks start without the last one.

All ranks know the straggler (`Exchange.straggler`), here `late`; all other ranks are early.
The bucket is cut into n - 1 chunks, at multiples of 4096 elements where it is long enough.

Phase 1, n - 2 rounds, without the straggler: the n - 1 early ranks send each other the parts of
their chunks, one peer at a time. Early rank number i adds the parts of chunk i in rank order.
Handshake, on CPU: when the straggler comes, it and each early rank exchange their identities
(`straggler_shares`). The first round of phase 2 is posted at the same time.
Phase 2, n + log2 n - 2 rounds for powers of two (`make_schedule`): in round r the straggler and
early rank r exchange chunk r and add, so that both hold it complete; all others pass on complete
chunks, each to at most one peer in a round.

The sum is early ranks' parts in rank order, then the straggler's. So it differs from
`dense_allpairs` in the order of additions only, and not at all when the last rank is the straggler.
Partial sums travel as in `accumulator`; complete chunks in the values' dtype.

Deviations: phase 1 is pairwise instead of a ring (the same bytes in fp32, half in bf16, and in rank
order); messages between two ranks of the one group, and none of the paper's barriers, so two ranks
meet as soon as both are ready; odd n is possible, and any rank can be the straggler.

An early rank sends (n - 2) / (n - 1) N b bytes in phase 1. After the straggler's arrival: R rounds
of N / (n - 1) elements, of b bytes each, or p from an early rank to the straggler.
With no straggler known the scheme is `dense_ring`. All-reduce only (`straggler_shares`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from megatron_sparse.collectives.accumulator import as_partial, partial_dtype, store
from megatron_sparse.collectives.base import (
    POSTED,
    UNORDERED,
    Exchange,
    Identity,
    Phase,
    Steps,
    Subgroup,
    aligned_cuts,
    whole_group,
)
from megatron_sparse.collectives.dense_ring import dense_ring
from megatron_sparse.collectives.gather import pairwise_all_to_all
from megatron_sparse.collectives.scheme import ALL_REDUCE_ONLY, Input, Scheme
from megatron_sparse.collectives.straggler_shares import (
    meetings_of,
    shake_hands,
    straggler_of,
)
from megatron_sparse.straggler.schedule import early_ranks
from megatron_sparse.transport import Work


def straggler(exchange: Exchange, values_N: torch.Tensor, step: int) -> Steps:
    """Sums `values_N` over all ranks into `exchange.bucket`.

    Arguments as of `dense`.

    Raises:
        CommunicationError: ranks disagree about collective, straggler or bucket (on CPU).
        ConfigError: the straggler is no rank of the group.
        WireFormatError: a handshake is damaged.
    """
    late = straggler_of(exchange)
    if late is None:
        return (yield from dense_ring(exchange, values_N, step))
    transport = exchange.transport
    identity = Identity.of_values(f"straggler (rank {late})", exchange, values_N, step)
    group = whole_group(transport, identity.tag)
    sums = _Sums(exchange, values_N)
    sent_bytes = 0
    if group.rank != late:
        early = Subgroup(transport, early_ranks(group.world_size, late), group.tag)
        yield from sums.reduce_early(early)
        sent_bytes = early.sent_bytes
    handshake = None
    if transport.device.type == "cpu":  # CUDA has no agreement, as in `dense`: the CPU would wait
        handshake = shake_hands(identity, [], late, transport)
    yield from _meet(sums, late, group, handshake)
    store(exchange.bucket.grad_N, values_N)
    return sent_bytes + group.sent_bytes


def _meet(
    sums: _Sums,
    late: int,
    group: Subgroup,
    handshake: tuple[Work, Callable[[], object]] | None,
) -> Phase:
    """Phase 2: this rank's meetings one after another. Each sends and receives at most one chunk.

    The first exchange is posted along with `handshake` (see `shake_hands`), if there is one.
    """
    is_late = group.rank == late
    meetings = meetings_of(group.world_size, late)[group.rank]
    for number, (peer, sent_chunk, received_chunk) in enumerate(meetings):
        # An early rank and the straggler swap partial sums of one chunk. Chunks that early ranks
        # exchange are complete, and so is a chunk that the straggler sends without receiving one.
        swaps_with_late = peer == late and sent_chunk is not None
        swapped = received_chunk if is_late or swaps_with_late else None
        received = None
        if swapped is not None:
            sent, received = sums.swap(swapped, is_late=is_late)
            work = group.post([(peer, sent)], [(peer, received)])
        else:
            sends = [] if sent_chunk is None else [(peer, sums.chunk(sent_chunk))]
            receives = [] if received_chunk is None else [(peer, sums.chunk(received_chunk))]
            work = group.post(sends, receives)
        if number == len(meetings) - 1:
            yield POSTED
        if number == 0 and handshake is not None:
            if not is_late:
                # The next bucket's phase 1 need not wait for the straggler of this bucket.
                yield UNORDERED
            # Wait for the handshake first: if the straggler never comes, the error names it.
            rows_arrived, read_rows = handshake
            yield rows_arrived
            read_rows()  # raises if the peer is in another collective
        yield work
        if swapped is not None and received is not None:  # both or neither
            sums.complete(swapped, received, is_late=is_late)


class _Sums:
    """This rank's values and the partial sum of its own chunk (if it is early).

    Args:
        exchange: of the collective.
        values_N: this rank's contribution; complete chunks replace it, in the values' dtype.
    """

    def __init__(self, exchange: Exchange, values_N: torch.Tensor) -> None:
        bucket = exchange.bucket
        self._values_N, self._exchange, self._timer = values_N, exchange, exchange.timer
        cuts = aligned_cuts(bucket.numel, bucket.world_size - 1)
        self._chunks = [slice(*ends) for ends in pairwise(cuts)]  # by number of early rank
        self._partial_dtype = partial_dtype(bucket, values_N.dtype)
        # The early ranks' sum of this rank's chunk; `reduce_early` sets it, on early ranks only.
        self._early_M: torch.Tensor

    def chunk(self, number: int) -> torch.Tensor:
        """One chunk of the values, a view."""
        return self._values_N[self._chunks[number]]

    def reduce_early(self, group: Subgroup) -> Phase:
        """Phase 1, among the early ranks: computes their sum of this rank's chunk, in fp32."""
        n, rank = group.world_size, group.rank
        chunks = [self.chunk(number) for number in range(n)]
        own_M = chunks[rank]
        room = self._exchange.take("parts", (n - 1) * own_M.numel(), own_M.dtype)
        parts = [*room.view(n - 1, own_M.numel())]  # from the other early ranks
        parts.insert(rank, own_M)  # now in rank order
        yield from pairwise_all_to_all(chunks, parts, group, last=False)
        self._early_M = self._exchange.take("early", own_M.numel(), torch.float32)
        first, *others = parts
        with self._timer.stage("decode"):
            self._early_M.copy_(first)
            for part in others:
                self._early_M.add_(part)

    def swap(self, number: int, *, is_late: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (what this rank sends, room for what it receives) when a chunk is swapped.

        The straggler sends its values of the chunk, an early rank the early ranks' sum. If that sum
        is rounded to be sent, the early rank keeps the rounded sum, so that both ranks add the same
        numbers.
        """
        own_M = self.chunk(number)
        if is_late:
            return own_M, self._exchange.take("incoming", own_M.numel(), self._partial_dtype)
        sum_M = self._early_M
        sent = as_partial(self._exchange, sum_M, self._partial_dtype)
        if sent is not sum_M:  # a rounded copy
            sum_M.copy_(sent)
        return sent, self._exchange.take("incoming", own_M.numel(), own_M.dtype)

    def complete(self, number: int, received_M: torch.Tensor, *, is_late: bool) -> None:
        """Adds the early ranks' sum and the straggler's values of a chunk, after a swap.

        The fp32 result is rounded into `values_N` in the same pass: the next round waits for it.
        """
        own_M = self.chunk(number)
        with self._timer.stage("decode"):
            if not is_late:
                early_M, late_M = self._early_M, received_M
            elif received_M.dtype == torch.float32:
                early_M, late_M = received_M, own_M
            else:  # widen the early sum, so that the addition is in fp32
                wide_M = self._exchange.take("early", own_M.numel(), torch.float32)
                early_M, late_M = wide_M.copy_(received_M), own_M
            torch.add(early_M, late_M, out=own_M)


SCHEME = Scheme(
    "straggler",
    Input.DENSE,
    run=straggler,
    place=180,
    ops=ALL_REDUCE_ONLY,
    skips_straggler=True,
)
