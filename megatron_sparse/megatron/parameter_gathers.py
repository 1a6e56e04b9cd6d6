"""Chooses and runs the all-gather of updated parameters of each of Megatron's bucket groups.

With the distributed optimizer a rank updates one shard of each bucket; then the ranks gather the
parameters, in one of three ways (`parameters.method`): *raw* is Megatron's own all-gather, only
timed here; *exact* sends how far each number has moved; *lossy* sends quantised differences.
Megatron gathers in `start_param_sync`, which `bucket_group` overrides to call `ParameterGathers`.
Names with `host` are Megatron's: `group.host` is its bucket group, a `host_bucket` its bucket.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.bucket import Bucket
from megatron_sparse.config.level import NODE
from megatron_sparse.config.parameters import COMPRESSED
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.megatron.bucket_group import TimedHandle
from megatron_sparse.megatron.buckets import GroupBuckets, device_of
from megatron_sparse.megatron.optimizer_step import WrappedMethod
from megatron_sparse.megatron.parameter_masters import (
    MASTERS_ELSEWHERE,
    LossyBucket,
    masters_elsewhere,
    optimizer_spans,
    watch_updates,
)
from megatron_sparse.parameters.agreement import LOSSY, RAW
from megatron_sparse.parameters.choice import GatherChooser
from megatron_sparse.parameters.gather import ExactGather, ShardGather, dense_gather_bytes
from megatron_sparse.parameters.lossy import LossyGather, LossyWay
from megatron_sparse.parameters.price import MOVE_BITS
from megatron_sparse.recording import GatherRecord, RecordSink
from megatron_sparse.reduction.host_state import on_every_rank
from megatron_sparse.reduction.job import Pending
from megatron_sparse.reduction.progress import Progress
from megatron_sparse.reduction.reducer import GradientReducer
from megatron_sparse.transport import Transport

logger = logging.getLogger("megatron_sparse")


class ParameterGathers:
    """The gathers of one attached model. All are raw until `plan`.

    Attributes:
        waited_s: seconds that the training thread has waited for parameters in this run.
        lines: what was chosen and why, in one line; empty where nothing is ever gathered, or
            nothing was to choose.
        lossy: the buckets that are gathered lossily.

    Args:
        sink: receives a record of each gather, and the waits.
    """

    def __init__(self, sink: RecordSink) -> None:
        self.waited_s = 0.0
        self.lines: list[str] = []
        self.lossy: list[LossyBucket] = []
        self._sink = sink
        # By `id` of the bucket group: an exact or lossy gather for each of its buckets.
        self._compressed: dict[int, list[ShardGather]] = {}
        self._hooks: list[Any] = []  # of torch, on modules of the model
        self._updates: list[WrappedMethod] = []  # of the optimizer

    def plan(
        self,
        groups: Sequence[GroupBuckets],
        config: SparseConfig,
        reducer_of: Callable[[GroupBuckets], GradientReducer],
        progress: Progress,
        chunks: Iterable[Any],
        optimizer: Any,
    ) -> None:
        """Chooses raw, exact or lossy for each bucket group. Collective over the group's ranks.

        With `parameters.method=auto`, or `per_node=auto` on several nodes, waits for measurements.

        Args:
            groups: all bucket groups of the model.
            config: `parameters` and `planner.cluster` are read.
            reducer_of: returns the reducer of a group's gradients. The gathers use its transport;
                if it compresses at level `node`, `per_node=auto` means `always`.
            progress: its thread runs the gathers.
            chunks: the model; whenever parameters of it are loaded, the next gather is raw.
            optimizer: Megatron's; its updates are wrapped until `close` if any bucket is lossy.

        Raises:
            ConfigError: `parameters.method=exact` or `lossy` cannot work here.
            CommunicationError: ranks have different settings.
        """
        method, chunks = config.parameters.method, list(chunks)
        clips = any(getattr(getattr(chunk, "config", None), "qk_clip", False) for chunk in chunks)
        # A chooser's constructor compares the ranks' settings. All run before `_reasons_for_raw`,
        # whose collectives depend on these settings.
        choosers: dict[int, GatherChooser] = {}  # by `id` of Megatron's process group
        for group in groups:
            key = id(group.process_group)
            if key not in choosers and why_raw(group) is None:
                reducer = reducer_of(group)
                choosers[key] = GatherChooser(_in_lanes(config, reducer), reducer.transport)
        reasons = _reasons_for_raw(groups, method, optimizer, clips=clips)
        used: dict[int, GatherChooser] = {}  # the choosers with a group to choose for
        for group, reason in zip(groups, reasons, strict=True):
            if reason is None:
                key = id(group.process_group)
                used[key] = choosers[key]
                self._make_gathers(group, choosers[key], reducer_of(group).transport, progress)
        self._follow_loads(chunks)
        self._updates = watch_updates(self.lossy, optimizer)
        if method != RAW:
            self._explain(method, used.values(), reasons)

    def _explain(
        self, method: str, choosers: Iterable[GatherChooser], reasons: Sequence[str | None]
    ) -> None:
        """Puts into `lines` what was chosen and why; rank 0 logs it."""
        explained = [chooser.explain() for chooser in choosers]
        different_reasons = dict.fromkeys(reasons)
        explained += [f"raw, {reason}" for reason in different_reasons if reason not in SILENT]
        if explained:
            self.lines = [f"parameters.method={method}: {'; '.join(explained)}"]
            if dist.get_rank() == 0:
                logger.info(self.lines[0])

    def _make_gathers(
        self, group: GroupBuckets, chooser: GatherChooser, transport: Transport, progress: Progress
    ) -> None:
        """Makes an exact or lossy gather for each bucket of a group; none if raw is chosen."""
        tensors = [host_bucket.param_data.view(-1) for host_bucket in group.host.buckets]
        way = chooser.choose(tensors)
        if way is None:  # raw
            return
        gathers: list[ShardGather] = []
        for bucket, values_N in zip(group.buckets, tensors, strict=True):
            if isinstance(way, LossyWay):
                gather = LossyGather(bucket, values_N, transport, way, progress, self._sink)
                self.lossy.append(LossyBucket(group, bucket, gather))
            else:
                gather = ExactGather(bucket, values_N, transport, way, progress, self._sink)
            gathers.append(gather)
        self._compressed[id(group)] = gathers

    def _follow_loads(self, chunks: Iterable[Any]) -> None:
        """Gathers raw after a module has loaded its parameters: ranks may differ in them."""
        if not self._compressed:
            return
        for chunk in chunks:
            for module in chunk.modules():
                if next(module.parameters(recurse=False), None) is not None:
                    hook = module.register_load_state_dict_post_hook(lambda *_: self.forget())
                    self._hooks.append(hook)

    def start(self, group: GroupBuckets, step: int, *, enabled: bool) -> list[Pending] | None:
        """Launches the exact or lossy gathers of a group; returns None if its gather is to be raw.

        Args:
            group: the bucket group.
            step: the training step.
            enabled: whether compression is on; otherwise the gather is raw.
        """
        gathers = self._compressed.get(id(group))
        if gathers is None:
            return None
        if not enabled:
            for gather in gathers:
                gather.release()  # prepares the shard for Megatron's own gather, which follows
            return None
        return [gather.start(step) for gather in gathers]

    def gathered(self, pending: Pending) -> None:
        """Checks the outcome of a gather that `start` returned; adds its wait to `waited_s`.

        Raises:
            MegatronSparseError: the parameters were not gathered.
        """
        pending.confirm()
        assert pending.record is not None, "every gather has a record"
        self.waited_s += pending.record.exposed_s

    def timed(self, group: GroupBuckets, step: int) -> TimedHandle:
        """Returns a handle that times Megatron's own gather of a group in step `step`.

        Call it right before Megatron launches the gather.
        """
        n_ranks = group.process_group.size()
        records = [
            GatherRecord(
                bucket=bucket.name,
                step=step,
                method=RAW,
                numel=values.numel(),
                dense_bytes=dense_gather_bytes(values, n_ranks),
                wire_bytes=dense_gather_bytes(values, n_ranks),
                launched_s=time.perf_counter(),
            )
            for bucket, values in _parameter_buffers(group)
            if n_ranks > 1  # a single rank gathers nothing
        ]

        def add_wait(waited_s: float) -> None:
            """Called when Megatron has waited for the gather, with the seconds."""
            self.waited_s += waited_s
            self._sink.record_stage(GatherRecord.WAIT, waited_s)

        return TimedHandle(records, self._sink, add_wait)

    def forget(self) -> None:
        """The next gather of each bucket is raw; see `ShardGather.forget`."""
        for gathers in self._compressed.values():
            for gather in gathers:
                gather.forget()

    @property
    def nbytes(self) -> int:
        """Bytes of the kept shards."""
        return sum(gather.nbytes for gathers in self._compressed.values() for gather in gathers)

    def close(self) -> None:
        """Removes the hooks from the model and the optimizer."""
        for update in self._updates:
            update.close()
        for hook in self._hooks:
            hook.remove()


def _parameter_buffers(group: GroupBuckets) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """Yields each bucket of a group with its parameters, 1-D; none without distributed optimizer.

    Without it a bucket of Megatron's may be several of the plugin's, and nothing is gathered.
    """
    if group.host.ddp_config.use_distributed_optimizer:
        for bucket, host_bucket in zip(group.buckets, group.host.buckets, strict=True):
            if host_bucket.param_data is not None:
                yield bucket, host_bucket.param_data.view(-1)


NOT_SHARDED = "without the distributed optimizer"
ALONE = "on one data-parallel rank"
QK_CLIP = "--qk-clip changes parameters on every rank behind the gather"
SILENT = (None, NOT_SHARDED, ALONE)
"""Reasons that need no line in the log: there is nothing to compress."""


def why_raw(group: GroupBuckets) -> str | None:
    """Returns why a bucket group cannot be gathered exactly; None if it can."""
    host, n_ranks = group.host, group.process_group.size()
    if not host.ddp_config.use_distributed_optimizer:
        return NOT_SHARDED
    if n_ranks == 1:
        return ALONE
    for bucket, host_bucket in zip(group.buckets, host.buckets, strict=True):
        values = host_bucket.param_data
        if values is None:
            return f"bucket {bucket.name} has no parameter buffer"
        if values.dtype not in MOVE_BITS:
            return f"bucket {bucket.name} holds {values.dtype} parameters"
    return None


def _reasons_for_raw(
    groups: Sequence[GroupBuckets], method: str, optimizer: Any, *, clips: bool
) -> list[str | None]:
    """Returns for each group why its gather must be raw; None if it can be exact or lossy.

    Collective over each group if `method` is lossy. `clips`: whether Megatron clips the weights of
    queries and keys.

    Raises:
        ConfigError: the method cannot work here.
    """
    reasons = [why_raw(group) or (QK_CLIP if clips else None) for group in groups]
    if method == LOSSY:
        _refuse_if_any(method, [_on_gpu(group) for group in groups])
    if method in COMPRESSED:
        _refuse_if_any(method, reasons)
    if method != LOSSY:
        return reasons
    # Lossy needs more: each rank's optimizer must keep its parameters in the gathered buffer.
    spans = optimizer_spans(optimizer)
    return [
        reason or _agreed(masters_elsewhere(group, spans), group)
        for group, reason in zip(groups, reasons, strict=True)
    ]


def _agreed(reason: str | None, group: GroupBuckets) -> str | None:
    """The reason, if any rank of the group has one. Collective."""
    on_all = on_every_rank(reason is None, device_of(group.buckets), group.process_group)
    return None if on_all else MASTERS_ELSEWHERE


def _on_gpu(group: GroupBuckets) -> str | None:
    """Why a bucket group cannot be gathered lossily, whatever else holds."""
    buffers = (host.param_data for host in group.host.buckets)
    on_gpu = any(values is not None and values.is_cuda for values in buffers)
    return "lossy gathers have no CUDA kernels yet" if on_gpu else None


def _in_lanes(config: SparseConfig, reducer: GradientReducer) -> SparseConfig:
    """At level `node`, `per_node=auto` is `always`: each record goes to a node once, in a lane."""
    level = reducer.level_groups
    is_node_level = level is not None and level.level == NODE  # a lane: one rank of each node
    if not is_node_level or config.parameters.per_node != "auto":
        return config
    return replace(config, parameters=replace(config.parameters, per_node="always"))


def _refuse_if_any(method: str, reasons: Sequence[str | None]) -> None:
    """Refuses `parameters.method=exact` or `lossy` where a group has a reason against it.

    Raises:
        ConfigError: names the first reason. `ALONE` does not count: such a group gathers nothing.
    """
    found = [reason for reason in reasons if reason not in (None, ALONE)]
    if found:
        raise ConfigError(
            f"parameters.method={method} cannot gather this model's parameters",
            expected="the distributed optimizer (use_distributed_optimizer) with bf16, fp16 or "
            "fp32 parameters in its buffers",
            got=found[0],
            remedy="set parameters.method=auto, or raw",
        )
