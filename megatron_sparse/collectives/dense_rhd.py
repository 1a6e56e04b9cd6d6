"""Dense recursive halving and doubling (Rabenseifner; PCCL's section 2.2), any number of ranks.

Let p be the largest power of two that is at most n. The first n - p odd ranks fold: each gives its
values to the even rank before it and sits out; p active ranks remain. Active rank j owns block j:
the piece of its own rank and that of the rank that folded into it. Blocks are contiguous.

Fold (1 round, if n > p): odd ranks send everything.
Halving, log2 p rounds: active ranks at distance p / 2, p / 4, ..., 1 halve the blocks they still
hold. Each sends the half that its partner will own and adds the half that it receives. Afterwards
each holds the sum of its block.
Doubling (all-reduce only), log2 p rounds: at distance 1, 2, ..., p / 2 active ranks exchange all
complete blocks that they have.
Unfold (1 round, if n > p): folded ranks get the result: everything, or their own piece.

Active rank j sends N - |block j| partial sums in halving, and at distance d in doubling as many
values as the d blocks round it hold: with p = n together (n - 1) / n N (p_bytes + b). A rank with a
folded one sends it N b bytes more (its piece for a reduce-scatter); a folded one sends N p_bytes.
Bytes of a value and of a partial sum are as for `dense_ring`.
"""

from collections.abc import Sequence

import numpy as np
import torch

from megatron_sparse.collectives.accumulator import Accumulator, dense_group, store
from megatron_sparse.collectives.base import Exchange, Phase, Steps, Subgroup, even_cuts
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.pricing.cluster import CodecOp
from megatron_sparse.pricing.dry_run import DryRun


def dense_rhd(exchange: Exchange, values_N: torch.Tensor, step: int) -> Steps:
    """Sums `values_N` over all ranks into `exchange.bucket`. Arguments as of `dense`."""
    bucket, scatter = exchange.bucket, exchange.scatters
    group = dense_group("dense_rhd", exchange, values_N, step)
    folding = Folding(group)
    cuts = even_cuts(bucket.numel, group.world_size)
    accumulator = Accumulator(exchange, values_N)
    ends = scatter and not folding.folds  # neither doubling nor unfolding follows
    yield from halve(accumulator, cuts, folding, last=ends)
    if scatter:
        yield from unfold_pieces(accumulator, cuts, folding, last=True)
        own = slice(cuts[group.rank], cuts[group.rank + 1])
        store(bucket.grad_N[own], accumulator.sum_N[own])
        return group.sent_bytes
    start, stop = folding.block(cuts)
    store(values_N[start:stop], accumulator.sum_N[start:stop])
    yield from double(values_N, cuts, folding, last=True)
    store(bucket.grad_N, values_N)
    return group.sent_bytes


def leads_of(n: int) -> list[int]:
    """The active ranks of n, ascending, then n: the end of the last block."""
    active = 1 << (n.bit_length() - 1)
    surplus = n - active
    return [2 * j if j < surplus else j + surplus for j in range(active)] + [n]


class Folding:
    """Which ranks of a group are active, and which rank each other rank folds into.

    Attributes:
        group: the group.
        leads: see `leads_of`.
        index: this rank's number among the active ones; for a folded rank, that of its partner.
        folded: whether this rank sits out, after it has sent its values to the rank before it.
        guest: the rank that folds into this one; None if there is none.
        folds: whether any rank of the group is folded.

    Example:
        With 5 ranks 4 are active: 0, 2, 3, 4. Rank 1 folds into rank 0.
    """

    def __init__(self, group: Subgroup) -> None:
        self.group = group
        self.leads = leads_of(group.world_size)
        surplus = group.world_size - self.active
        self.folded = group.rank not in self.leads
        lead = group.rank - 1 if self.folded else group.rank
        self.index = self.leads.index(lead)
        # The first `surplus` active ranks have a guest each.
        has_guest = self.index < surplus and not self.folded
        self.guest = group.rank + 1 if has_guest else None
        self.folds = surplus > 0

    @property
    def active(self) -> int:
        """How many ranks are active: a power of two."""
        return len(self.leads) - 1

    def span(self, cuts: list[int], first: int, last: int) -> tuple[int, int]:
        """(start, stop) of the elements of the blocks `first` to `last` - 1."""
        return cuts[self.leads[first]], cuts[self.leads[last]]

    def block(self, cuts: list[int]) -> tuple[int, int]:
        """(start, stop) of the elements of this rank's block; (0, 0) for a folded rank."""
        if self.folded:
            return 0, 0
        return self.span(cuts, self.index, self.index + 1)


def halve(accumulator: Accumulator, cuts: list[int], folding: Folding, *, last: bool) -> Phase:
    """Fold and halving: leaves the sum of this rank's block in the accumulator.

    `cuts` are the n + 1 offsets of the ranks' pieces. `last`: this rank will post nothing more:
    no `double` follows, and no `unfold_pieces` in a group with folded ranks.
    """
    group, whole = folding.group, (cuts[0], cuts[-1])
    if folding.folded:
        yield from group.exchange([(group.rank - 1, accumulator.outgoing(*whole))], [])
        return
    if folding.guest is not None:
        received = accumulator.incoming(whole[1] - whole[0])
        yield from group.exchange([], [(folding.guest, received)])
        accumulator.add(*whole, received)
    first, stop = 0, folding.active  # the blocks that this rank still sums up
    while stop - first > 1:
        distance = (stop - first) // 2
        middle = first + distance
        lower, upper = (first, middle), (middle, stop)
        if folding.index < middle:
            partner, keep, give = folding.index + distance, lower, upper
        else:
            partner, keep, give = folding.index - distance, upper, lower
        peer = folding.leads[partner]
        own_span, peer_span = folding.span(cuts, *keep), folding.span(cuts, *give)
        received = accumulator.incoming(own_span[1] - own_span[0])
        yield from group.exchange(
            [(peer, accumulator.outgoing(*peer_span))],
            [(peer, received)],
            last=last and distance == 1,
        )
        accumulator.add(*own_span, received)
        first, stop = keep


