"""The subclass of Megatron's bucket group that `attach` swaps in.

Its `start_grad_sync` first runs Megatron's own method over a process group of one rank: that
prepares the buckets (CUDA-graph events, extra main gradients, the NaN check, gradient scaling), and
its collective changes nothing. Then it starts the plugin's reducer, whose handle Megatron waits for
in `finish_grad_sync`. With several instances of the distributed optimizer (replicas of all its
shards) Megatron waits for no handle, so that method is overridden too. If the gradients need only a
sum, Megatron's own collective runs, and is timed.

Its `start_param_sync` starts the plugin's gather of parameters, or Megatron's own, which is timed.
Its `finish_param_sync` starts the plugin's gathers of the groups that follow, too.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron_sparse.megatron.buckets import GroupBuckets
from megatron_sparse.recording import Awaited, RecordSink
from megatron_sparse.reduction.job import Pending


class Handle:
    """The handle of the plugin's own communication: Megatron calls its `wait`.

    Args:
        pending: the job of each bucket, which reduces gradients or gathers parameters, in launch
            order.
        when_queued: called with each job once its device work is on a stream. It confirms the job,
            which raises the errors that the device reports, now or in the optimizer's step.
    """

    def __init__(self, pending: list[Pending], when_queued: Callable[[Pending], None]) -> None:
        self._pending = pending
        self._when_queued = when_queued

    def wait(self) -> None:
        """Lets the current stream wait for every bucket of the group.

        Raises:
            MegatronSparseError: a bucket was not reduced, or not gathered.
        """
        waiting, self._pending = self._pending, []  # a second wait does nothing
        for pending in waiting:
            pending.wait_until_queued()
            self._when_queued(pending)


class TimedHandle:
    """Wraps the handle of Megatron's collective; times the wait. Make it right before the launch.

    Args:
        records: one for each bucket of the group; the first one gets the wait for all of them.
        sink: receives the records.
        on_waited: called with the host's seconds of the wait, before the sink gets the records.

    Attributes:
        handle: set it after the launch to Megatron's handle, whose `wait` on CUDA blocks only the
            current stream; it stays None if Megatron has waited in the launch.
    """

    def __init__(
        self, records: Sequence[Awaited], sink: RecordSink, on_waited: Callable[[float], None]
    ) -> None:
        self.handle: Any = None
        self._records = records
        self._sink = sink
        self._on_waited = on_waited
        self._launch_s = time.perf_counter()

    def wait(self) -> None:
        """Waits for Megatron's handle; completes the records and hands them to the sink."""
        start_s = self._launch_s  # without a handle Megatron has waited in the launch
        if self.handle is not None:
            start_s = time.perf_counter()
            self.handle.wait()
        end_s = time.perf_counter()
        self._on_waited(end_s - start_s)
        for index, record in enumerate(self._records):
            record.finished_s = end_s
            # One wait is for all buckets, so only the first one gets it.
            record.exposed_s = 0.0 if index else end_s - start_s
            record.hand_to(self._sink)


