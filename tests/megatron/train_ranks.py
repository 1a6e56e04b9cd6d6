"""One harness for trainings of small GPTs: builds, attaches, steps, detaches, keeps the records.

`train_ranks` starts the ranks. In each of them `running` makes a model in one of Megatron's
layouts, with the plugin if options are given; `train` takes steps too.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_sparse.megatron import cpu_mode
from tests import ranks
from tests.megatron.parallel_gpt import Layout, ParallelGPT
from tests.ranks import MEGATRON, run_ranks
from tests.records import Kept
from tests.waiting import DEADLINE_S

AT_TARGET = {"value_bits": None, "warmup_iters": 0, "ramp_iters": 0, "keep_below_numel": 256}
"""Prunes from the first step on, and few enough parameters are kept whole for a small model."""
SPARSE = AT_TARGET | {"density": 0.05, "scheme": "agsparse"}


def train_ranks(
    body: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = DEADLINE_S
) -> list[Any]:
    """`run_ranks` in the CPU mode; the function is called with the rank and `arguments`."""
    return run_ranks(
        _in_cpu_mode, world_size, body, *arguments, timeout_s=timeout_s, imported=MEGATRON
    )


def _in_cpu_mode(rank: int, world_size: int, body: Callable[..., Any], *arguments: Any) -> Any:
    cpu_mode.enable()
    return body(rank, *arguments)


on_ranks = partial(ranks.on_ranks, before=cpu_mode.enable, imported=MEGATRON)
"""`tests.ranks.on_ranks` in the CPU mode."""


def of_all_ranks(value: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@contextmanager
def logged(level: int = logging.INFO) -> Iterator[list[str]]:
    """What the plugin logs in the block, from this level on."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("megatron_sparse")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


class Records(Kept):
    """Keeps everything, and adds up seconds and bytes."""

    @property
    def seconds(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for stage, seconds in self.stages:
            found[stage] = found.get(stage, 0.0) + seconds
        return found

    @property
    def wire_bytes(self) -> float:
        """What this rank sent for gradients."""
        return sum(record.wire_bytes for record in self.buckets)

    @property
    def dense_bytes(self) -> float:
        """What it would have sent without compression."""
        return sum(record.dense_bytes for record in self.buckets)


class Run:
    """A model on this rank, with the plugin or without (`attachment` is then None).

    `losses` are those of the steps taken by `step`.
    """

    def __init__(self, layout: Layout, options: Mapping[str, Any]) -> None:
        from megatron_sparse.megatron import attach

        self.records, self.losses = Records(), []
        self.model = ParallelGPT(layout)
        self.attachment: Any = None
        if options:
            self.attachment = attach(
                self.model.chunks, self.model.optimizer, sink=self.records, **dict(options)
            )

    def step(self) -> bool:
        """One training step; whether it was taken. The loss is kept."""
        loss, taken = self.model.step()
        self.losses.append(loss)
        return taken

    def residuals(self) -> dict[str, torch.Tensor]:
        """Copies, by parameter; empty without the plugin."""
        if self.attachment is None:
            return {}
        return {name: view.clone() for (name, _), view in self.attachment.residuals.slices()}

    def total_residuals(self) -> dict[str, torch.Tensor]:
        """Each parameter's residual, added up over all ranks that hold the parameter.

        In fp64: exact for sums of two fp32 numbers.
        """
        from megatron_sparse.megatron.checkpoint_layout import data_parallel_group

        whole, ranks = {}, {}
        for group in self.attachment.groups:
            for piece in (each for bucket in group.buckets for each in bucket.parameters):
                whole[piece.name] = torch.zeros(piece.numel, dtype=torch.float64)
                ranks[piece.name] = data_parallel_group(group.expert)
        for (name, start), view in self.attachment.residuals.slices():
            whole[name][start : start + view.numel()] += view
        for name, values in whole.items():
            dist.all_reduce(values, group=ranks[name])
        return whole


@contextmanager
def running(layout: Layout, **options: Any) -> Iterator[Run]:
    """A run, detached at the end of the block; without `options` of `attach` it has no plugin.

    Within `parallel_state_of` the layout, unless it has no model parallelism.
    """
    run = Run(layout, options)
    try:
        yield run
    finally:
        if run.attachment is not None:
            from megatron_sparse.megatron import detach

            detach(run.attachment)


def train(layout: Layout, steps: int, **options: Any) -> dict[str, Any]:
    """Takes steps. Returns losses, weights, residuals, records, and the model.

    With the plugin also the memory that it holds and its account, in bytes, the lines of its start,
    and the elements of all buckets.
    """
    with running(layout, **options) as run:
        for _ in range(steps):
            run.step()
        found = {
            "losses": run.losses,
            "weights": run.model.weights(),
            "residuals": run.residuals(),
            "records": run.records,
            "model": run.model,
        }
        if run.attachment is not None:
            found |= {
                "memory": run.attachment.memory_report(),
                "lines": run.attachment.lines,
                "numel": sum(bucket.numel for bucket in run.attachment.buckets),
            }
        return found


def equal(first: Mapping[Any, torch.Tensor], second: Mapping[Any, torch.Tensor]) -> bool:
    """Whether both have the same keys with the same tensors, bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


@contextmanager
def installed_plugin(iterations: int, **options: Any) -> Iterator[Any]:
    """`install` for a training of so many iterations, without dashboards; closed at the end."""
    cpu_mode.enable_training()
    from megatron_sparse.megatron import install, plugin

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin, "get_args", lambda: SimpleNamespace(train_iters=iterations))
        patch.setattr(plugin, "get_tensorboard_writer", lambda: None)
        patch.setattr(plugin, "get_wandb_writer", lambda: None)
        installed = install(**options)
        try:
            yield installed
        finally:
            installed.close()
