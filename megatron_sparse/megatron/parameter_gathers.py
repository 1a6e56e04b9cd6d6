"""Which bucket groups gather their parameters exactly, and the handles that Megatron waits on.

Megatron's bucket group gathers in `start_param_sync`; `bucket_group` overrides it and asks
`ParameterGathers`. Groups that stay raw keep Megatron's own all-gather; it is only timed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.bucket import Bucket
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.megatron.buckets import GroupBuckets
from megatron_sparse.parameters.choice import GatherChooser
from megatron_sparse.parameters.gather import (
    RAW,
    ExactGather,
    PendingGather,
    dense_gather_bytes,
)
from megatron_sparse.parameters.price import MOVE_BITS
from megatron_sparse.recording import GatherRecord, RecordSink
from megatron_sparse.reduction.job import Progress
from megatron_sparse.transport import Transport

logger = logging.getLogger("megatron_sparse")


class ExactHandle:
    """A bucket group's exact gathers; Megatron calls `wait`."""

    def __init__(self, pending: list[PendingGather], waited: Callable[[float], None]) -> None:
        self._pending = pending
        self._waited = waited

    def wait(self) -> None:
        """Blocks until every bucket of the group holds the new parameters.

        Raises:
            MegatronSparseError: a bucket was not gathered.
        """
        pending, self._pending = self._pending, []
        for each in pending:
            self._waited(each.wait())


class RawHandle:
    """Megatron's own gather of a bucket group, timed by the host.

    Args:
        handle: Megatron's; None if it has waited already, since `began_s`.
        began_s: `time.perf_counter` before Megatron's method.
        records: one for each bucket; the first gets the group's times.
        done: called with the records and the seconds after the wait.
    """

    def __init__(
        self,
        handle: Any,
        began_s: float,
        records: list[GatherRecord],
        done: Callable[[list[GatherRecord], float], None],
    ) -> None:
        self._handle = handle
        self._began_s = began_s
        self._records = records
        self._done = done

    def wait(self) -> None:
        """Waits as Megatron's handle does: on CUDA only the current stream waits."""
        start_s = self._began_s
        if self._handle is not None:
            start_s = time.perf_counter()
            self._handle.wait()
        end_s = time.perf_counter()
        for record in self._records:
            record.finished_s = end_s
        if self._records:
            self._records[0].exposed_s = end_s - start_s
        self._done(self._records, end_s - start_s)


