"""The ops of sealed records: their headers' checksums cover the payloads too.

A sum over the payload is added to the header's checksum, modulo 2^32 (docs/wire-format.md). On CUDA
nothing waits for the device, and messages are aligned to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_sparse.cuda_ext.arguments import call


def seal_(message: torch.Tensor, records: int, slots: torch.Tensor | None = None) -> None:
    """Adds the sum of each record's payload to the checksum of its header.

    Args:
        message: uint8; begins with so many records. Mutated.
        records: their number.
        slots: int64 on the message's device, where records begin, as in `Segments`; None for back
            to back.
    """
    call("add_payload_sums_", message, records, None, slots)


def payload_sums(
    messages: Sequence[torch.Tensor], records: int, slots: torch.Tensor | None = None
) -> torch.Tensor:
    """The sums of the payloads of each message's records; of a record of impossible size 0.

    Args:
        messages: uint8, at least one, not trusted; only read.
        records: the number of records of each.
        slots: as of `seal_`.

    Returns:
        int64 on the messages' device, below 2^32, for one message after another.

    Example:
        >>> payload_sums([torch.zeros(48, dtype=torch.uint8)], 1)
        tensor([0])
    """
    sums = torch.zeros(len(messages) * records, dtype=torch.int64, device=messages[0].device)
    for message, own_sums in zip(messages, sums.view(len(messages), records), strict=True):
        call("add_payload_sums_", message, records, own_sums, slots)
    return sums
