"""The lossy all-gather of one bucket's fp32 parameters: quantised differences, error feedback.

    y = master - replica            of the own shard, rounded to fp32
    send Q(y)                       4 or 8 bits a number and a scale for 128 (`formats.quantised`)
    replica += Q(y)                 on every rank, the owner included, in the same arithmetic

The *master* is the optimizer's copy of a shard, on its owner; the *replica* is the copy from which
all ranks compute, with the same bits on each. What rounding leaves out, master - replica, needs no
memory: the next gather's difference has it. In fp32 training Megatron's master is this rank's shard
in the parameter buffer. The plugin keeps a second shard, and swaps the two:

                                            own shard in the buffer     `_kept_M`
    between steps                           replica                     master
    from `begin_step` to the gather         master                      replica

An optimizer step that is skipped swaps them back. A gather without a step since the last one sends
an empty record: the difference waits for the next step. So evaluating and saving, before which
Megatron gathers again, do not change a run.

Cost: (n - 1) M (bits + 1/8) / 8 bytes sent by each rank for shards of M numbers, and the
announcement; 4 M bytes are kept.
"""

from dataclasses import dataclass

import torch

from megatron_sparse.collectives.base import Phase
from megatron_sparse.formats.quantised import add_difference_, encode_difference, record_bytes
from megatron_sparse.parameters.agreement import LOSSY
from megatron_sparse.parameters.gather import NOTHING, Records, ShardGather, Way
from megatron_sparse.recording import StageTimer

SWAPPED_NUMEL = 2**16
"""Numbers that change places at a time: all that the swap needs of memory."""


@dataclass(frozen=True)
class LossyWay(Way):
    """The options of a lossy gather: also the bits of a quantised number, 4 or 8."""

    bits: int


class LossyGather(ShardGather[LossyWay]):
    """Sends quantised differences; keeps the master or the replica of this rank's shard.

    Call `begin_step` before the optimizer changes the shard, and `end_step` afterwards; gathers in
    between must come after the change. Whatever else writes parameters must call `forget`.
    Parameters are fp32; this rank's shard of them is the optimizer's master.
    """

    method = LOSSY
    _master_is_kept = _changed = _was_changed = False

    @property
    def shard(self) -> tuple[int, int]:
        """The first element of the own shard in the bucket, and the one behind the last."""
        start = self._transport.rank * self._own_M.numel()
        return start, start + self._own_M.numel()

    @property
    def own_shard(self) -> torch.Tensor:
        """This rank's shard in the buffer."""
        return self._own_M

    def begin_step(self) -> None:
        """Gives the optimizer its master. Call it when no gather is under way."""
        self._was_changed, self._changed = self._changed, True
        self._put_into_buffer(master=True)

    def end_step(self, *, accepted: bool) -> None:
        """Ends a step: if it was not accepted, restores what `begin_step` has changed.

        Args:
            accepted: whether parameters have changed.
        """
        if accepted:
            return
        self._changed = self._was_changed
        # If an earlier accepted step still waits for its gather, the master stays in the buffer.
        if not self._changed:
            self._put_into_buffer(master=False)

    def release(self) -> None:
        """Puts the master into the buffer, for a raw gather by Megatron; forgets the replica.

        Call it on every rank, between two gathers.
        """
        self._put_into_buffer(master=True)
        self.forget()

    def settled_master(self) -> torch.Tensor | None:
        """The master if all ranks hold the replica in the buffer, else None. Not a copy."""
        return self._kept_M if self._kept_M is not None and self._master_is_kept else None

    def restore(self, master_M: torch.Tensor) -> None:
        """Sets the master from a checkpoint. The buffer must hold the checkpoint's replica.

        Call it on every rank, between two gathers.

        Args:
            master_M: fp32; copied.
        """
        self._kept_M = master_M.to(torch.float32, copy=True)
        self._master_is_kept, self._changed = True, False

    @property
    def _replica_M(self) -> torch.Tensor | None:
        if self._kept_M is None:
            return None
        return self._own_M if self._master_is_kept else self._kept_M

    @property
    def _manner(self) -> str:
        return f"{LOSSY} {self._way.bits}"

    def _encode_own(self, number: int) -> torch.Tensor:
        """Quantises master - replica, and adds the rounded difference to the replica.

        Every other rank adds the same to its replica.
        """
        if not self._changed:  # no step since the last gather
            return NOTHING
        assert self._kept_M is not None, "else the gather is raw, and encodes nothing"
        self._put_into_buffer(master=True)  # now `_kept_M` is the replica
        master_M, replica_M = self._own_M, self._kept_M
        sent = encode_difference(master_M, replica_M, bits=self._way.bits, epoch=number)
        add_difference_(sent, replica_M, epoch=number)
        self._put_into_buffer(master=False)
        self._changed = False
        return sent

    def _decode_(self, records: Records, number: int, timer: StageTimer) -> Phase:
        with timer.stage("decode"):
            for rank, record in records:
                if record.numel() > 0:
                    add_difference_(record, self._shards[rank], epoch=number, rank=rank)
        yield from ()  # on a CPU, the only device of these records, there is nothing to wait for

    def _most_bytes(self) -> int:
        return record_bytes(self._own_M.numel(), self._way.bits)

    def _keep(self) -> None:
        if self._kept_M is None:  # after a raw gather
            self._kept_M = self._own_M.clone()
            self._master_is_kept, self._changed = True, False

    def _put_into_buffer(self, *, master: bool) -> None:
        """Puts the master or the replica into the buffer: swaps buffer and `_kept_M` if needed."""
        # None: the next gather is raw, and until then the buffer has the only copy.
        if self._kept_M is None or self._master_is_kept != master:
            return
        # In pieces, so that the temporary copy is small.
        own_pieces = self._own_M.split(SWAPPED_NUMEL)
        for own, kept in zip(own_pieces, self._kept_M.split(SWAPPED_NUMEL), strict=True):
            before = own.clone()
            own.copy_(kept)
            kept.copy_(before)
        self._master_is_kept = not master
