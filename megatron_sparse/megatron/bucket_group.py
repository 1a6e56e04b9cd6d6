"""The subclass of Megatron's bucket group that `attach` swaps in.

Its `start_grad_sync` first runs Megatron's own method over a group of one rank: that prepares the
bucket (CUDA-graph events, extra main gradients, the NaN check, gradient scaling), and its
collective changes nothing. Then it starts the reducer, and Megatron waits for the reducer's handle.
It also overrides `finish_grad_sync`, for the one case in which Megatron does not wait. Where a sum
is all that the reducer would make, Megatron's own collective runs, and is timed.

Its `start_param_sync` starts the exact gather of parameters, or Megatron's own, which is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron_sparse.megatron.buckets import GroupBuckets
from megatron_sparse.recording import Awaited, RecordSink
from megatron_sparse.reduction.job import Pending


class Handle:
    """What Megatron calls `wait()` on, for the gradients or the parameters of a bucket group.

    Args:
        pending: of each bucket, in launch order.
        then: called with each one when its work is on a stream: confirms it, now or later.
    """

    def __init__(self, pending: list[Pending], then: Callable[[Pending], None]) -> None:
        self._pending = pending
        self._then = then

    def wait(self) -> None:
        """Lets the current stream wait for every bucket of the group.

        Raises:
            MegatronSparseError: a bucket was not synchronised, or not gathered. Where sums are
                confirmed later, an error that only the device knows yet is raised before
                parameters change.
        """
        waiting, self._pending = self._pending, []  # a second wait does nothing
        for pending in waiting:
            pending.wait_until_queued()
            self._then(pending)


class TimedHandle:
    """What Megatron calls `wait()` on where its own collective runs. Made right before the launch.

    Args:
        records: of the group's buckets; the first one is given the wait for all of them.
        sink: receives the records.
        then: called with the host's seconds of the wait, before the sink has the records.

    Attributes:
        handle: Megatron's, which on CUDA lets only the current stream wait; None if Megatron has
            waited in the launch.
    """

    def __init__(
        self, records: Sequence[Awaited], sink: RecordSink, then: Callable[[float], None]
    ) -> None:
        self.handle: Any = None
        self._records = records
        self._sink = sink
        self._then = then
        self._began_s = time.perf_counter()

    def wait(self) -> None:
        """Waits as Megatron's handle does; completes the records and hands them to the sink."""
        start_s = self._began_s  # without a handle Megatron has waited in the launch
        if self.handle is not None:
            start_s = time.perf_counter()
            self.handle.wait()
        end_s = time.perf_counter()
        self._then(end_s - start_s)
        for index, record in enumerate(self._records):
            record.finished_s = end_s
            # One wait is for all buckets, so only the first one gets it.
            record.exposed_s = 0.0 if index else end_s - start_s
            record.hand_to(self._sink)


