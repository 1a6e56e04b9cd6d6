"""Straggler-aware dense reduction (StragglAR, section 3): the others do not wait for the last one.

All ranks know the straggler (`Exchange.straggler`); this file does not choose it.
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
    whole_group,
)
from megatron_sparse.collectives.dense_ring import dense_ring
from megatron_sparse.collectives.gather import pairwise_all_to_all
from megatron_sparse.collectives.scheme import ALL_REDUCE_ONLY, Input, Scheme
from megatron_sparse.collectives.straggler_shares import (
    chunk_cuts,
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
    if transport.device.type == "cpu":
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
    """Phase 2: this rank's meetings, one after another; each gives and takes at most a chunk.

    The first exchange is posted along with the handshake, if there is one.
    """
    is_late = group.rank == late
    meetings = meetings_of(group.world_size, late)[group.rank]
    for number, (peer, gives, takes) in enumerate(meetings):
        # The straggler and an early rank swap their parts of the chunk that the early rank takes.
        # Other chunks that are given or taken are complete.
        swaps_with_late = peer == late and gives is not None
        swapped = takes if is_late or swaps_with_late else None
        received = None
        if swapped is not None:
            sent, received = sums.swap(swapped, is_late=is_late)
            work = group.post([(peer, sent)], [(peer, received)])
        else:
            sends = [] if gives is None else [(peer, sums.chunk(gives))]
            receives = [] if takes is None else [(peer, sums.chunk(takes))]
            work = group.post(sends, receives)
        if number == len(meetings) - 1:
            yield POSTED
        if number == 0 and handshake is not None:
            if not is_late:
                # The next bucket's early part need not wait for the straggler of this one.
                yield UNORDERED
            # Wait for the handshake first: if the straggler never comes, the error names it.
            came, read = handshake
            yield came
            read()
        yield work
        if swapped is not None and received is not None:
            sums.complete(swapped, received, is_late=is_late)


class _Sums:
    """This rank's sums: of its own chunk if it is early, of everything if it is the straggler.

    Args:
        exchange: of the collective.
        values_N: own contributions; complete chunks replace them, in the values' dtype.
    """

    def __init__(self, exchange: Exchange, values_N: torch.Tensor) -> None:
        bucket = exchange.bucket
        self._values_N, self._exchange, self._timer = values_N, exchange, exchange.timer
        cuts = chunk_cuts(bucket.numel, bucket.world_size - 1)
        self._chunks = [slice(*ends) for ends in pairwise(cuts)]  # by early rank
        self._partial_dtype = partial_dtype(bucket, values_N.dtype)
        self._early_M: torch.Tensor  # the early ranks' sum, made by `reduce_early`

    def chunk(self, number: int) -> torch.Tensor:
        """One chunk of the values, a view."""
        return self._values_N[self._chunks[number]]

    def reduce_early(self, group: Subgroup) -> Phase:
        """Phase 1: leaves the early ranks' sum of this rank's chunk here, in fp32."""
        n, rank = group.world_size, group.rank
        chunks = [self.chunk(number) for number in range(n)]
        own_M = chunks[rank]
        room = self._exchange.take("parts", (n - 1) * own_M.numel(), own_M.dtype)
        parts = [*room.view(n - 1, own_M.numel())]
        parts.insert(rank, own_M)
        yield from pairwise_all_to_all(chunks, parts, group, last=False)
        self._early_M = self._exchange.take("early", own_M.numel(), torch.float32)
        first, *others = parts
        with self._timer.stage("decode"):
            self._early_M.copy_(first)
            for part in others:
                self._early_M.add_(part)

    def swap(self, number: int, *, is_late: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensor that this rank sends for a chunk's other part, and room for that part.

        An early rank rounds its own sum as it travels, so that both add the same numbers.
        """
        own_M = self.chunk(number)
        if is_late:
            return own_M, self._exchange.take("incoming", own_M.numel(), self._partial_dtype)
        sum_M = self._early_M
        sent = as_partial(self._exchange, sum_M, self._partial_dtype)
        if sent is not sum_M:
            sum_M.copy_(sent)
        return sent, self._exchange.take("incoming", own_M.numel(), own_M.dtype)

    def complete(self, number: int, received_M: torch.Tensor, *, is_late: bool) -> None:
        """Adds early ranks' sum and straggler's part, and rounds the result into its place.

        In one pass over memory: the next round waits for it.
        """
        own_M = self.chunk(number)
        with self._timer.stage("decode"):
            if not is_late:
                early_M, late_M = self._early_M, received_M
            elif received_M.dtype == torch.float32:
                early_M, late_M = received_M, own_M
            else:
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
