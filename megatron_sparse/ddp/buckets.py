"""Makes the reducer's buckets from DDP's, and moves residuals when DDP regroups its parameters.

DDP makes new buckets after its first backward pass, and a saved state is loaded before there are
any. So while no bucket holds a parameter's residual, it is *unplaced*: kept by the parameter's name
until a bucket with that parameter is launched. DDP cuts no parameter, so a residual has one bucket.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]

from megatron_sparse.bucket import Bucket, CollectiveOp, Reduction
from megatron_sparse.compression.parameters import ParameterFilter
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.errors import HostError


class DDPBuckets:
    """The buckets of one DDP model, and its unplaced residuals.

    `module` names the parameters; `parameter_filter` decides which of them are sent whole. This
    object moves the `residuals` of the buckets.

    Attributes:
        names: parameter -> its name.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        parameter_filter: ParameterFilter,
        world_size: int,
        residuals: ResidualStore,
    ) -> None:
        self.names: dict[Any, str] = {p: name for name, p in module.named_parameters()}
        self._filter = parameter_filter
        self._world_size = world_size
        self._residuals = residuals
        self._buckets: dict[int, Bucket] = {}  # by launch order in a backward pass
        self._launched: set[int] = set()  # keys of `_buckets` that this pass has launched
        self._unplaced: dict[str, torch.Tensor] = {}  # by the parameter's name
        # By name: unplaced residuals as they were before selections that may still be undone.
        self._before: dict[str, torch.Tensor] = {}

    def name_of(self, parameter: torch.Tensor) -> str:
        """The parameter's name.

        Raises:
            HostError: the parameter is another model's.
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
        """Makes the reducer's bucket over DDP's, with the residuals of its parameters.

        Args:
            grad_bucket: DDP's bucket; its parameters are adjacent.
            index: number of buckets that this pass has launched before.

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
        previous = self._buckets.get(index)  # from the last pass
        if previous is not None and previous.parameters == bucket.parameters:
            bucket.layouts = previous.layouts  # computed once
        else:  # DDP has made new buckets
            self._unplace_residuals()
        self._buckets[index] = bucket
        self._launched.add(index)
        waiting = [piece.name for piece in slices if piece.name in self._unplaced]
        if waiting:
            # Each slice begins at element 0, because DDP cuts no parameter.
            residuals = {(name, 0): self._unplaced.pop(name) for name in waiting}
            before = {(n, 0): self._before.pop(n) for n in waiting if n in self._before}
            self._residuals.load([bucket], residuals, before or None)
        return bucket

    def _unplace_residuals(self) -> None:
        """Takes all residuals out of old buckets, after DDP has made new ones.

        Buckets that this pass has launched are new already, and keep their residuals.
        """
        for index in self._buckets.keys() - self._launched:
            bucket = self._buckets.pop(index)
            if bucket.name in self._residuals:
                residual_N = self._residuals[bucket.name]
                before_N = self._residuals.settled(bucket)  # without a pending selection
                if before_N is None:  # there was no residual: zeros
                    before_N = torch.zeros_like(residual_N)
                for piece in bucket.parameters:
                    self._unplaced[piece.name] = residual_N[piece.start : piece.stop]
                    if before_N is not residual_N:  # a selection is pending
                        self._before[piece.name] = before_N[piece.start : piece.stop]
                self._residuals.load([bucket], {})  # the old bucket keeps no residual

    def end_pass(self) -> None:
        """Call it when all buckets of a backward pass have been launched."""
        self._launched.clear()

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