class CompressedBucketGroup(_ParamAndGradBucketGroup):
    """Megatron's bucket group with four methods replaced; never constructed, only swapped in.

    `sparse_attachment`, an `attachment.Attachment`, starts reductions and gathers in place of
    Megatron's collectives, for the buckets in `sparse_group`.
    """

    sparse_attachment: Any
    sparse_group: GroupBuckets

    @property
    def _has_several_instances(self) -> bool:
        """Whether the distributed optimizer has several instances."""
        return self.sparse_group.instances_group is not None

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Starts to reduce the gradients, in place of Megatron's method of the same name.

        With `force_all_reduce` (Megatron's --save-wgrads-interval) Megatron reduces them itself:
        the step is dense and does not change the residual.
        """
        if force_all_reduce:
            super().start_grad_sync(force_all_reduce=True)
            return
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return  # as in Megatron: in the first batch a group may be launched twice
        attachment, overlap = self.sparse_attachment, self.ddp_config.overlap_grad_reduce
        timed: TimedHandle | None = attachment.time_megatron_sum(self.sparse_group)
        if timed is not None:  # the gradients need only a sum: Megatron's own collective makes it
            super().start_grad_sync()
            timed.handle = self.grad_reduce_handle
            if overlap:
                self.grad_reduce_handle = timed
            else:
                timed.wait()
            return
        self._prepare_buckets()
        handle: Handle = attachment.launch(self.sparse_group)
        if overlap:
            self.grad_reduce_handle = handle
        # With several optimizer instances Megatron's `finish_grad_sync` launches the first batch,
        # and never waits for its handle.
        is_launched_at_end = self.is_first_batch and self._has_several_instances
        if not overlap or is_launched_at_end:
            handle.wait()

    def finish_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        """Waits for the reduced gradients, in place of Megatron's method of the same name.

        With several instances of the distributed optimizer Megatron waits for its communication
        stream only, and keeps the handle. So this method waits for the handle, and resets it.
        """
        if not self._has_several_instances:
            super().finish_grad_sync(*args, **kwargs)
            return
        if self.grad_reduce_handle is not None:
            self.grad_reduce_handle.wait()
        # In the first batch this calls `start_grad_sync`, which then waits.
        super().finish_grad_sync(*args, **kwargs)
        self.grad_reduce_handle = None

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Starts to gather the parameters, in place of Megatron's method of the same name.

        Starts the plugin's gather if it compresses this group's parameters, else times Megatron's.
        """
        if force_sync and self.param_gather_handle is not None:
            # A gather is under way: Megatron only waits for it.
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
            handle.handle = self.param_gather_handle  # None: Megatron has waited already
            waits_later = handle.handle is not None
        if waits_later:
            self.param_gather_handle = handle
        else:
            handle.wait()
        self.param_gather_dispatched = True  # as Megatron's own method does at its end

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Waits for the parameters of this group, in place of Megatron's method of the same name.

        Megatron starts the next group's gather when this one's has arrived. The plugin's gathers
        all start before the first wait, in Megatron's order, so that no link is idle between two.
        """
        starts_all = self.sparse_attachment.starts_all_gathers
        group: Any = self
        while group is not None and not group.param_gather_dispatched:
            group.start_param_sync()
            goes_on = starts_all and isinstance(group.param_gather_handle, Handle)
            group = group.next_param_gather_bucket_group if goes_on else None
        following: Any = self.next_param_gather_bucket_group
        is_ours = isinstance(self.param_gather_handle, Handle)
        if is_ours and following is not None and following.param_gather_dispatched:
            skip_next_bucket_dispatch = True  # Megatron would warn of it
        super().finish_param_sync(skip_next_bucket_dispatch)

    def _prepare_buckets(self) -> None:
        """Runs Megatron's `start_grad_sync` with process groups of this rank alone.

        Megatron prepares its buckets there; the collective over one rank changes nothing.
        """
        alone = self.sparse_attachment.alone
        changed: dict[str, Any] = dict.fromkeys(self.sparse_group.attributes, alone)
        # Megatron would first wait for the all-to-all of the previous group, to free its memory.
        # The plugin makes no all-to-all, so there is nothing to wait for.
        changed["previous_grad_reduce_bucket_group"] = None
        before = {name: getattr(self, name, None) for name in changed}
        vars(self).update(changed)
        try:
            # As an all-reduce: a reduce-scatter would cut shards for the real group's size.
            # Megatron logs each forced all-reduce, so force it only if it would reduce-scatter.
            super().start_grad_sync(force_all_reduce=self.ddp_config.use_distributed_optimizer)
        finally:
            vars(self).update(before)
        if self.grad_reduce_handle is not None:
            self.grad_reduce_handle.wait()
            self.grad_reduce_handle = None
        if self._has_several_instances and self.ddp_config.overlap_grad_reduce:
            # Megatron has launched on its communication stream: this stream waits for that one.
            launch_stream: Any = self.communication_stream
            torch.cuda.current_stream().wait_stream(launch_stream)


def swap_in(group: GroupBuckets, attachment: Any) -> None:
    """Changes the class of Megatron's bucket group to `CompressedBucketGroup`, until `swap_out`."""
    host: Any = group.host
    host.__class__ = CompressedBucketGroup
    host.sparse_attachment, host.sparse_group = attachment, group


def swap_out(group: GroupBuckets) -> None:
    """Changes the class of Megatron's bucket group back; does nothing if it was not changed."""
    host: Any = group.host
    if host.__class__ is CompressedBucketGroup:
        host.__class__ = _ParamAndGradBucketGroup
        del host.sparse_attachment, host.sparse_group
