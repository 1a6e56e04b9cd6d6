"""One limit for a bucket on all ranks of a tensor-parallel group, from all ranks' samples.

ZEN, section 4: ranks that hold parts of the same layers sample their gradients, gather the samples,
and select by one global threshold, and by one chance of what ties with it; a rank with larger
gradients then sends more than the others. The samples are those of `threshold_scope=bucket`, drawn
at the same positions on every rank.

Cost: an agreement of 8 (2 + n) bytes a rank on the group's n ranks, and an all-gather of 4 bytes a
sample. Both are messages, so selection begins only when the bucket has passed the gate.
"""

from __future__ import annotations

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives.base import Identity, exchange_sizes
from megatron_sparse.compression.selection import Agreed, Selector, sampled_magnitudes
from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Limits
from megatron_sparse.errors import CommunicationError, ConfigError
from megatron_sparse.recording import StageTimer
from megatron_sparse.reduction.job import GATE, Stage
from megatron_sparse.transport import Transport


class GroupThreshold:
    """The ranks of a tensor-parallel group agree on one threshold.

    Args:
        selector: of this rank.
        transport: the group; on CUDA the agreement is read on the host.

    Raises:
        ConfigError: there is no group.
    """

    def __init__(self, selector: Selector, transport: Transport | None) -> None:
        if transport is None:
            raise ConfigError(
                "compression.threshold_scope=tp_group without a tensor-parallel group",
                expected="a model that Megatron trains, whose plugin knows the group",
                got="a group of data-parallel ranks alone",
                remedy="set compression.threshold_scope=parameter or bucket",
            )
        self._selector = selector
        self._transport = transport

    def agree(
        self, bucket: Bucket, density: float, step: int, timer: StageTimer
    ) -> Stage[Agreed | None]:
        """The residual, and limits for the pruned parameters, the same on all ranks of the group.

        Args:
            bucket: of this rank; the others have one of the same name and sizes.
            density: over all ranks together.
            step: keys the samples.
            timer: receives the time of sampling.

        Returns:
            Limits are scalars on the bucket's device; they keep everything where nothing may be
            pruned. None at density 1: everything is sent.

        Raises:
            CommunicationError: a rank has another bucket, or another number of samples of it.
        """
        if density >= 1:
            return None
        yield GATE
        transport, config = self._transport, self._selector.config
        residual_N = self._selector.begin(bucket, timer)
        with timer.stage("threshold"):
            own_S = sampled_magnitudes(bucket, residual_N, density, step, config)
        identity = Identity("threshold", bucket, "fp32", step)
        counts = yield from exchange_sizes([own_S.numel()], identity, transport)
        if len({count for (count,) in counts}) > 1:
            raise CommunicationError(
                f"bucket {bucket.name}: ranks of the tensor-parallel group have different samples",
                expected=f"{own_S.numel()} on every rank",
                got=[count for (count,) in counts],
                remedy="set compression.threshold_scope=parameter",
            )
        if not own_S.numel():
            return Agreed(residual_N, Limits.keep_all((), own_S.device))
        gathered = own_S.new_empty(transport.world_size * own_S.numel())
        yield transport.all_gather(gathered, own_S)
        with timer.stage("threshold"):
            return Agreed(residual_N, ops.threshold_of_samples(gathered, density))
