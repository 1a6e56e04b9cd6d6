"""Residuals: the part of gradients that was not sent yet; restored when a step is skipped.

Selection is provisional until the optimizer step is accepted. A store with `undo` copies each
residual before the selection changes it, so a skipped step (fp16 overflow) or a repeated one
(Megatron's rerun mode) leaves it as it was. Without `undo` there is one buffer for each bucket.

Residuals are contributions to the *averaged* gradient, in units of the loss scale, if there is one,
and of the factor that gradients are multiplied by after their sum (`commit` follows its changes).
"""

from __future__ import annotations

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
        undo: keep an undo copy of each residual that a selection changes.
        is_reported: `commit` or `rollback` is called after each step; else every selection is
            final at once.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Begins without residuals, and without a pending selection."""
        self._goes_on = False  # `go_on` was called in this step
        self._is_apart = False  # `take_apart` was called in this step
        self.dtype = dtype
        self.undo = False
        self.is_reported = False
        self._residuals: dict[str, torch.Tensor] = {}
        self._undo_copies: dict[str, torch.Tensor] = {}
        # Buckets selected in a step without an outcome yet; whether they had a residual before it.
        self._pending: dict[str, bool] = {}
        # Buckets whose residual was sent whole in this step (`drop_later`).
        self._emptied: set[str] = set()
        self._buckets: dict[str, Bucket] = {}

    def __contains__(self, bucket: str) -> bool:
        return bucket in self._residuals

    def __getitem__(self, bucket: str) -> torch.Tensor:
        return self._residuals[bucket]

    @property
    def nbytes(self) -> int:
        """Bytes held by residuals and undo copies."""
        tensors = [*self._residuals.values(), *self._undo_copies.values()]
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def undo_nbytes(self) -> int:
        """Bytes held by undo copies alone."""
        return sum(t.numel() * t.element_size() for t in self._undo_copies.values())

    def begin(self, bucket: Bucket) -> torch.Tensor:
        """Returns the residual to select with, zeros on first use; a selection is now pending.

        If a selection was pending already, it stays where the step goes on (`go_on`). Else the step
        is being repeated, and the selection is undone first.

        Raises:
            SelectionError: a selection is pending and there is no undo copy to go back to.
        """
        name = bucket.name
        self._buckets[name] = bucket
        self._is_apart = False
        self._emptied.discard(name)
        if name in self._pending:
            if self._goes_on:
                return self._residuals[name]
            self._undo_repeated(name)
        existed = name in self._residuals
        residual_N = self._residuals[name] if existed else self._add_zeros(bucket)
        if self.is_reported:
            self._pending[name] = existed
            if self.undo and existed:
                self._keep_undo_copy(name, residual_N)
        return residual_N

    def _undo_repeated(self, name: str) -> None:
        """Takes back the pending selection of a step that is being repeated."""
        if not self.undo:
            raise SelectionError(
                f"bucket {name}: gradients were synchronised twice without an optimizer step",
                expected="one synchronisation for each optimizer.step()",
                got="a second one, with no undo copy of the residual",
                remedy="set compression.undo=always (one more buffer of the residual's size)",
            )
        self._restore(name)

    def _keep_undo_copy(self, name: str, residual_N: torch.Tensor) -> None:
        """Copies a residual before its selection, into the memory of the last copy if it fits."""
        copy_N = self._undo_copies.get(name)
        # Megatron may have cut its buckets anew, with other sizes.
        if copy_N is None or copy_N.numel() != residual_N.numel():
            copy_N = self._undo_copies[name] = torch.empty_like(residual_N)
        copy_N.copy_(residual_N)

    def _add_zeros(self, bucket: Bucket) -> torch.Tensor:
        """Gives a bucket a residual of zeros, in place of any that it has."""
        residual_N = torch.zeros(bucket.numel, dtype=self.dtype, device=bucket.grad_N.device)
        self._residuals[bucket.name] = residual_N
        return residual_N

    def drop_later(self, bucket: Bucket) -> None:
        """What `begin` gave is sent whole: the residual is dropped when this is final.

        A run that goes on dense then pays no more for it, in time or memory. Call it with the
        stream current that has used the residual.
        """
        if self.is_reported:
            self._emptied.add(bucket.name)
        else:
            del self._residuals[bucket.name]

    def go_on(self) -> None:
        """Another pass adds to the step: the next selections come on top of the pending ones."""
        self._goes_on = True

    def take_apart(self, leak: float) -> dict[str, torch.Tensor]:
        """Gives what turns the step's sum into that of gradients alone, without residuals.

        `commit` then leaves the residuals as they were before the step. To be called between the
        sums and `commit` or `rollback`. Needs undo copies, and one buffer of a residual's size for
        each pending selection while the result lives.

        Args:
            leak: the factor with which unsent values entered the residuals; 1 loses nothing.

        Returns:
            For each bucket with a pending selection, what this rank must add to the sum:
            new residual / leak - old residual, fp32 [N]. With a leak below 1, up to the rounding of
            values that were sent; at leak 0 unsent values are lacking.
        """
        self._is_apart = True
        lacking = {}
        for name, existed in self._pending.items():
            # Unsent values entered the residual times the leak, which is undone here. At leak 0
            # they are lost: only rounding errors, which do not leak, are left.
            lacking[name] = self._residuals[name].float() / (leak or 1.0)
            if existed:  # else the old residual was zero
                lacking[name].sub_(self._undo_copies[name])
        return lacking

    def commit(self, unit_change: torch.Tensor | None = None, share: float | None = None) -> None:
        """The optimizer took the step: every pending selection is final.

        Residuals that were sent whole (`drop_later`) are dropped, unless their unit changes or only
        a share of the change stays: then something is left of them.

        Where gradients are divided by a number that is known only after the selection (a step's
        tokens, for a loss per token), the old residual entered the selection in the unit of the
        step before. This is corrected here: `e' += (unit_change - 1) * e`, with `e` from the undo
        copy. No host sync; one pass over residual and copy.

        Args:
            unit_change: fp32 or fp64 scalar on the residual's device: the last step's unit in units
                of this step's; None if the unit is the same.
            share: of the change that the pending selections made, which stays; the rest is
                forgotten. None for all of it. Needs undo copies.

        Raises:
            SelectionError: the unit changes and there is no undo copy.
        """
        if self._is_apart:
            self.rollback()  # leaves no selection pending for the steps below
        # Before the unit changes: that uses up the undo copies.
        if share is not None:
            self._keep_share(share)
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
        """Takes each pending residual this part of the way from its old value to its new one."""
        for name, existed in self._pending.items():
            new_N = self._residuals[name]
            if existed:
                torch.lerp(self._undo_copies[name], new_N, share, out=new_N)
            else:
                new_N.mul_(share)

    def _change_unit(self, name: str, residual_N: torch.Tensor, change: torch.Tensor) -> None:
        """Converts what was left before this step: all of it, or the old part of a selection."""
        if name not in self._pending:
            residual_N.mul_(change)
        elif self._pending[name]:  # it had a residual before the selection
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
        """The optimizer skipped the step: every residual is as it was before.

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
        self._emptied.clear()
        self._goes_on = self._is_apart = False

    def _restore(self, name: str) -> None:
        """Undoes a pending selection: the residual is its undo copy again, or zeros."""
        existed = self._pending.pop(name)
        if existed:
            self._residuals[name].copy_(self._undo_copies[name])
        else:
            self._residuals[name].zero_()

    def rescale(self, factor: float) -> None:
        """Multiplies every residual by `factor`: the loss scale changed by it."""
        for residual_N in self._residuals.values():
            residual_N.mul_(factor)

    def norm(self) -> torch.Tensor:
        """The 2-norm over all residuals, fp32 scalar on their device; no host sync."""
        if not self._residuals:
            return torch.zeros(())
        norms = [torch.linalg.vector_norm(r, dtype=torch.float32) for r in self.tensors()]
        return torch.linalg.vector_norm(torch.stack(norms))

    def tensors(self) -> Iterable[torch.Tensor]:
        """The residuals, in the order in which buckets were first seen."""
        return self._residuals.values()

    def settled(self, bucket: Bucket) -> torch.Tensor | None:
        """The residual of `bucket` without its pending selection, for checkpoints.

        Megatron's rerun mode saves between a backward pass and the optimizer step that it then
        repeats. None if no selection is final yet. Without undo copies a pending selection counts
        as final.
        """
        name = bucket.name
        if self.undo and name in self._pending:
            return self._undo_copies[name] if self._pending[name] else None
        return self._residuals.get(name)

    def slices(self, *, settled: bool = False) -> Iterator[tuple[SliceKey, torch.Tensor]]:
        """Views of the residual of each slice of a parameter.

        Pending selections are included, unless only what is `settled` is asked for.

        Names and offsets within a parameter do not change with the bucket size or with overlap;
        bucket numbers and padding do.
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
        """Sets residuals from `saved`, slice by slice; those of all other slices become zero.

        Args:
            buckets: of this store. A bucket without a saved slice keeps no residual.
            saved: 1-D tensors, cut as the slices of the buckets are.
            before: likewise, what `rollback` restores in a step that goes on. None: no selection
                is pending.

        Raises:
            CheckpointError: a slice's size differs from the saved one.
        """
        for bucket in buckets:
            # Of these alone: plain DDP loads a bucket while others of its pass are under way.
            self._pending.pop(bucket.name, None)
            self._undo_copies.pop(bucket.name, None)
            self._emptied.discard(bucket.name)
            pieces = [p for p in bucket.parameters if (p.name, p.offset) in saved]
            if not pieces:
                self._residuals.pop(bucket.name, None)
                self._buckets.pop(bucket.name, None)  # it keeps a gradient buffer alive
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
    """Refuses a saved residual of another size.

    Args:
        parameter: its name.
        saved: elements in the checkpoint.
        wanted: elements of the model's parameter, or of the slice of it.

    Raises:
        CheckpointError: they differ.
    """
    if saved != wanted:
        raise CheckpointError(
            f"the saved residual of {parameter} does not fit the parameter",
            expected=f"{wanted} elements",
            got=saved,
            remedy="resume with the same model and tensor-parallel size, or set "
            "compression.residual_checkpoint=none",
        )
