"""Residuals: the elements of gradients that were not sent yet (error feedback).

A step *selects* from a bucket: some elements of gradient + residual are sent, and the others become
the new residual. The selection is *pending* until the optimizer has taken or skipped the step:
`commit` makes it final, `rollback` restores the old residual, which is kept meanwhile: the *undo
copy*. So a step that is skipped (fp16 overflow) or repeated (Megatron's rerun mode) loses nothing.
Without undo copies a residual takes one buffer, not two.

Residuals are contributions to the *averaged* gradient. Their *unit* is the loss scale, if there is
one, times the factor that Megatron multiplies the summed gradients by.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch

from megatron_sparse.bucket import Bucket
from megatron_sparse.errors import CheckpointError, SelectionError

RESIDUAL_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SliceKey = tuple[str, int]
"""A parameter's name, and the element of it at which a slice begins."""


class ResidualStore:
    """The residual of every bucket of one rank.

    Not thread-safe by itself: between `commit` or `rollback` and the next `begin` all selections
    must have finished, which `Pending.wait` of `reduction.job` guarantees.

    Args:
        dtype: `torch.float32` or `torch.bfloat16`.

    Attributes:
        undo: whether to keep the old value of each residual that a selection changes.
        is_reported: whether `commit` or `rollback` is called after each step; if not, every
            selection is final at once.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._goes_on = False  # `go_on` was called in this step
        self._is_apart = False  # `take_apart` was called in this step
        self.dtype = dtype
        self.undo = False
        self.is_reported = False
        # All by the bucket's name:
        self._residuals: dict[str, torch.Tensor] = {}
        self._undo_copies: dict[str, torch.Tensor] = {}
        self._pending: dict[str, bool] = {}  # whether there was a residual before the selection
        self._emptied: set[str] = set()  # residuals that this step has sent whole (`drop_later`)
        self._buckets: dict[str, Bucket] = {}

    def __contains__(self, bucket: str) -> bool:
        return bucket in self._residuals

    def __getitem__(self, bucket: str) -> torch.Tensor:
        return self._residuals[bucket]

    @property
    def nbytes(self) -> int:
        """Bytes held by residuals and undo copies."""
        return self.undo_nbytes + sum(residual_N.nbytes for residual_N in self.tensors())

    @property
    def undo_nbytes(self) -> int:
        """Bytes held by undo copies alone."""
        return sum(copy_N.nbytes for copy_N in self._undo_copies.values())

    def begin(self, bucket: Bucket) -> torch.Tensor:
        """As `begin_apart`, for a selection in place: the buffer to write holds the old residual.

        Raises:
            SelectionError: as `begin_apart`.
        """
        old_N, residual_N = self.begin_apart(bucket)
        if residual_N is not old_N:
            residual_N.copy_(old_N)
        return residual_N

    def begin_apart(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Begins a selection: returns the bucket's old residual, and the buffer for the new one.

        The old residual is zeros on first use. Where it is kept as an undo copy, the selection must
        write all of another buffer, which holds anything: no pass is spent on a copy. Else both are
        the same tensor.

        If a selection of the bucket is pending already, after `go_on` the new one adds to it.
        Without `go_on` the step is being repeated, and the pending selection is undone first.

        Raises:
            SelectionError: the step is being repeated and there is no undo copy.
        """
        name = bucket.name
        self._buckets[name] = bucket
        self._is_apart = False  # may be set by a pass that this one repeats
        self._emptied.discard(name)
        if name in self._pending:
            if self._goes_on:
                return self._residuals[name], self._residuals[name]
            self._undo_repeated(name)
        had_residual = name in self._residuals
        old_N = self._residuals[name] if had_residual else self._add_zeros(bucket)
        if self.is_reported:
            self._pending[name] = had_residual
            if self.undo and had_residual:
                return old_N, self._keep_as_undo_copy(name, old_N)
        return old_N, old_N

    def _undo_repeated(self, name: str) -> None:
        """Undoes the pending selection of a step that is being repeated."""
        if not self.undo:
            raise SelectionError(
                f"bucket {name}: gradients were synchronised twice without an optimizer step",
                expected="one synchronisation for each optimizer.step()",
                got="a second one, with no undo copy of the residual",
                remedy="set compression.undo=always (one more buffer of the residual's size)",
            )
        self._restore(name)

    def _keep_as_undo_copy(self, name: str, old_N: torch.Tensor) -> torch.Tensor:
        """Makes a residual the undo copy; returns the new residual's buffer: that of the last copy.

        Megatron may have cut its buckets anew, with other sizes: then the buffer is a new one.
        """
        residual_N = self._undo_copies.get(name)
        if residual_N is None or residual_N.numel() != old_N.numel():
            residual_N = torch.empty_like(old_N)
        self._undo_copies[name], self._residuals[name] = old_N, residual_N
        return residual_N

    def _add_zeros(self, bucket: Bucket) -> torch.Tensor:
        """Gives a bucket a residual of zeros, in place of any that it has."""
        residual_N = torch.zeros(bucket.numel, dtype=self.dtype, device=bucket.grad_N.device)
        self._residuals[bucket.name] = residual_N
        return residual_N

    def drop_later(self, bucket: Bucket) -> None:
        """Frees a bucket's residual when the step, which sends all of it, is final.

        A run that goes on without compression then spends no time or memory on residuals. On CUDA
        call it in the stream that uses the residual: without `is_reported` it is freed at once.
        """
        if self.is_reported:
            self._emptied.add(bucket.name)
        else:
            del self._residuals[bucket.name]

    def go_on(self) -> None:
        """Call it before a pass that accumulates gradients: it adds to the pending selections."""
        self._goes_on = True

    def take_apart(self, leak: float) -> dict[str, torch.Tensor]:
        """Returns corrections that turn the step's sums into sums of gradients without residuals.

        This rank has sent gradient + old residual - new residual before its leak. `commit` will
        then restore the old residuals. Call it between the sums and `commit` or `rollback`. Needs
        undo copies. The result takes an fp32 buffer for each bucket with a pending selection.

        Args:
            leak: the factor with which unsent values entered the residuals; 1 loses nothing.

        Returns:
            For each bucket with a pending selection, the values that this rank must add to the sum:
            new residual / leak - old residual, fp32 [N]. With a leak below 1 they are exact up to
            the rounding of sent values; at leak 0 the unsent values are missing.
        """
        self._is_apart = True
        corrections = {}
        for name, had_residual in self._pending.items():
            # Unsent values entered the residual times the leak, which is undone here. At leak 0
            # they are lost: only rounding errors, which do not leak, are left.
            corrections[name] = self._residuals[name].float() / (leak or 1.0)
            if had_residual:  # else the old residual was zero
                corrections[name].sub_(self._undo_copies[name])
        return corrections

    def commit(self, unit_change: torch.Tensor | None = None, share: float | None = None) -> None:
        """Makes every pending selection final, after the optimizer has taken the step.

        Residuals that were sent whole (`drop_later`) are freed, unless they get a new unit or only
        a share of the change: then they are not zero.

        With a loss per token, gradients are divided by the step's tokens, which are known only
        after the selection. So the old residual `e` entered the selection in the unit of the last
        step. This is corrected here: `e' += (unit_change - 1) * e`, with `e` from the undo copy. No
        host sync; one pass over residual and copy.

        Args:
            unit_change: fp32 or fp64 scalar on the residual's device: the last step's unit in units
                of this step's; None if the unit is the same.
            share: how much of the change by the pending selections the residuals keep, from 0 to 1;
                None for all of it. Needs undo copies.

        Raises:
            SelectionError: the unit changes and there is no undo copy.
        """
        if self._is_apart:
            self.rollback()  # restores the old residuals: no selection is pending any more
        if share is not None:
            self._keep_share(share)  # first: a change of unit overwrites the undo copies
        if unit_change is not None:
            for name, residual_N in self._residuals.items():
                self._change_unit(name, residual_N, unit_change)
        elif share is None:
            for name in self._emptied:
                del self._residuals[name]
                self._undo_copies.pop(name, None)
        self._emptied.clear()
        self._pending.clear()
        self._goes_on = False

    def _keep_share(self, share: float) -> None:
        """Replaces each pending residual by old + share * (new - old)."""
        for name, had_residual in self._pending.items():
            new_N = self._residuals[name]
            if had_residual:
                torch.lerp(self._undo_copies[name], new_N, share, out=new_N)
            else:  # the old residual was zero
                new_N.mul_(share)

    def _change_unit(self, name: str, residual_N: torch.Tensor, change: torch.Tensor) -> None:
        """Multiplies a residual by `change`; if a selection is pending, only the old one in it."""
        if name not in self._pending:
            residual_N.mul_(change)
        elif self._pending[name]:  # there was an old residual; a new one has the new unit
            if not self.undo:
                raise SelectionError(
                    f"bucket {name}: the residual's unit changes and its old value is not kept",
                    expected="an undo copy of the residual",
                    got="none",
                    remedy="set compression.undo=always",
                )
            # The copy is not needed any more: the next selection overwrites it.
            residual_N.add_(self._undo_copies[name].mul_(change - 1))

    def rollback(self) -> None:
        """Restores every residual to its value before the step, which the optimizer skipped.

        Raises:
            SelectionError: selections are pending and there is no undo copy.
        """
        if self._pending and not self.undo:
            raise SelectionError(
                "the optimizer skipped a step and the residual cannot be restored",
                expected="an undo copy of the residual",
                got="none",
                remedy="set compression.undo=always (one more buffer of the residual's size)",
            )
        for name in list(self._pending):
            self._restore(name)
        self._emptied.clear()  # residuals that `commit` was to free: they are kept
        self._goes_on = self._is_apart = False  # flags of the step, which is over

    def _restore(self, name: str) -> None:
        """Undoes a pending selection: the residual is its undo copy again; a new one is zeros."""
        residual_N, had_residual = self._residuals[name], self._pending.pop(name)
        if had_residual:
            self._residuals[name] = self._undo_copies[name]
            self._undo_copies[name] = residual_N  # a buffer for the next selection
        else:
            residual_N.zero_()

    def rescale(self, factor: float) -> None:
        """Multiplies every residual by `factor`: the loss scale changed by it."""
        for residual_N in self._residuals.values():
            residual_N.mul_(factor)

    def norm(self) -> torch.Tensor:
        """The 2-norm of all residuals, fp32 scalar on their device (CPU if none); no host sync."""
        if not self._residuals:
            return torch.zeros(())
        norms = [torch.linalg.vector_norm(r, dtype=torch.float32) for r in self.tensors()]
        return torch.linalg.vector_norm(torch.stack(norms))

    def tensors(self) -> Iterable[torch.Tensor]:
        """The residuals, in the order in which buckets were first seen."""
        return self._residuals.values()

    def settled(self, bucket: Bucket) -> torch.Tensor | None:
        """The residual of `bucket` as it was before a pending selection, for checkpoints.

        Megatron's rerun mode saves between a backward pass and the optimizer step, and repeats that
        pass on resuming. None if the bucket had no residual. Without undo copies a pending
        selection counts as final.
        """
        name = bucket.name
        if self.undo and name in self._pending:
            return self._undo_copies[name] if self._pending[name] else None
        return self._residuals.get(name)

    def slices(self, *, settled: bool = False) -> Iterator[tuple[SliceKey, torch.Tensor]]:
        """Yields each slice of a parameter, by name and offset, with a view of its residual.

        While buckets hold whole parameters, the keys do not depend on bucket size or overlap.

        Args:
            settled: leave pending selections out; see the method `settled`.
        """
        for name, newest_N in self._residuals.items():
            bucket = self._buckets[name]
            residual_N = self.settled(bucket) if settled else newest_N
            if residual_N is None:
                continue
            for piece in bucket.parameters:
                yield (piece.name, piece.offset), residual_N[piece.start : piece.stop]

    def load(
        self,
        buckets: Iterable[Bucket],
        saved: Mapping[SliceKey, torch.Tensor],
        before: Mapping[SliceKey, torch.Tensor] | None = None,
    ) -> None:
        """Sets the residuals of `buckets` from `saved`, slice by slice; other slices become zero.

        Args:
            buckets: the buckets to set; one without a saved slice loses its residual.
            saved: for each slice its residual, a 1-D tensor.
            before: the same for the undo copies, if a selection is pending in a step that goes on
                (`go_on`); None if no selection is pending.

        Raises:
            CheckpointError: a slice's size differs from the saved one.
        """
        for bucket in buckets:
            # Other buckets stay pending: plain DDP loads one while the pass selects from others.
            self._pending.pop(bucket.name, None)
            self._undo_copies.pop(bucket.name, None)
            self._emptied.discard(bucket.name)
            pieces = [p for p in bucket.parameters if (p.name, p.offset) in saved]
            if not pieces:
                self._residuals.pop(bucket.name, None)
                self._buckets.pop(bucket.name, None)  # else its gradient buffer is never freed
                continue
            self._buckets[bucket.name] = bucket
            residual_N = self._add_zeros(bucket)
            for piece in pieces:
                value = saved[piece.name, piece.offset]
                check_size(piece.name, value.numel(), piece.numel)
                residual_N[piece.start : piece.stop].copy_(value)
            if before is not None:
                self._pending[bucket.name] = True
                copy_N = self._undo_copies[bucket.name] = torch.zeros_like(residual_N)
                for piece in pieces:
                    copy_N[piece.start : piece.stop].copy_(before[piece.name, piece.offset])


def check_size(parameter: str, saved: int, wanted: int) -> None:
    """Raises a `CheckpointError` if a saved residual of `parameter` has the wrong size.

    `saved` and `wanted` count the elements in the checkpoint and of the model's parameter or slice.
    """
    if saved != wanted:
        raise CheckpointError(
            f"the saved residual of {parameter} does not fit the parameter",
            expected=f"{wanted} elements",
            got=saved,
            remedy="resume with the same model and tensor-parallel size, or set "
            "compression.residual_checkpoint=none",
        )
