"""The rounds of pairwise exchanges of chunks after the straggler's arrival.

One rank of n, the straggler, is late; the others are early. The buffer is cut into n - 1 chunks.
Before the first round the early ranks have reduce-scattered their buffers, so that early rank
number i holds chunk i of the early ranks' sum. After the last round every rank holds the sum of all
n ranks (StragglAR, section 3.1).

In a round each rank exchanges with at most one other, at most one chunk each way. In round r the
r-th early rank and the straggler exchange chunk r and add: from then on both hold it complete.
"""

from typing import NamedTuple

from megatron_sparse.errors import ConfigError


class Transfer(NamedTuple):
    """One rank sends one chunk to another rank."""

    sender: int
    receiver: int
    chunk: int


Round = tuple[Transfer, ...]
"""The transfers of a round happen at once."""


def early_ranks(world_size: int, straggler: int) -> list[int]:
    """All ranks but the straggler, ascending."""
    return [rank for rank in range(world_size) if rank != straggler]


def check_ranks(world_size: int, straggler: int) -> None:
    """Refuses a group of fewer than two ranks, and a straggler that is not a rank of the group.

    Raises:
        ConfigError: for either.
    """
    if world_size < 2:
        raise ConfigError(
            "a straggler-aware schedule needs a rank besides the straggler",
            expected="at least 2 ranks",
            got=world_size,
        )
    if not 0 <= straggler < world_size:
        raise ConfigError(
            "the straggler is not one of the ranks",
            expected=f"0 to {world_size - 1}",
            got=straggler,
        )
