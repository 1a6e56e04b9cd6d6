"""Averages the training loss that Megatron logs, beside the backward pass.

Megatron's `train_step` all-reduces sums of losses and numbers of tokens after the optimizer step,
and the next iteration waits for it: with two sites for more than a round trip.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model


class LoggedLoss:
    """Averages the losses of one iteration over micro-batches and data-parallel ranks.

    The values are those of Megatron's own reduction, to the bit.

    Args:
        forward_step: Megatron's `forward_step_func`: returns an output and its loss function.
        model: the chunks that `train_step` trains.
    """

    def __init__(self, forward_step: Callable[..., Any], model: list[Any]) -> None:
        self._forward_step = forward_step
        groups: Any = get_attr_wrapped_model(model[0], "pg_collection")
        if groups is None:
            groups = ProcessGroupCollection.use_mpu_process_groups(["dp_cp"])
        self._group = groups.dp_cp
        self._micro_batches: list[dict[str, torch.Tensor]] = []  # what each one logs
        self._averages: dict[str, torch.Tensor] = {}

    def forward_step(self, *args: Any, **kwargs: Any) -> tuple[Any, Callable[..., Any]]:
        """Megatron's forward step, with a loss function that returns averages for the log."""
        output, loss_function = self._forward_step(*args, **kwargs)
        return output, partial(self._loss, loss_function)

    def _loss(self, loss_function: Callable[..., Any], output: Any, **kwargs: Any) -> Any:
        """The loss function's results; (sum, tokens) in its log become averages.

        Other results stay as they are, for Megatron.
        """
        results = loss_function(output, **kwargs)
        if not isinstance(results, tuple) or len(results) != 3:
            return results
        loss, n_tokens, logged = results
        if not loss.requires_grad or any(value.numel() != 2 for value in logged.values()):
            return results  # in another form, or without a backward pass to end the all-reduces
        return loss, n_tokens, self._add(loss, logged)

    def _add(self, loss: torch.Tensor, logged: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Adds a micro-batch; an iteration's last one starts the all-reduces.

        Args:
            loss: the micro-batch's; the last one's backward pass waits at its end for the sums.
            logged: (sum of losses, number of tokens) of the micro-batch by name, fp32.

        Returns:
            What the micro-batch logs, by name. For the first one the averages, of shape (1,), which
            have their values when the last backward pass has ended. For the others tensors of shape
            (0,): Megatron concatenates the tensors of all micro-batches, and logs the mean.
        """
        if not self._micro_batches:
            self._averages = {
                name: torch.empty_like(pair.view(-1)[:1]) for name, pair in logged.items()
            }
            returned = self._averages
        else:
            returned = {name: average[:0] for name, average in self._averages.items()}
        self._micro_batches.append(logged)
        if len(self._micro_batches) == get_num_microbatches():
            ends = [
                self._reduce([batch[name] for batch in self._micro_batches], average)
                for name, average in self._averages.items()
            ]
            self._micro_batches = []

            def end_with_backward(_: torch.Tensor) -> None:
                for end in ends:
                    torch.autograd.Variable._execution_engine.queue_callback(end)

            loss.register_hook(end_with_backward)  # runs as the pass begins, each `end` as it ends
        return returned

    def _reduce(self, pairs: list[torch.Tensor], average: torch.Tensor) -> Callable[[], None]:
        """Starts an all-reduce; returns a function that waits for it and writes `average`."""
        total = torch.vstack([pair.view(-1) for pair in pairs]).sum(dim=0)
        work: Any = torch.distributed.all_reduce(total, group=self._group, async_op=True)

        def end() -> None:
            work.wait()
            average.copy_(total[:1] / total[1:])

        return end