def unfold_pieces(
    accumulator: Accumulator, cuts: list[int], folding: Folding, *, last: bool
) -> Phase:
    """Unfold of a reduce-scatter: sends each folded rank the sum of its own piece."""
    if not folding.folds:
        return
    group = folding.group
    if folding.folded:
        start, stop = cuts[group.rank], cuts[group.rank + 1]
        received = accumulator.incoming(stop - start)
        yield from group.exchange([], [(group.rank - 1, received)], last=last)
        accumulator.sum_N[start:stop].copy_(received)
        return
    sends = []
    if folding.guest is not None:
        piece = accumulator.outgoing(cuts[folding.guest], cuts[folding.guest + 1])
        sends = [(folding.guest, piece)]
    # Without a guest nothing is sent, but if `last` this must still yield `POSTED`.
    yield from group.exchange(sends, [], last=last)


def double(values_N: torch.Tensor, cuts: list[int], folding: Folding, *, last: bool) -> Phase:
    """Doubling and unfold: spreads every active rank's block of `values_N` to all, in place."""
    group, whole = folding.group, slice(cuts[0], cuts[-1])
    if folding.folded:
        yield from group.exchange([], [(group.rank - 1, values_N[whole])], last=last)
        return
    distance = 1
    while distance < folding.active:
        partner = folding.index ^ distance
        # Each of the two holds `distance` blocks; their first number is a multiple of `distance`.
        own = folding.index // distance * distance
        theirs = partner // distance * distance
        own_M = values_N[slice(*folding.span(cuts, own, own + distance))]
        theirs_M = values_N[slice(*folding.span(cuts, theirs, theirs + distance))]
        peer = folding.leads[partner]
        distance *= 2
        ends = distance == folding.active and folding.guest is None
        yield from group.exchange([(peer, own_M)], [(peer, theirs_M)], last=last and ends)
    if folding.guest is not None:
        yield from group.exchange([(folding.guest, values_N[whole])], [], last=last)


def cost(run: DryRun) -> None:
    """Predicts the time of recursive halving, then doubling.

    With s = N b bytes: 2 log2 n alpha + 2 (n - 1) / n s beta (PCCL, section 2.2). A reduce-scatter
    takes the first half. Added: the additions in fold and halving; where n is no power of two, a
    fold of the whole bucket, and an unfold of the whole bucket or, in a reduce-scatter, one piece.
    """
    halving_doubling_cost(run, even_cuts(run.shape.numel, run.n))


def halving_doubling_cost(run: DryRun, offsets: Sequence[float]) -> None:
    """Runs the rounds of `dense_rhd` on the clocks, on pieces with these n + 1 offsets.

    Arrays with suffix n have an entry for each rank; the target -1 means: sends nothing.
    """
    n, ranks = run.n, np.arange(run.n)
    active = 1 << (n.bit_length() - 1)  # the largest power of two up to n
    surplus = n - active
    leads = np.array(leads_of(n))  # the active ranks, then n
    folded_into, folded = leads[:surplus], leads[:surplus] + 1
    fold_to_n, unfold_to_n = np.full(n, -1), np.full(n, -1)
    fold_to_n[folded], unfold_to_n[folded_into] = folded_into, folded
    cuts = np.array(offsets)
    numel = float(cuts[-1])
    # Each rank's number among the active ones; a folded rank has that of the rank it folds into.
    index_n = np.searchsorted(leads, ranks, side="right") - 1
    is_active_n = np.isin(ranks, leads)

    def partners(distance: int) -> np.ndarray:
        """For each rank its partner at this distance; -1 for folded ranks."""
        return np.where(is_active_n, leads[index_n ^ distance], -1)

    def numel_of(first_n: np.ndarray, distance: int) -> np.ndarray:
        """For each rank, the elements of `distance` blocks, from block number `first_n` on."""
        return cuts[leads[first_n + distance]] - cuts[leads[first_n]]

    if surplus:  # fold
        run.exchange(fold_to_n, numel * run.p)
        run.work(np.isin(ranks, folded_into) * run.plain(CodecOp.ADD, numel))
    distance = active // 2
    while distance:  # halving
        # Each rank sends the blocks that its partner keeps, and adds to the blocks that it keeps.
        theirs_n = (index_n ^ distance) // distance * distance
        own_n = index_n // distance * distance
        run.exchange(partners(distance), numel_of(theirs_n, distance) * run.p)
        most = numel_of(own_n, distance).max()  # all active ranks are charged for the most
        run.work(is_active_n * run.plain(CodecOp.ADD, float(most)))
        distance //= 2
    if run.scatter:
        if surplus:
            # The folded rank's piece. `minimum` keeps the index valid for the last rank, whose
            # entry does not count: it sends nothing.
            run.exchange(unfold_to_n, np.diff(cuts)[np.minimum(ranks + 1, n - 1)] * run.p)
        return
    distance = 1
    while distance < active:  # doubling
        own_n = index_n // distance * distance
        run.exchange(partners(distance), numel_of(own_n, distance) * run.b)
        distance *= 2
    if surplus:  # unfold
        run.exchange(unfold_to_n, numel * run.b)


SCHEME = Scheme("dense_rhd", Input.DENSE, run=dense_rhd, place=30, cost=cost)
