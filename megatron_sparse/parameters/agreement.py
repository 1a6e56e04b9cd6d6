"""Lets the ranks agree about one gather of one bucket, by two 64-bit words, before they exchange
records. A record is the message with which a rank updates the other ranks' copies of its shard.

    word 0   bytes of this rank's record (40 bits), method (2), number of the gather (21)
    word 1   hash of the old bits of this rank's shard (31 bits), hash of the new ones (31);
             0 where ranks do not verify

They are sent in a row of `collectives.base.Identity`, whose fingerprint covers the bucket, its
size and dtype, and the training step. So ranks that disagree get an error instead of a hang.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from megatron_sparse.collectives.base import SMALL_BYTES, Identity, Yielded, exchange_sizes
from megatron_sparse.errors import CommunicationError, ReplicaError
from megatron_sparse.transport import Transport

RAW, EXACT, LOSSY = METHODS = ("raw", "exact", "lossy")
"""Methods of a gather; the announcement has their positions."""
SIZE_BITS, METHOD_BITS, NUMBER_BITS, HASH_BITS = 40, 2, 21, 31


@dataclass(frozen=True)
class Announcement:
    """What one rank announces to the others about its shard in a gather.

    Attributes:
        nbytes: of its record; of the raw shard in a raw gather.
        method: of `METHODS`.
        number: of the gather, counted for each bucket from 0, modulo 2^21.
        old_hash: of its shard as the others should hold it before the gather; 0: no verification.
        new_hash: of its shard as the others should hold it after the gather; 0 likewise.
    """

    nbytes: int
    method: str
    number: int
    old_hash: int = 0
    new_hash: int = 0

    def words(self) -> list[int]:
        """Packs the announcement into two words below 2^63, as the module's docstring has them.

        Example:
            >>> Announcement.of(Announcement(100, "exact", 3, 5, 7).words())
            Announcement(nbytes=100, method='exact', number=3, old_hash=5, new_hash=7)
        """
        assert self.nbytes < 2**SIZE_BITS, "a shard of at most a terabyte"
        assert self.number < 2**NUMBER_BITS, "counted modulo that"
        number_and_method = self.number << METHOD_BITS | METHODS.index(self.method)
        hashes = self.old_hash << HASH_BITS | self.new_hash
        return [number_and_method << SIZE_BITS | self.nbytes, hashes]

    @classmethod
    def of(cls, words: Sequence[int]) -> Announcement:
        """The inverse of `words`."""
        number_and_method, nbytes = divmod(words[0], 2**SIZE_BITS)
        number, method = divmod(number_and_method, 2**METHOD_BITS)
        return cls(nbytes, METHODS[method], number, *divmod(words[1], 2**HASH_BITS))

    @property
    def manner(self) -> str:
        """For errors: what all ranks of a gather have in common."""
        return f"{self.method}, gather number {self.number}"


def exchange_announcements(
    own: Announcement, identity: Identity, transport: Transport
) -> Generator[Yielded, None, list[Announcement]]:
    """Sends this rank's announcement to all ranks; returns those of all ranks, by rank.

    Raises:
        CommunicationError: a rank gathers another bucket, in another step, by another method, or
            has counted another number of gathers.
        WireFormatError: a rank's row is damaged.
    """
    # Small records carry this gather's own tag: the next bucket's announcement may overtake them.
    small = own.method != RAW and own.nbytes * (transport.world_size - 1) <= SMALL_BYTES
    table = yield from exchange_sizes(own.words(), identity, transport, unordered=small)
    found = [Announcement.of(words) for words in table]
    expected = own.manner
    for rank, theirs in enumerate(found):
        if theirs.manner != expected:
            raise CommunicationError(
                f"rank {rank} of the group gathers the parameters in another manner",
                expected=expected,
                got=theirs.manner,
                remedy="use the same configuration on every rank; load checkpoints, and switch the "
                "attachment, on every rank between the same two steps",
            )
    return found


def hash_of(values: torch.Tensor) -> int:
    """31 bits of the CRC-32 of a contiguous tensor's bytes; on CUDA the host reads all of them."""
    raw = values.detach().view(torch.uint8).cpu().numpy()
    return zlib.crc32(raw) % 2**HASH_BITS


def check_held(held: torch.Tensor, expected: int, owner: int, own_rank: int, when: str) -> None:
    """Compares this rank's copy of a shard with the hash that the shard's owner has announced.

    Args:
        held: this rank's copy.
        expected: the owner's hash.
        owner: the owner's rank in the group.
        own_rank: this rank in the group.
        when: for the error's text, such as "before gather number 3".

    Raises:
        ReplicaError: they differ.
    """
    found = hash_of(held)
    if found != expected:
        raise ReplicaError(
            f"rank {own_rank} of the group holds other parameters than their owner, rank {owner}, "
            f"{when}",
            expected=f"hash {expected:#010x}",
            got=f"hash {found:#010x}",
            remedy="restart from the last checkpoint. If a script of yours writes parameters, it "
            "must call attachment.forget_parameters() on every rank afterwards; else set "
            "parameters.method=raw and report the bug",
        )