class CompressedBucketGroup(_ParamAndGradBucketGroup):
    """Megatron's bucket group with three methods replaced; never constructed, only swapped in.

    `sparse_attachment`, an `attachment.Attachment`, starts reductions and gathers in place of
    Megatron's collectives.
    """

    sparse_attachment: Any
    sparse_group: GroupBuckets

    @property
    def _has_instances(self) -> bool:
        """Whether the distributed optimizer has several instances."""
        return self.sparse_group.instances_group is not None

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """See `_ParamAndGradBucketGroup.start_grad_sync`.

        `force_all_reduce` (Megatron's --save-wgrads-interval) falls through to Megatron: the step
        is dense and leaves the residual alone.
        """
        if force_all_reduce:
            super().start_grad_sync(force_all_reduce=True)
            return
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return  # as in Megatron: the first batch has launched it already
        attachment, overlap = self.sparse_attachment, self.ddp_config.overlap_grad_reduce
        # Where the reducer would only sum, Megatron's own collective runs.
        timed: TimedHandle | None = attachment.left_to_megatron(self.sparse_group)
        if timed is not None:
            super().start_grad_sync()
            timed.handle = self.grad_reduce_handle
            if overlap:
                self.grad_reduce_handle = timed
            else:
                timed.wait()
            return
        self._prepare_alone()  # Megatron's preparation of the buckets, without a collective
        handle: Handle = attachment.launch(self.sparse_group)
        if overlap:
            self.grad_reduce_handle = handle
        # In the first batch of several optimizer instances Megatron launches in `finish_grad_sync`,
        # and never waits for the handle.
        is_launched_at_end = self.is_first_batch and self._has_instances
        if not overlap or is_launched_at_end:
            handle.wait()

    def finish_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        """See `_ParamAndGradBucketGroup.finish_grad_sync`.

        With several instances of the distributed optimizer Megatron waits for a stream of its own
        instead of the handle, and does not reset the handle.
        """
        if not self._has_instances:
            super().finish_grad_sync(*args, **kwargs)
            return
        if self.grad_reduce_handle is not None:
            self.grad_reduce_handle.wait()
        # In the first batch this launches, and waits in `start_grad_sync`.
        super().finish_grad_sync(*args, **kwargs)
        self.grad_reduce_handle = None

    def start_param_sync(self, force_sync: bool = False) -> None:
        """See `_ParamAndGradBucketGroup.start_param_sync`.

        Starts the plugin's gather, or else Megatron's own, and times it.
        """
        if force_sync and self.param_gather_handle is not None:
            # Megatron waits for the gather that is under way.
            super().start_param_sync(force_sync=True)
            return
        assert self.param_gather_handle is None, "Megatron waits for a gather before the next one"
        attachment, group = self.sparse_attachment, self.sparse_group
        handle = attachment.start_gather(group)
        if handle is not None:
            waits_later = self.ddp_config.overlap_param_gather and not force_sync
        else:
            handle = attachment.parameters.timed(group, attachment.step)
            super().start_param_sync(force_sync=force_sync)
            handle.handle = self.param_gather_handle
            waits_later = handle.handle is not None
        if waits_later:
            self.param_gather_handle = handle
        else:
            handle.wait()
        self.param_gather_dispatched = True

    def _prepare_alone(self) -> None:
        """Runs Megatron's method over groups of one rank: all of it but its collective."""
        alone = self.sparse_attachment.alone
        # `attributes` are those that hold process groups. With a previous bucket Megatron would
        # wait for its all-to-all, whose memory it limits so; there is no all-to-all here.
        changed: dict[str, Any] = dict.fromkeys(self.sparse_group.attributes, alone)
        changed["previous_grad_reduce_bucket_group"] = None
        before = {name: getattr(self, name, None) for name in changed}
        vars(self).update(changed)
        try:
            # As an all-reduce: a reduce-scatter would cut the bucket by the real group's size.
            # Megatron logs a line for each forced bucket, so force it only if needed.
            super().start_grad_sync(force_all_reduce=self.ddp_config.use_distributed_optimizer)
        finally:
            vars(self).update(before)
        if self.grad_reduce_handle is not None:
            self.grad_reduce_handle.wait()
            self.grad_reduce_handle = None
        if self._has_instances and self.ddp_config.overlap_grad_reduce:
            # Megatron then launches on a stream of its own.
            launch_stream: Any = self.communication_stream
            torch.cuda.current_stream().wait_stream(launch_stream)


def swap_in(group: GroupBuckets, attachment: Any) -> None:
    """Gives a bucket group of Megatron's the plugin's methods, until `swap_out`."""
    host: Any = group.host
    host.__class__ = CompressedBucketGroup
    host.sparse_attachment, host.sparse_group = attachment, group


def swap_out(group: GroupBuckets) -> None:
    """Gives a bucket group its own methods back; one that has them stays as it is."""
    host: Any = group.host
    if host.__class__ is CompressedBucketGroup:
        host.__class__ = _ParamAndGradBucketGroup
        del host.sparse_attachment, host.sparse_group
