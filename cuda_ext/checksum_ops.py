"""The ops that seal records: the checksum in a record's header then covers its payload too.

A record is a header and a payload. To seal it, a sum over the payload is added to the header's
checksum, modulo 2^32 (docs/wire-format.md). CUDA messages are aligned to 16 bytes; no call waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_sparse.cuda_ext.arguments import call


def seal_(message: torch.Tensor, records: int, slots: torch.Tensor | None = None) -> None:
    """Seals each record: adds the sum of its payload to the checksum in its header.

    Args:
        message: uint8, at whose begin the records are. Mutated.
        records: how many there are.
        slots: int64 on the message's device: the bytes where records begin and the last one's slot
            ends (`Segments`). None: the records are back to back.
    """
    call("add_payload_sums_", message, records, None, slots)  # None: into the headers


def payload_sums(
    messages: Sequence[torch.Tensor], records: int, slots: torch.Tensor | None = None
) -> torch.Tensor:
    """The payload sum of every record of some messages; 0 for a record of impossible size.

    Args:
        messages: uint8, at least one, not trusted; only read.
        records: the number of records of each.
        slots: as of `seal_`.

    Returns:
        int64 [messages * records] on the messages' device, below 2^32, message after message.

    Example:
        >>> payload_sums([torch.zeros(48, dtype=torch.uint8)], 1)
        tensor([0])
    """
    sums = torch.zeros(len(messages) * records, dtype=torch.int64, device=messages[0].device)
    for message, message_sums in zip(messages, sums.view(len(messages), records), strict=True):
        call("add_payload_sums_", message, records, message_sums, slots)  # headers stay as they are
    return sums
