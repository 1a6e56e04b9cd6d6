"""Buffers that hold a bucket's own message on CUDA: buckets take them in turn.

A message is selected on one stream and exchanged on another (`streams`). While one bucket is
exchanged, the next one is selected; the bucket after that begins when the first one's work on the
device has ended, and takes over its buffers. So the memory for messages does not grow with the
number of buckets. On a CPU each bucket has buffers of its own, because several exchanges are on
their way at the same time.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_sparse.bucket import Bucket
from megatron_sparse.formats.message import TURNS, MessageBuffers
from megatron_sparse.reduction.pending import Pending


class MessageTurns:
    """The turns of one reducer's buckets.

    Args:
        buffers: of the reducer.
    """

    def __init__(self, buffers: MessageBuffers) -> None:
        self._buffers = buffers
        self._users: list[Pending | None] = [None] * TURNS
        self._launches = 0

    def launch(self, bucket: Bucket, submit: Callable[[Pending | None], Pending]) -> Pending:
        """Gives a bucket its turn.

        Args:
            bucket: about to be launched.
            submit: submits its job, given the job that must be off the device before; None: none.
        """
        if bucket.grad_N.device.type != "cuda":
            return submit(None)
        turn = self._launches % TURNS
        self._launches += 1
        self._buffers.give_turn(bucket.name, turn)
        pending = self._users[turn] = submit(self._users[turn])
        return pending
