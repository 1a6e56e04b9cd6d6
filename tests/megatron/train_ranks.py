"""One harness for trainings of small GPTs: builds, attaches, steps, detaches, keeps the records.

`train_ranks` starts the ranks. In each of them `running` makes a model of `SmallGPT`, or in one of
Megatron's layouts of `ParallelGPT`, with the plugin if options are given; `train` takes steps too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_sparse.megatron import cpu_mode
from megatron_sparse.megatron.small_gpt import SmallGPT, SmallGPTConfig
from tests.megatron.parallel_gpt import Layout, ParallelGPT, parallel_state_of
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


def in_each_layout(
    layouts: Mapping[str, Layout], report: Callable[..., Any], *arguments: Any
) -> dict[str, Any]:
    """Calls a function for each layout, in Megatron's process groups for it; by name."""
    found = {}
    for name, layout in layouts.items():
        with parallel_state_of(layout):
            found[name] = report(layout, *arguments)
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
        """Of each stage."""
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
    """A model on this rank, with the plugin or without.

    Attributes:
        model: `SmallGPT` or `ParallelGPT`.
        attachment: None without the plugin.
        records: of the plugin.
        losses: of the steps taken by `step`.
    """

    def __init__(self, setting: SmallGPTConfig | Layout, options: Mapping[str, Any]) -> None:
        from megatron_sparse.megatron import attach

        self.records, self.losses = Records(), []
        self.model: Any
        if isinstance(setting, Layout):
            self.model = ParallelGPT(setting)
            chunks = self.model.chunks
        else:
            self.model = SmallGPT(setting)
            chunks = [self.model.ddp]
        self.attachment: Any = None
        if options:
            self.attachment = attach(
                chunks, self.model.optimizer, sink=self.records, **dict(options)
            )

    def step(self) -> Any:
        """One training step; its result. The loss is kept."""
        result = self.model.step()
        self.losses.append(result[0] if isinstance(result, tuple) else result)
        return result

    def residuals(self) -> dict[str, torch.Tensor]:
        """Copies, by parameter; empty without the plugin."""
        if self.attachment is None:
            return {}
        return {name: view.clone() for name, view in self.attachment.residuals.by_parameter()}


@contextmanager
def running(setting: SmallGPTConfig | Layout, **options: Any) -> Iterator[Run]:
    """A run, detached at the end of the block.

    Args:
        setting: of the model; a `Layout` within `parallel_state_of` it.
        options: of `attach`; none leaves the plugin out.
    """
    run = Run(setting, options)
    try:
        yield run
    finally:
        if run.attachment is not None:
            from megatron_sparse.megatron import detach

            detach(run.attachment)


def train(setting: SmallGPTConfig | Layout, steps: int, **options: Any) -> dict[str, Any]:
    """Takes steps. Returns losses, weights, residuals, records, and the model."""
    with running(setting, **options) as run:
        for _ in range(steps):
            run.step()
        return {
            "losses": run.losses,
            "weights": run.model.weights(),
            "residuals": run.residuals(),
            "records": run.records,
            "model": run.model,
        }


def equal(first: Mapping[Any, torch.Tensor], second: Mapping[Any, torch.Tensor]) -> bool:
    """Whether both have the same keys with the same tensors, bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def poison(model: Any, rank: int, value: float, *, whole: bool = True) -> None:
    """The next backward pass of rank 1 leaves `value` in one gradient: all over it, or once."""
    if rank != 1:
        return
    parameter = next(p for p in model.ddp.parameters() if p.dim() == 2)

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        spoilt = gradient.clone()
        (spoilt if whole else spoilt.view(-1)[:1]).fill_(value)
        return spoilt

    handle = parameter.register_hook(spoil)


def loss_scale(run: Run) -> float:
    """Of the run's optimizer."""
    return float(run.model.optimizer.get_loss_scale())


def spoilt_step(
    setting: SmallGPTConfig, options: Mapping[str, Any], rank: int, value: float, *, whole: bool
) -> dict[str, Any]:
    """One good step and one with a spoilt gradient, with the plugin and without.

    Returns:
        `taken`, `nan` and `scales`: the second step's result, NaN among the weights, and the loss
        scale, each with the plugin and without; of the plugin whether the residual is `finite` and
        `restored`, whether the `weights kept` their bits, and a third step's result: `goes on`.
    """
    with running(setting) as plain, running(setting, **options) as run:
        for each in (plain, run):
            each.step()
        before, weights, scale = run.residuals(), run.model.weights(), loss_scale(run)
        for each in (plain, run):
            poison(each.model, rank, value, whole=whole)
        taken = run.step()[1], plain.step()[1]
        after, factor = run.residuals(), loss_scale(run) / scale
        return {
            "taken": taken,
            "nan": (run.model.weights().isnan(), plain.model.weights().isnan()),
            "scales": (loss_scale(run), loss_scale(plain)),
            "finite": all(view.isfinite().all() for view in after.values()),
            "restored": equal({name: view * factor for name, view in before.items()}, after),
            "weights kept": torch.equal(weights, run.model.weights()),
            "goes on": run.step()[1],
        }


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