class ParameterGathers:
    """The gathers of one attachment. All stay raw until `plan`.

    Attributes:
        waited_s: seconds that the training thread has waited for parameters, all in all.
        lines: what was chosen and why, in one line; empty where nothing is ever gathered, or
            nothing was to choose.

    Args:
        sink: receives a record of each gather, and the waits.
    """

    def __init__(self, sink: RecordSink) -> None:
        self.waited_s = 0.0
        self.lines: list[str] = []
        self._sink = sink
        # By `id` of the group, which the attachment holds.
        self._exact: dict[int, list[ExactGather]] = {}
        self._hooks: list[Any] = []

    def plan(
        self,
        groups: Sequence[GroupBuckets],
        config: SparseConfig,
        transport_of: Callable[[GroupBuckets], Transport],
        progress: Progress,
        chunks: Iterable[Any],
    ) -> None:
        """Decides for each group between raw and exact. Collective over each group's ranks.

        With `parameters.method=auto` or `coder=auto` the host waits for some measurements.

        Args:
            groups: of the attachment.
            config: `parameters` and `planner.cluster` are read.
            transport_of: the transport of a group's ranks.
            progress: drives the gathers.
            chunks: the model; whenever parameters of it are loaded, the next gather is raw.

        Raises:
            ConfigError: `parameters.method=exact` cannot work here.
            CommunicationError: ranks have different settings.
        """
        reasons = [why_raw(group) for group in groups]
        if config.parameters.method == "exact":
            _refuse(reasons)
        choosers: dict[int, GatherChooser] = {}
        for group, reason in zip(groups, reasons, strict=True):
            if reason is not None:
                continue
            key, transport = id(group.process_group), transport_of(group)
            if key not in choosers:
                choosers[key] = GatherChooser(config, transport)
                if config.parameters.method == "exact":
                    _refuse([choosers[key].missing])
            tensors = [host.param_data.view(-1) for host in group.host.buckets]
            way = choosers[key].choose(tensors)
            if way is not None:
                self._exact[id(group)] = [
                    ExactGather(bucket, values_N, transport, way, progress, self._sink)
                    for bucket, values_N in zip(group.buckets, tensors, strict=True)
                ]
        self._follow_loads(chunks)
        said = [chooser.explain() for chooser in choosers.values()]
        said += [f"raw, {reason}" for reason in dict.fromkeys(reasons) if reason not in SILENT]
        if said and config.parameters.method != RAW:
            self.lines = [f"parameters.method={config.parameters.method}: {'; '.join(said)}"]
            if dist.get_rank() == 0:
                logger.info(self.lines[0])

    def _follow_loads(self, chunks: Iterable[Any]) -> None:
        if not self._exact:
            return
        for chunk in chunks:
            for module in chunk.modules():
                if next(module.parameters(recurse=False), None) is not None:
                    hook = module.register_load_state_dict_post_hook(lambda *_: self.forget())
                    self._hooks.append(hook)

    def start(self, group: GroupBuckets, step: int, *, enabled: bool) -> ExactHandle | None:
        """Launches a group's exact gathers; None if it is to be gathered raw.

        Args:
            group: the bucket group.
            step: the training step.
            enabled: of the attachment; a step in which it is off gathers raw.
        """
        gathers = self._exact.get(id(group))
        if gathers is None:
            return None
        if not enabled:
            for each in gathers:
                each.forget()
            return None
        return ExactHandle([each.start(step) for each in gathers], self._waited)

    def timed(self, group: GroupBuckets, step: int, handle: Any, began_s: float) -> RawHandle:
        """Megatron's own gather of a group, which has begun.

        Args:
            group: the bucket group.
            step: the training step.
            handle: Megatron's; None if it has waited already.
            began_s: `time.perf_counter` before the launch.
        """
        n = group.process_group.size()
        records = [
            GatherRecord(
                bucket=bucket.name,
                step=step,
                method=RAW,
                numel=values.numel(),
                dense_bytes=dense_gather_bytes(values, n),
                wire_bytes=dense_gather_bytes(values, n),
                launched_s=began_s,
            )
            for bucket, values in _parameter_buffers(group)
            if n > 1
        ]
        return RawHandle(handle, began_s, records, self._raw_done)

    def _raw_done(self, records: list[GatherRecord], seconds: float) -> None:
        for record in records:
            self._sink.record_gather(record)
        self._waited(seconds)

    def _waited(self, seconds: float) -> None:
        self.waited_s += seconds
        self._sink.record_stage("param_wait", seconds)

    def forget(self) -> None:
        """The next gather of each bucket is raw; see `ExactGather.forget`."""
        for gathers in self._exact.values():
            for each in gathers:
                each.forget()

    @property
    def nbytes(self) -> int:
        """Bytes of the kept shards."""
        return sum(each.nbytes for gathers in self._exact.values() for each in gathers)

    def close(self) -> None:
        """Removes the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _parameter_buffers(group: GroupBuckets) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """A group's buckets with their whole parameters; none without the distributed optimizer.

    Only there each of the plugin's buckets is one of Megatron's, in one piece.
    """
    if group.host.ddp_config.use_distributed_optimizer:
        for bucket, host in zip(group.buckets, group.host.buckets, strict=True):
            if host.param_data is not None:
                yield bucket, host.param_data.view(-1)


NOT_SHARDED = "without the distributed optimizer"
ALONE = "on one data-parallel rank"
SILENT = (None, NOT_SHARDED, ALONE)
"""Reasons that need no line in the log: there is nothing to compress."""


def why_raw(group: GroupBuckets) -> str | None:
    """Why the plugin cannot gather a bucket group exactly; None if it can."""
    host, n = group.host, group.process_group.size()
    if not host.ddp_config.use_distributed_optimizer:
        return NOT_SHARDED
    if n == 1:
        return ALONE
    for bucket, own in zip(group.buckets, host.buckets, strict=True):
        values = own.param_data
        if values is None:
            return f"bucket {bucket.name} has no parameter buffer"
        if values.dtype not in MOVE_BITS["rans"] or values.numel() % n:
            return f"bucket {bucket.name} holds {values.dtype} parameters"
    return None


def _refuse(reasons: Sequence[str | None]) -> None:
    """Refuses `parameters.method=exact` for groups that cannot.

    Raises:
        ConfigError: names the first reason. A group of one rank has nothing to gather.
    """
    found = [each for each in reasons if each not in (None, ALONE)]
    if found:
        raise ConfigError(
            "parameters.method=exact cannot gather this model's parameters",
            expected="the distributed optimizer (use_distributed_optimizer) with bf16, fp16 or "
            "fp32 parameters in its buffers, and compiled kernels if these are on GPUs",
            got=found[0],
            remedy="set parameters.method=auto, or raw",
        )
