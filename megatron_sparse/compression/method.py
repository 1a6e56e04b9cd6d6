"""The interface of the compression methods, and the default one: sampled top-k, error feedback.

A method decides two things about a bucket: what is added to the gradient before anything is
selected (the residual and, for DGC, a velocity), and which limits select. The rest (pruning,
encoding, leak, rounding) is the same for all of them, in one fused pass.

| `compression.method` | class | beside the residual it keeps |
|---|---|---|
| `topk` | `SampledTopK` | nothing |
| `threshold_reuse` | `threshold_reuse.ThresholdReuse` | limits, and their kept counts |
| `sidco` | `tail_fit.SIDCo` | nothing |
| `dgc` | `dgc.DGC` | a velocity of each element |

All that a method keeps is provisional until the step is accepted, follows the loss scale, and is
saved with the residual.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from megatron_sparse.bucket import Bucket, Layout
from megatron_sparse.compression.residual import OF_INSTANCES, RESIDUAL, ResidualStore
from megatron_sparse.compression.threshold import range_limits
from megatron_sparse.config.sparse import CompressionConfig
from megatron_sparse.cuda_ext.record_spec import Limits, Pruning
from megatron_sparse.formats.message import Message


class CompressionMethod(Protocol):
    """How a bucket's selection is made; one object serves all buckets of a rank.

    The progress thread calls `begin`, `limits`, `selecting` and `selected` for each bucket, in this
    order, or `begin` alone for a dense plan; buckets of a step may come in any order. The other
    methods are called between two steps.

    Attributes:
        config: the settings it was made with.
        stores: the values kept for each element, by name; "residual" is among them. The owner of
            the method commits, rolls back, rescales, saves and loads them, and the method itself.
    """

    config: CompressionConfig
    stores: dict[str, ResidualStore]

    def of_instances(self, config: CompressionConfig) -> CompressionMethod:
        """What selects from the sums of optimizer instances; always the same object.

        From the first call on its residual is one of `stores`. It keeps nothing else.

        Args:
            config: its settings.
        """
        ...

    def begin(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's residual [N], which is added to the gradient; mutates it."""
        ...

    def has_addend(self, bucket: Bucket) -> bool:
        """Whether `begin` may return anything but zeros; if not, a dense plan needs no pass."""
        ...

    def limits(
        self,
        bucket: Bucket,
        layout: Layout,
        residual_N: torch.Tensor,
        density: float,
        step: int,
        agreed: Limits | None,
    ) -> Limits:
        """The limits of every range of the layout; see `threshold.range_limits`."""
        ...

    def selecting(self, bucket: Bucket, layout: Layout, pruning: Pruning, density: float) -> None:
        """Called with what is about to be selected; gradient and residual are still whole."""
        ...

    def selected(self, bucket: Bucket, message: Message) -> None:
        """Called with the message that the limits have selected."""
        ...

    def commit(self) -> None:
        """The optimizer took the step: state outside the stores becomes final."""
        ...

    def rollback(self) -> None:
        """The optimizer skipped the step: state outside the stores is as it was before."""
        ...

    def rescale(self, factor: float) -> None:
        """The loss scale changed by `factor`: so does the unit of the state outside the stores."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state outside the stores, for a checkpoint: plain containers and CPU tensors.

        Call it between two steps; on CUDA it waits for the tensors.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the result of `state_dict` on the same rank; an empty one starts anew.

        Raises:
            CheckpointError: the state is damaged.
        """
        ...


class SampledTopK:
    """Leaky error feedback; limits from samples of every step. The base of the others.

    Cost: no pass over the gradient of its own; `samples` elements of each range are read.

    Args:
        config: density, samples, scope.
        residuals: error feedback.
    """

    def __init__(self, config: CompressionConfig, residuals: ResidualStore) -> None:
        self.config = config
        self.residuals = residuals
        self.stores = {RESIDUAL: residuals}
        self._of_instances: SampledTopK | None = None

    def of_instances(self, config: CompressionConfig) -> CompressionMethod:
        """See `CompressionMethod`: sampled top-k with error feedback, for every method."""
        if self._of_instances is None:
            first = self.residuals
            second = ResidualStore(first.dtype, undo=first.undo, outcome=first.outcome)
            self._of_instances = SampledTopK(config, second)
            self.stores[OF_INSTANCES] = second
        return self._of_instances

    def begin(self, bucket: Bucket) -> torch.Tensor:
        """See `CompressionMethod`."""
        return self.residuals.begin(bucket)

    def has_addend(self, bucket: Bucket) -> bool:
        """See `CompressionMethod`."""
        return bucket.name in self.residuals

    def limits(
        self,
        bucket: Bucket,
        layout: Layout,
        residual_N: torch.Tensor,
        density: float,
        step: int,
        agreed: Limits | None,
    ) -> Limits:
        """See `CompressionMethod`."""
        return range_limits(bucket, layout, residual_N, density, step, self.config, agreed)

    def selecting(self, bucket: Bucket, layout: Layout, pruning: Pruning, density: float) -> None:
        """See `CompressionMethod`: ignored."""

    def selected(self, bucket: Bucket, message: Message) -> None:
        """See `CompressionMethod`: ignored."""

    def commit(self) -> None:
        """See `CompressionMethod`: there is no state outside the stores."""

    def rollback(self) -> None:
        """See `CompressionMethod`: there is no state outside the stores."""

    def rescale(self, factor: float) -> None:
        """See `CompressionMethod`: there is no state outside the stores."""

    def state_dict(self) -> dict[str, Any]:
        """See `CompressionMethod`: the residual is the only state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `CompressionMethod`."""
