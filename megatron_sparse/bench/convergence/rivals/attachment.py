"""The plugin's attachment with a rival in the place of its collectives, after the warm-up.

The warm-up, the schedule of densities, the residual with its undo copy, and the records from which
bits and bytes are counted are the plugin's. A rival thus starts from the residual of the warm-up.

Import it after `megatron.training.prepare_host`.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from megatron_sparse.bench.convergence.rivals.moment_mask import MomentMaskRival
from megatron_sparse.bench.convergence.rivals.power_sgd import PowerSGDRival
from megatron_sparse.bench.convergence.rivals.rival import Contribution, Rival
from megatron_sparse.bench.convergence.settings import MomentMask, PowerSGD
from megatron_sparse.bucket import Bucket, CollectiveOp, Reduction
from megatron_sparse.compression.schedule import Phase, phase_and_density
from megatron_sparse.config.sparse import CompressionConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.megatron.attachment import Attachment
from megatron_sparse.megatron.bucket_group import Handle
from megatron_sparse.megatron.buckets import GroupBuckets
from megatron_sparse.planner.wire_bytes import dense_wire_bytes
from megatron_sparse.recording import BucketRecord


def rival_of(spec: PowerSGD | MomentMask, config: CompressionConfig) -> Rival:
    """The rival that a setting describes."""
    if isinstance(spec, PowerSGD):
        return PowerSGDRival(spec.rank, config.seed)
    return MomentMaskRival(config, interval=spec.interval, owners=spec.owners)


class RivalAttachment(Attachment):
    """See the module's docstring.

    Args:
        spec: the rival.
        arguments: of `Attachment`.

    Raises:
        ConfigError: gradients are not fp32 on a CPU, or they are reduce-scattered.
    """

    def __init__(self, spec: PowerSGD | MomentMask, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._rival = rival_of(spec, self.config.compression)
        for bucket in self.buckets:
            _check(bucket)

    def bind_optimizer(self, optimizer: Any, *, undo: bool) -> None:
        """See `Attachment`."""
        super().bind_optimizer(optimizer, undo=undo)
        self._rival.bind(optimizer)

    def launch(self, group: GroupBuckets) -> Handle:
        """See `Attachment`. A rival's sums are complete when this returns."""
        phase, density = phase_and_density(self.config.compression, self.step)
        if phase is Phase.WARMUP:
            return super().launch(group)
        for bucket, host in zip(group.buckets, group.host.buckets, strict=True):
            indices = host.param_to_index
            parameters = sorted(
                ((each, indices[each][0]) for each in host.params_list), key=lambda pair: pair[1]
            )
            self._synchronise(bucket, parameters, group, phase, density)
        return Handle([], None)

    def _synchronise(
        self,
        bucket: Bucket,
        parameters: list[tuple[torch.nn.Parameter, int]],
        group: GroupBuckets,
        phase: Phase,
        density: float,
    ) -> None:
        began_s = time.perf_counter()
        record = BucketRecord(
            bucket=bucket.name,
            step=self.step,
            scheme="rival",
            phase=phase,
            density=density,
            numel=bucket.numel,
            dense_bytes=round(dense_wire_bytes(bucket, bucket.grad_N.element_size())),
            launched_s=began_s,
        )
        if bucket.reduction is Reduction.AVG:
            bucket.grad_N.div_(bucket.world_size)
        residual_N = self.residuals.begin(bucket)
        given = Contribution(bucket, parameters, residual_N, group.process_group, density, record)
        self._rival.synchronise(given)
        record.end(time.perf_counter(), 0.0, 0.0)
        self.sink.record_stage("host_wait", record.waited(began_s))
        self.sink.record_bucket(record)


def _check(bucket: Bucket) -> None:
    gradient = bucket.grad_N
    fits = gradient.dtype == torch.float32 and gradient.device.type == "cpu"
    if not fits or bucket.op is not CollectiveOp.ALL_REDUCE:
        raise ConfigError(
            "the rivals of bench convergence cannot take this run",
            expected="fp32 gradients on a CPU, without the distributed optimizer",
            got=f"{gradient.dtype} on {gradient.device.type}, {bucket.op}",
            remedy="leave out training.precision and training.use_distributed_optimizer",
        )
