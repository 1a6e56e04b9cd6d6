"""DDP's buckets as the reducer's, and what becomes of residuals where DDP makes new ones.

DDP makes new buckets after its first iteration, and a loaded state comes before there are any. So
residuals are kept by their parameters' names while no bucket holds them, and go into the bucket in
which their parameter then lies. DDP cuts no parameter: a residual has one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]

from megatron_sparse.bucket import Bucket, CollectiveOp, Reduction
from megatron_sparse.compression.parameters import ParameterFilter
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.errors import HostError


class DDPBuckets:
    """The buckets of one DDP model, and the residuals that none of them holds yet.

    Args:
        module: the model; parameters have its names.
        parameter_filter: what is sent whole.
        world_size: ranks of the group.
        residuals: of the buckets; this object moves them.

    Attributes:
        names: of all parameters.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        parameter_filter: ParameterFilter,
        world_size: int,
        residuals: ResidualStore,
    ) -> None:
        """Begins without buckets: DDP shows them pass by pass."""
        self.names: dict[Any, str] = {
            parameter: name for name, parameter in module.named_parameters()
        }
        self._filter = parameter_filter
        self._world_size = world_size
        self._residuals = residuals
        self._buckets: dict[int, Bucket] = {}  # by launch order in a pass
        self._placed: set[int] = set()  # keys of `_buckets` that this pass has used
        self._unplaced: dict[str, torch.Tensor] = {}  # residuals that no bucket holds yet
        self._before: dict[str, torch.Tensor] = {}  # those from before a step that goes on

    def name_of(self, parameter: torch.Tensor) -> str:
        """The parameter's name.

        Raises:
            HostError: it is another model's.
        """
        if parameter not in self.names:
            raise HostError(
                "ddp_hook got a gradient of a model that the state was not made for",
                expected="the parameters of the model that DDPState was given",
                got=f"a parameter of shape {tuple(parameter.shape)} that is not among them",
                remedy="make a DDPState for each DDP model, and register it with that model",
            )
        return self.names[parameter]

    def place(self, grad_bucket: GradBucket, index: int) -> Bucket:
        """Makes the reducer's bucket from DDP's, whose parameters are adjacent.

        Where DDP has made new buckets, it puts the residuals of their parameters into this one.

        Args:
            grad_bucket: DDP's.
            index: how many were launched in this pass before it.

        Raises:
            HostError: a parameter is another model's.
        """
        slices, start = [], 0
        for parameter in grad_bucket.parameters():
            name, stop = self.name_of(parameter), start + parameter.numel()
            slices.append(
                self._filter.slice_of(name, start, stop, parameter.shape, replicated=False)
            )
            start = stop
        bucket = Bucket(
            f"bucket{index}",
            grad_bucket.buffer(),
            tuple(slices),
            CollectiveOp.ALL_REDUCE,
            self._world_size,
            Reduction.AVG,
        )
        previous = self._buckets.get(index)  # of the last pass
        if previous is not None and previous.parameters == bucket.parameters:
            bucket.layouts = previous.layouts
        else:
            self._take_residuals_back()
        self._buckets[index] = bucket
        self._placed.add(index)
        waiting = [piece.name for piece in slices if piece.name in self._unplaced]
        if waiting:
            # Each begins at element 0, because DDP cuts no parameter.
            residuals = {(name, 0): self._unplaced.pop(name) for name in waiting}
            before = {(n, 0): self._before.pop(n) for n in waiting if n in self._before}
            self._residuals.load([bucket], residuals, before or None)
        return bucket

    def _take_residuals_back(self) -> None:
        """Called when DDP has made new buckets: keeps residuals under their parameters' names.

        Residuals of buckets that this step has already launched are in use and stay in place.
        """
        for index in self._buckets.keys() - self._placed:
            bucket = self._buckets.pop(index)
            if bucket.name in self._residuals:
                held_N, before_N = self._residuals[bucket.name], self._residuals.settled(bucket)
                if before_N is None:  # the first selection is pending
                    before_N = torch.zeros_like(held_N)
                for piece in bucket.parameters:
                    self._unplaced[piece.name] = held_N[piece.start : piece.stop]
                    if before_N is not held_N:  # a pass of a step that goes on
                        self._before[piece.name] = before_N[piece.start : piece.stop]
                self._residuals.load([bucket], {})  # the old bucket keeps none

    def end_pass(self) -> None:
        """All buckets of a pass have been placed."""
        self._placed.clear()

    def rescale(self, factor: float) -> None:
        """Multiplies all residuals by a factor, those too that no bucket holds yet."""
        self._residuals.rescale(factor)
        self._unplaced = {name: held * factor for name, held in self._unplaced.items()}

    def residuals_by_parameter(self, *, settled: bool) -> dict[str, torch.Tensor]:
        """Views of the residuals; see `ResidualStore.slices` for `settled`."""
        placed = {name: view for (name, _), view in self._residuals.slices(settled=settled)}
        return self._unplaced | placed

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Replaces all residuals by saved ones, by parameter; `place` puts them into buckets."""
        self._residuals.load(self._buckets.values(), {})
        self._unplaced, self._before = dict(saved), {}
