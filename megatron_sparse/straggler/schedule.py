"""The rounds of pairwise exchanges of chunks after the straggler's arrival.

A buffer of n ranks is cut into n - 1 chunks. Before the first round the n - 1 early ranks have
reduce-scattered their parts, so that early rank number i holds chunk i of their sum; after the last
one every rank holds the sum of all, the straggler's included (StragglAR, section 3.1).

In a round each rank exchanges with at most one other, at most one chunk each way. In round r the
r-th early rank and the straggler exchange chunk r and add: from then on both hold it complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron_sparse.errors import ConfigError


class Transfer(NamedTuple):
    """One chunk on its way from one rank to another."""

    sender: int
    receiver: int
    chunk: int


Round = tuple[Transfer, ...]


class Meeting(NamedTuple):
    """One rank's part of one round: the chunks that it sends and receives, if any."""

    peer: int
    sends: int | None
    receives: int | None


Meetings = tuple[tuple[Meeting, ...], ...]
"""Of each rank, in the order of the rounds."""


@dataclass(frozen=True)
class Schedule:
    """The exchanges that turn the early ranks' reduce-scatter into an all-reduce of all ranks.

    Attributes:
        world_size: n, at least 2.
        straggler: the rank that comes last.
        rounds: in order; the transfers of a round happen at once.

    Example:
        Of 2 ranks, with rank 1 late: one round, in which the two exchange the only chunk.
    """

    world_size: int
    straggler: int
    rounds: tuple[Round, ...]

    @property
    def chunks(self) -> int:
        """One for each early rank: n - 1."""
        return self.world_size - 1

    @property
    def early_ranks(self) -> tuple[int, ...]:
        """All but the straggler; the i-th begins with chunk i."""
        return tuple(early_ranks(self.world_size, self.straggler))

    def meetings(self) -> Meetings:
        """The schedule as each rank sees it, without the rounds in which it is idle.

        Example:
            The only round of 2 ranks, rank 1 being late, is for rank 0 to send chunk 0 to rank 1
            and to receive chunk 0 from it: `Meeting(1, 0, 0)`.
        """
        meetings: list[list[Meeting]] = [[] for _ in range(self.world_size)]
        for transfers in self.rounds:
            chunk_of = {(t.sender, t.receiver): t.chunk for t in transfers}
            for sender, receiver in chunk_of:
                sent, back = chunk_of[sender, receiver], chunk_of.get((receiver, sender))
                meetings[sender].append(Meeting(receiver, sent, back))
                if back is None:  # else the transfer back makes the receiver's meeting
                    meetings[receiver].append(Meeting(sender, None, sent))
        return tuple(tuple(of_rank) for of_rank in meetings)


def early_ranks(world_size: int, straggler: int) -> list[int]:
    """All ranks but the straggler, ascending."""
    return [rank for rank in range(world_size) if rank != straggler]


def check_ranks(world_size: int, straggler: int) -> None:
    """Refuses a straggler that is no rank of a group of at least two.

    Raises:
        ConfigError: names which of the two is wrong.
    """
    if world_size < 2:
        raise ConfigError(
            "a straggler-aware schedule needs somebody who waits",
            expected="at least 2 ranks",
            got=world_size,
        )
    if not 0 <= straggler < world_size:
        raise ConfigError(
            "the straggler is not one of the ranks",
            expected=f"0 to {world_size - 1}",
            got=straggler,
        )
