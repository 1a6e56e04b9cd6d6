"""Wraps an optimizer's step, to confirm that every gradient sum is right before parameters change.

In capacity mode on CUDA (messages of fixed size), Megatron's `finish_grad_sync` returns when a
bucket's work is queued on a stream; *reports*, which say whether the sum is right, reach the host
later. Megatron's optimizers read the gradients' norm on the host in `step`, then change parameters
in `step_with_ready_grads`. The plugin reads the reports between the two: they have arrived when the
norm has been read, so the host does not wait. Without that method it reads them before `step`.
"""

import functools
import time
from collections.abc import Callable
from types import MethodType
from typing import Any

from megatron_sparse.profiler_ranges import marked
from megatron_sparse.recording import RecordSink
from megatron_sparse.reduction.job import Pending

UPDATE = "step_with_ready_grads"
"""Megatron's method that changes parameters."""


def parts_of(optimizer: Any) -> list[Any]:
    """Lists the optimizers in Megatron's (nested) `ChainedOptimizer`, or the optimizer itself."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        return [optimizer]
    return [part for inner in chained for part in parts_of(inner)]


def clips_gradients(optimizer: Any) -> bool:
    """Whether Megatron clips the sum. A norm does not say so: chained optimizers always tell it."""
    configs = (getattr(part, "config", None) for part in parts_of(optimizer))
    return any(getattr(config, "clip_grad", 0.0) > 0.0 for config in configs)


class WrappedMethod:
    """Replaces a method of one object by a wrapper, until `close`.

    Other code wraps the same method, before or after: learning-rate schedulers, a second
    attachment.

    `wrapper` is called in place of the method, with the former method before its arguments.
    """

    def __init__(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        # A wrapper that other code has set on the object; None: `name` is the class's method.
        self._earlier_wrapper = vars(owner).get(name)
        original = getattr(owner, name)
        self._called: Callable[..., Any] = functools.partial(wrapper, original)

        # `wraps` copies the attribute by which torch's schedulers know a method they have wrapped.
        @functools.wraps(original)
        def method(_: Any, *args: Any, **kwargs: Any) -> Any:
            return self._called(*args, **kwargs)

        # A bound method, because torch's schedulers read its `__func__`.
        self._original, self._method = original, MethodType(method, owner)
        setattr(owner, name, self._method)

    def close(self) -> None:
        """Puts the former method back; if a later wrapper is in place, only passes its calls on."""
        self._called = self._original
        if vars(self._owner).get(self._name) is not self._method:
            return  # a later wrapper calls `self._method`
        if self._earlier_wrapper is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._earlier_wrapper)


class UnconfirmedSums:
    """The step's buckets whose sum is queued on a CUDA stream, but is not known to be right yet."""

    def __init__(self) -> None:
        self._pending: dict[str, Pending] = {}

    def add(self, pending: Pending) -> None:
        """Adds a bucket's job. If the bucket is in already, a new step begins: confirms the old.

        Raises:
            MegatronSparseError: see `confirm`.
        """
        if pending.name in self._pending:
            self.confirm()
        self._pending[pending.name] = pending

    def confirm(self) -> None:
        """Reads whether each sum is right; the host waits for reports that have not arrived.

        Raises:
            MegatronSparseError: a bucket was not synchronised; no parameter may be changed.
        """
        waiting, self._pending = self._pending, {}
        for pending in waiting.values():
            pending.confirm()


class WatchedOptimizer:
    """Wraps an optimizer's `step`, until `close`.

    Args:
        optimizer: Megatron's, or any object with `step`.
        sums: confirmed before parameters change.
        sink: receives the seconds of each step.
        end: called after each step with whether it was accepted, and the gradient's norm if known.
        inner_s: returns the seconds that the thread has waited so far for what is recorded as
            another stage. Waits inside the step are subtracted from the step's seconds.
    """

    def __init__(
        self,
        optimizer: Any,
        sums: UnconfirmedSums,
        sink: RecordSink,
        *,
        end: Callable[[bool, float | None], None],
        inner_s: Callable[[], float],
    ) -> None:
        has_update = hasattr(optimizer, UPDATE)

        def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            """Calls the original step with all sums confirmed; times it, and reports to `end`."""
            start_s, before_s = time.perf_counter(), inner_s()
            with marked("optimizer"):
                if not has_update:  # else `confirmed_update` confirms, when that costs no wait
                    sums.confirm()
                result = original(*args, **kwargs)
                sums.confirm()  # if the optimizer skipped its update, `confirmed_update` did not
            waited_s = inner_s() - before_s
            sink.record_stage("optimizer", time.perf_counter() - start_s - waited_s)
            success, grad_norm = True, None
            if isinstance(result, tuple):  # Megatron's: (success, grad_norm, num_zeros)
                success, grad_norm = bool(result[0]), result[1]
                if grad_norm is not None:  # with Transformer Engine a tensor on the GPU
                    grad_norm = float(grad_norm)
            end(success, grad_norm)
            return result

        def confirmed_update(update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            sums.confirm()
            return update(*args, **kwargs)

        self._wrapped = [WrappedMethod(optimizer, "step", step)]
        if has_update:
            self._wrapped.append(WrappedMethod(optimizer, UPDATE, confirmed_update))

    def close(self) -> None:
        """Restores the optimizer's own methods."""
        for wrapped in self._wrapped:
            wrapped.close()
