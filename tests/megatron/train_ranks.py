"""One harness for trainings of small GPTs: builds, attaches, steps, detaches, keeps the records.

`train_ranks` starts the ranks. In each of them `running` makes a model of `SmallGPT`, or in one of
Megatron's layouts of `ParallelGPT`, with the plugin if options are given; `train` takes steps too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from megatron_sparse.megatron import cpu_mode
from megatron_sparse.megatron.small_gpt import SmallGPT, SmallGPTConfig
from megatron_sparse.recording import BucketRecord, GatherRecord, NullSink
from tests.megatron.parallel_gpt import Layout, ParallelGPT, parallel_state_of
from tests.ranks import run_ranks
from tests.waiting import DEADLINE_S

AT_TARGET = {"value_bits": None, "warmup_iters": 0, "ramp_iters": 0, "keep_below_numel": 256}
"""Prunes from the first step on, and few enough parameters are kept whole for a small model."""


def train_ranks(
    body: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = DEADLINE_S
) -> list[Any]:
    """`run_ranks` in the CPU mode; the function is called with the rank and `arguments`."""
    return run_ranks(_in_cpu_mode, world_size, body, *arguments, timeout_s=timeout_s)


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


class Records(NullSink):
    """Keeps every record, and adds up the seconds of the stages."""

    def __init__(self) -> None:
        self.buckets: list[BucketRecord] = []
        self.gathers: list[GatherRecord] = []
        self.seconds: dict[str, float] = {}

    def record_bucket(self, record: BucketRecord) -> None:
        """See `RecordSink`."""
        self.buckets.append(record)

    def record_gather(self, record: GatherRecord) -> None:
        """See `RecordSink`."""
        self.gathers.append(record)

    def record_stage(self, stage: str, seconds: float) -> None:
        """See `RecordSink`."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

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
