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

Reduce-scatter: early rank i reduces its own shard, and piece i of n - 1 of the straggler's. In
phase 2, n - 1 rounds, the straggler exchanges with each early rank: its part of that rank's shard
against the early sum of a piece of its own. No scheme could take less time after its arrival,
because (n - 1) / n N b bytes must leave its port.

The sum is early ranks' parts in rank order, then the straggler's. So it differs from
`dense_allpairs` in the order of additions only, and not at all when the last rank is the straggler.
Partial sums travel as in `accumulator`; complete chunks in the values' dtype.

Deviations: phase 1 is pairwise instead of a ring (the same bytes in fp32, half in bf16, and in rank
order); messages between two ranks of the one group, and none of the paper's barriers, so two ranks
meet as soon as both are ready; odd n is possible, and any rank can be the straggler.

An early rank sends (n - 2) / (n - 1) N b bytes in phase 1. After the straggler's arrival: R rounds
of N / (n - 1) elements, of b bytes each, or p from an early rank to the straggler.
With no straggler known the scheme is `dense_ring`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_sparse.bucket import CollectiveOp
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
from megatron_sparse.collectives.gather import in_rank_order, pairwise_rounds
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.collectives.straggler_shares import (
    Share,
    meetings_of,
    shake_hands,
    shares_of,
    straggler_of,
)
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
    bucket, transport = exchange.bucket, exchange.transport
    identity = Identity.of_values(f"straggler (rank {late})", exchange, values_N, step)
    group = whole_group(transport, identity.tag)
    shares = shares_of(bucket, late)
    sums = _Sums(exchange, values_N)
    sent_bytes = 0
    if group.rank != late:
        early = Subgroup(transport, [share.rank for share in shares], group.tag)
        yield from sums.reduce_early(shares, early)
        sent_bytes = early.sent_bytes
    handshake = None
    if transport.device.type == "cpu":
        handshake = shake_hands(identity, [], late, transport)
    yield from _meet(sums, shares, late, group, handshake)
    if bucket.op is CollectiveOp.ALL_REDUCE:
        store(bucket.grad_N, values_N)
    return sent_bytes + group.sent_bytes


def _meet(
    sums: _Sums,
    shares: list[Share],
    late: int,
    group: Subgroup,
    handshake: tuple[Work, Callable[[], object]] | None,
) -> Phase:
    """Phase 2."""
    is_late = group.rank == late
    meetings = meetings_of(sums.op, group.world_size, late)[group.rank]
    for number, (peer, gives, takes) in enumerate(meetings):
        incoming = None
        # Tensors that the straggler receives or sends must still be added; all others are complete.
        if takes is not None and (is_late or (peer == late and gives is not None)):
            summed = shares[takes]
            sent, room = sums.parts(summed, is_late=is_late)
            incoming = summed, room
            work = group.post([(peer, sent)], [(peer, room)])
        else:
            sends, receives = (
                [] if index is None else [(peer, sums.values_N[shares[index].takes])]
                for index in (gives, takes)
            )
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
        if incoming is not None:
            sums.complete(*incoming, is_late=is_late)


class _Sums:
    """This rank's sums: of its share if it is early, of everything if it is the straggler.

    Attributes:
        values_N: own contributions, and then complete chunks.
        op: of the bucket.
    """

    def __init__(self, exchange: Exchange, values_N: torch.Tensor) -> None:
        bucket = exchange.bucket
        self.values_N, self.op = values_N, bucket.op
        self._exchange, self._timer = exchange, exchange.timer
        self._partial_dtype = partial_dtype(bucket, values_N.dtype)
        # Where complete chunks are written. Those of an all-reduce travel on, in the values' dtype;
        # those of a reduce-scatter stay here.
        self._target_N = values_N if bucket.op is CollectiveOp.ALL_REDUCE else bucket.grad_N
        # The early ranks' fp32 sums that `reduce_early` makes, by the first element of each part.
        self._early_sums: dict[int, torch.Tensor] = {}

    def reduce_early(self, shares: list[Share], group: Subgroup) -> Phase:
        """Phase 1: leaves the early ranks' sums of this rank's share here, in fp32."""
        n, rank = group.world_size, group.rank
        values_N, own = self.values_N, shares[rank].reduces
        sizes = [part.stop - part.start for part in own]
        numel = sum(sizes)
        room = self._exchange.take("parts", (n - 1) * numel, values_N.dtype)
        received = [list(place.split(sizes)) for place in room.view(n - 1, numel)]
        received.insert(rank, [values_N[part] for part in own])
        sums = self._exchange.take("early", numel, torch.float32).split(sizes)
        self._early_sums = {part.start: sum_M for part, sum_M in zip(own, sums, strict=True)}

        def add(sender: int) -> None:
            with self._timer.stage("decode"):
                for sum_M, part_M in zip(sums, received[sender], strict=True):
                    if sender == 0:
                        sum_M.copy_(part_M)
                    else:
                        sum_M.add_(part_M)

        sent = [[values_N[part] for part in share.reduces] for share in shares]
        yield from group.in_rounds(
            pairwise_rounds(sent, received, group), in_rank_order(group, add), independent=True
        )

    def parts(self, share: Share, *, is_late: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensor that this rank sends to its peer, and room for the one that it receives.

        An early rank rounds its own sum as it travels, so that both add the same numbers.
        """
        if is_late:
            numel, dtype = share.gives.stop - share.gives.start, self._partial_dtype
            return self.values_N[share.takes], self._exchange.take("incoming", numel, dtype)
        sum_M = self._early_sums[share.gives.start]
        sent = as_partial(self._exchange, sum_M, self._partial_dtype)
        if sent is not sum_M:
            sum_M.copy_(sent)
        numel = share.takes.stop - share.takes.start
        return sent, self._exchange.take("incoming", numel, self.values_N.dtype)

    def complete(self, share: Share, received_M: torch.Tensor, *, is_late: bool) -> None:
        """Adds early ranks' sum and straggler's part, and rounds the result into its place.

        In one pass over memory: the next round waits for it.
        """
        elements = share.gives if is_late else share.takes
        with self._timer.stage("decode"):
            early_M, late_M = received_M, self.values_N[elements]
            if not is_late:
                early_M, late_M = self._early_sums[elements.start], received_M
            elif early_M.dtype != torch.float32:
                early_M = self._exchange.take("early", early_M.numel(), torch.float32).copy_(
                    early_M
                )
            torch.add(early_M, late_M, out=self._target_N[elements])


SCHEME = Scheme("straggler", Input.DENSE, run=straggler, place=180, skips_straggler=True)
