"""No parameter changes before the step's sums are known to be right."""

from typing import Any, cast

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from megatron_sparse.errors import WireFormatError
from megatron_sparse.megatron.bucket_group import Handle
from megatron_sparse.megatron.optimizer_step import UnconfirmedSums, WatchedOptimizer
from megatron_sparse.recording import NullSink
from megatron_sparse.reduction.job import Pending
from tests.records import Kept


class Sum:
    """A bucket that is on a stream; `confirm` reads its report."""

    def __init__(self, log: list[str], name: str = "b", *, is_bad: bool = False) -> None:
        self.name = name
        self._log = log
        self._is_bad = is_bad

    def wait_until_queued(self) -> None:
        self._log.append(f"{self.name} on stream")

    def confirm(self) -> None:
        self._log.append(f"{self.name} read")
        if self._is_bad:
            raise WireFormatError("a bad record", expected="a good one", got="another")


class PlainOptimizer:
    """One of torch's."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def step(self) -> None:
        self._log.append("update")


class MegatronOptimizer:
    """Prepares, reads the norm, then updates; as Megatron's do."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.skips = False

    def step(self) -> tuple[bool, torch.Tensor, int]:
        self._log.append("norm")
        norm = torch.tensor([1.0])  # with Transformer Engine it is no float
        return not self.skips and self.step_with_ready_grads(), norm, 0

    def step_with_ready_grads(self) -> bool:
        self._log.append("update")
        return True


def watched(optimizer: Any, sums: UnconfirmedSums, log: list[str]) -> WatchedOptimizer:
    return WatchedOptimizer(
        optimizer,
        sums,
        NullSink(),
        end=lambda success, norm: log.append(f"end {success} {norm}"),
        inner_s=lambda: 0.0,
    )


def test_waits_inside_the_step_are_no_part_of_its_stage() -> None:
    clock, sink, optimizer = iter([1.0, 6.0]), Kept(), PlainOptimizer([])
    WatchedOptimizer(
        optimizer, UnconfirmedSums(), sink, end=lambda *_: None, inner_s=lambda: next(clock)
    )
    optimizer.step()
    ((stage, seconds),) = sink.stages
    assert stage == "optimizer"
    assert -5.0 <= seconds < -4.0, "5 s of waiting were taken off a step of no time"


def finish_grad_sync(sums: UnconfirmedSums | None, *pending: Sum) -> None:
    """Megatron's wait for a bucket group."""
    then = sums.add if sums is not None else lambda each: each.confirm()
    Handle(cast("list[Pending]", list(pending)), then).wait()


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        (PlainOptimizer, ["b read", "update", "end True None"]),
        (MegatronOptimizer, ["norm", "b read", "update", "end True 1.0"]),
    ],
)
def test_sums_are_confirmed_right_before_parameters_change(kind: type, steps: list[str]) -> None:
    log, sums = [], UnconfirmedSums()
    optimizer = kind(log)
    watch = watched(optimizer, sums, log)
    finish_grad_sync(sums, Sum(log))
    assert log == ["b on stream"], "the host waits for no report"
    optimizer.step()
    assert log[1:] == steps
    watch.close()
    assert not vars(optimizer).keys() & {"step", "step_with_ready_grads"}


def test_other_wrappers_of_the_step_stay_whatever_is_closed_first() -> None:
    """A scheduler of torch's marks the step that it has wrapped, and looks for the mark."""
    log, sums = [], UnconfirmedSums()
    optimizer: Any = MegatronOptimizer(log)
    own = optimizer.step

    def scheduled() -> Any:
        return own()

    scheduled.is_marked = True
    optimizer.step = scheduled
    first, second = (watched(optimizer, sums, log) for _ in range(2))
    assert optimizer.step.is_marked
    for watch, ends in ((None, 2), (first, 1), (second, 0)):
        if watch is not None:
            watch.close()
        log.clear()
        optimizer.step()
        assert log == ["norm", "update", *["end True 1.0"] * ends]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("comes_first", [True, False])
def test_schedulers_of_torchs_may_come_before_and_after(comes_first: bool) -> None:
    log, optimizer = [], SGD([torch.zeros(1, requires_grad=True)])
    schedulers = [LambdaLR(optimizer, lambda _: 1.0)] if comes_first else []
    watch = watched(optimizer, UnconfirmedSums(), log)
    schedulers.append(LambdaLR(optimizer, lambda _: 1.0))
    for _ in range(2):
        optimizer.step()
        schedulers[0].step()
        watch.close()
    assert log == ["end True None"]


@pytest.mark.parametrize("kind", [PlainOptimizer, MegatronOptimizer])
def test_no_step_is_taken_on_a_bad_sum(kind: type) -> None:
    log, sums = [], UnconfirmedSums()
    optimizer = kind(log)
    watched(optimizer, sums, log)
    finish_grad_sync(sums, Sum(log, "a"), Sum(log, "b", is_bad=True))
    with pytest.raises(WireFormatError, match="a bad record"):
        optimizer.step()
    assert "update" not in log
    assert not any(line.startswith("end") for line in log), "the step is not accepted"


def test_a_skipped_update_confirms_too() -> None:
    log, sums = [], UnconfirmedSums()
    optimizer = MegatronOptimizer(log)
    optimizer.skips = True
    watched(optimizer, sums, log)
    finish_grad_sync(sums, Sum(log))
    optimizer.step()
    assert log == ["b on stream", "norm", "b read", "end False 1.0"]


def test_without_an_optimizer_the_handle_confirms() -> None:
    log: list[str] = []
    finish_grad_sync(None, Sum(log))
    assert log == ["b on stream", "b read"]


def test_a_bucket_that_comes_again_without_a_step_is_confirmed_first() -> None:
    log, sums = [], UnconfirmedSums()
    for _ in range(2):
        finish_grad_sync(sums, Sum(log, "a"), Sum(log, "b"))
    assert log[:5] == ["a on stream", "b on stream", "a on stream", "a read", "b read"]
    sums.confirm()
    assert log[-2:] == ["a read", "b read"]
    sums.confirm()
    assert log.count("a read") == 2


def test_megatrons_optimizers_have_the_method() -> None:
    from megatron.core.optimizer import optimizer as host

    for name in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer"):
        assert callable(getattr(host, name).step_with_ready_grads)
