"""What collectives share: how they are driven, and the agreement that precedes every exchange."""

from __future__ import annotations

import zlib
from collections.abc import Generator
from enum import Enum

import torch

from megatron_sparse.bucket import Bucket
from megatron_sparse.errors import CommunicationError
from megatron_sparse.transport import Transport, Work


class Posted(Enum):
    """Marks the point after which a collective posts nothing more."""

    POSTED = "posted"


POSTED = Posted.POSTED

Steps = Generator[Work | Posted, None, int]
"""Yields works to wait for; returns the bytes that the busiest rank sent."""

HEADER_WORDS = 2


def fingerprint(bucket: Bucket, scheme: str, value_dtype: str, epoch: int) -> int:
    """A number that two ranks share only if they mean the same collective on the same bucket."""
    text = f"{bucket.name}|{bucket.form}|{bucket.numel}|{scheme}|{value_dtype}|{epoch}"
    return zlib.crc32(text.encode())


def exchange_sizes(
    sizes: list[int],
    bucket: Bucket,
    scheme: str,
    value_dtype: str,
    epoch: int,
    transport: Transport,
) -> Generator[Work, None, list[list[int]]]:
    """Tells every rank the sizes of what this rank will send, in one message.

    Args:
        sizes: the same count on every rank.
        bucket: what is about to be synchronised; with the next three it must be the same
            everywhere.
        scheme: the collective's name.
        value_dtype: dtype on the wire.
        epoch: the step.
        transport: moves the message; on CUDA the result is read on the host.

    Returns:
        Each rank's `sizes`.

    Raises:
        CommunicationError: a rank means another collective, bucket, size, dtype or step.
    """
    own = [fingerprint(bucket, scheme, value_dtype, epoch), len(sizes), *sizes]
    words = torch.tensor(own, dtype=torch.int64, device=transport.device)
    gathered = words.new_empty(transport.world_size * words.numel())
    yield transport.all_gather(gathered, words)
    rows = gathered.view(transport.world_size, -1).tolist()
    for rank, row in enumerate(rows):
        if row[:HEADER_WORDS] != own[:HEADER_WORDS]:
            raise CommunicationError(
                f"rank {rank} of the group is not in the same collective",
                expected=f"bucket {bucket.name}: {scheme} {bucket.form} of {bucket.numel} elements "
                f"as {value_dtype}, step {epoch} (fingerprint {own[0]:#010x})",
                got=f"fingerprint {row[0]:#010x} with {row[1]} sizes",
                remedy="use the same configuration, model and step on every rank",
            )
    return [row[HEADER_WORDS:] for row in rows]
