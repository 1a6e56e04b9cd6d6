"""Wraps an optimizer's step: sums are confirmed before any parameter changes.

In capacity mode on CUDA, Megatron's `finish_grad_sync` returns when a bucket's work is on a stream;
the reports that say whether the sum is right come to the host later. Megatron's optimizers prepare
the gradients in `step`, read their norm on the host, and change parameters in
`step_with_ready_grads`. The plugin reads the reports right before that: once the norm has been read
they are there, so the host does not wait. For an optimizer without that method it reads them before
`step`.
"""

from __future__ import annotations

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
    """The optimizers that Megatron has chained to one, however they are nested; else it alone."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        return [optimizer]
    return [part for inner in chained for part in parts_of(inner)]


def clips_gradients(optimizer: Any) -> bool:
    """Whether Megatron clips the sum. A norm does not say so: chained optimizers always tell it."""
    configs = (getattr(part, "config", None) for part in parts_of(optimizer))
    return any(getattr(config, "clip_grad", 0.0) > 0.0 for config in configs)


class WrappedMethod:
    """A method that is wrapped on its object, until `close`.

    Others wrap it too, before or after: learning-rate schedulers, another attachment.

    Args:
        owner: has the method.
        name: of the method.
        wrapper: called in place of it, with the former method before its arguments.
    """

    def __init__(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        self._before = vars(owner).get(name)  # None: the class's own
        original = getattr(owner, name)
        self._called: Callable[..., Any] = functools.partial(wrapper, original)

        @functools.wraps(original)  # with the mark that torch's schedulers look for
        def method(_: Any, *args: Any, **kwargs: Any) -> Any:
            return self._called(*args, **kwargs)

        # Bound, because torch's schedulers wrap its `__func__`.
        self._original, self._method = original, MethodType(method, owner)
        setattr(owner, name, self._method)

    def close(self) -> None:
        """Puts the former method back; under a later wrapper, only passes calls on from now on."""
        self._called = self._original
        if vars(self._owner).get(self._name) is not self._method:
            return
        if self._before is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)


class UnconfirmedSums:
    """The step's buckets that are on a stream, but whose reports have not been read."""

    def __init__(self) -> None:
        self._pending: dict[str, Pending] = {}

    def add(self, pending: Pending) -> None:
        """Takes a bucket over. One that comes again belongs to a new step: reads the last first.

        Raises:
            MegatronSparseError: see `confirm`.
        """
        if pending.name in self._pending:
            self.confirm()
        self._pending[pending.name] = pending

    def confirm(self) -> None:
        """Reads all reports; the host waits for those that have not come.

        Raises:
            MegatronSparseError: a bucket was not synchronised; no parameter may be changed.
        """
        waiting, self._pending = self._pending, {}
        for pending in waiting.values():
            pending.confirm()


class WatchedOptimizer:
    """An optimizer whose `step` is wrapped, until `close`.

    Args:
        optimizer: Megatron's, or any object with `step`.
        sums: confirmed before parameters change.
        sink: receives the seconds of each step.
        end: called after each step with whether it was accepted, and the gradient's norm if known.
        inner_s: a clock that runs while the thread waits inside the step for something that is
            recorded as a stage of its own.
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
        self._optimizer = optimizer
        has_update = hasattr(optimizer, UPDATE)

        def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            """The original step, with sums confirmed, timed and reported to `end`."""
            start_s, before_s = time.perf_counter(), inner_s()
            with marked("optimizer"):
                if not has_update:  # else `confirmed_update` does it, later
                    sums.confirm()
                result = original(*args, **kwargs)
                sums.confirm()  # not yet, if the optimizer skipped its update
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
        self._optimizer.__dict__.pop("sharded_state_dict", None)  # of `checkpoint.save_with`
