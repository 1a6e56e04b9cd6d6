"""fp32, bf16 and fp16 with loss scaling: overflows, repeats and scales.

docs/precision.md has the table of these tests.
"""

import itertools
import os

import pytest
import torch
import torch.distributed as dist

from megatron_sparse.transport.membership import NODE_VARIABLE
from tests.megatron.parallel_gpt import IN_FP32, SHARDED, Layout
from tests.megatron.train_ranks import SPARSE, equal, on_ranks, running

TIMEOUT_S = 500.0
"""A test machine may be many times slower than a quiet one."""
SCALE = {"initial_loss_scale": 2.0**10}


def _running(attached=True, level="rank", **layout):
    options = SPARSE | {"level": level} if attached else {}
    return running(Layout(layers=1, **layout), **options)


def _rerun_step(model, rank, reject):
    """One step as Megatron's loop takes it; returns how often the gradients were computed."""
    from megatron.core.rerun_state_machine import RerunDataIterator, get_rerun_state_machine

    machine = get_rerun_state_machine()
    iterator = RerunDataIterator(iter([model.batches()]))
    runs = 0
    while machine.should_run_forward_backward(iterator):
        loss = torch.tensor(model.gradients(next(iterator)))
        machine.validate_result(
            result=loss,
            rejection_func=lambda _: reject and rank == 1,
            message="test",
            tolerance=0.0,
            fatal=False,
        )
        runs += 1
    machine.should_checkpoint_and_exit()
    model.optimizer.step()
    return runs


INJECTIONS = [*itertools.product(("nan", "inf"), (False, True))]
"""The value, and whether the whole gradient has it."""


def _poison(model, rank, value, *, whole):
    """The next backward pass of rank 1 leaves `value` in one gradient: all over it, or once."""
    if rank != 1:
        return
    parameter = next(p for p in model.chunks[0].parameters() if p.dim() == 2)

    def spoil(gradient):
        handle.remove()
        spoilt = gradient.clone()
        (spoilt if whole else spoilt.view(-1)[:1]).fill_(value)
        return spoilt

    handle = parameter.register_hook(spoil)


def _loss_scale(run):
    return float(run.model.optimizer.get_loss_scale())


def _spoilt_steps(rank, **layout):
    """For each injection, a run without the plugin and one with it, before such a step."""
    for value, whole in INJECTIONS:
        with _running(attached=False, **layout) as plain, _running(**layout) as run:
            for each in (plain, run):
                each.step()
                _poison(each.model, rank, float(value), whole=whole)
            yield plain, run


STATIC = {"loss_scale": 128.0}
SCALED = {
    "fp16": {"precision": "fp16", "ddp": IN_FP32, "optimizing": SCALE},
    "fp16_shards": {"precision": "fp16", "ddp": IN_FP32 | SHARDED, "optimizing": SCALE},
    "bf16_static": {"precision": "bf16", "ddp": IN_FP32, "optimizing": STATIC},
    "fp32_static_shards": {"ddp": SHARDED, "optimizing": STATIC},
}
"""Settings with which Megatron scales the loss."""


@pytest.mark.parametrize("name", SCALED)
@on_ranks(2)
def test_with_loss_scaling_every_rank_skips_the_step_and_restores_the_residual(rank, name):
    for plain, run in _spoilt_steps(rank, **SCALED[name]):
        assert run.attachment.unit.loss_scale == _loss_scale(run) > 1
        before, weights, scale = run.residuals(), run.model.weights(), _loss_scale(run)
        assert (run.step(), plain.step()) == (False, False)
        assert _loss_scale(run) == _loss_scale(plain)
        assert equal(weights, run.model.weights())
        factor = _loss_scale(run) / scale
        assert equal({name: view * factor for name, view in before.items()}, run.residuals())
        assert run.step() is True


@pytest.mark.parametrize(
    ("precision", "ddp"), [("fp32", {}), ("bf16", IN_FP32 | SHARDED)], ids=["fp32", "bf16"]
)
@on_ranks(2)
def test_without_loss_scaling_the_same_weights_become_nan_as_without_the_plugin(
    rank, precision, ddp
):
    for plain, run in _spoilt_steps(rank, precision=precision, ddp=ddp):
        assert (run.step(), plain.step()) == (True, True)
        found, expected = (
            {name: weight.isnan() for name, weight in each.model.weights().items()}
            for each in (run, plain)
        )
        assert any(nans.any() for nans in expected.values())
        assert equal(found, expected)
        assert all(view.isfinite().all() for view in run.residuals().values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_ranks(2)
def test_megatrons_check_of_each_gradient_raises_its_own_error(rank, precision):
    """Before anything is sent.

    Only the rank with the spoilt gradient runs, as the other would wait for it.
    """
    layout = {"precision": precision, "ddp": IN_FP32 | {"check_for_nan_in_grad": True}}
    for value, named in (("nan", "NaN"), ("inf", "Inf")):
        with _running(attached=False, **layout) as plain, _running(**layout) as run:
            run.step()
            before, errors = run.residuals(), set()
            for model in (plain.model, run.model) if rank == 1 else ():
                _poison(model, rank, float(value), whole=False)
                with pytest.raises(
                    RuntimeError, match=f"found {named} in local grad norm"
                ) as raised:
                    model.gradients()
                errors.add(str(raised.value))
            assert len(errors) == rank, "the same with the plugin and without"
            assert equal(before, run.residuals())
            dist.barrier()


@on_ranks(2)
def test_the_residual_follows_a_loss_scale_that_grows(rank):
    """The loss scale doubles after two good steps; the residual is as it was, in the new unit."""
    growing = SCALE | {"loss_scale_window": 2}
    with _running(precision="fp16", ddp=IN_FP32, optimizing=growing) as run:
        run.step()
        run.model.gradients()
        before, scale = run.residuals(), _loss_scale(run)
        run.model.optimizer.step()
        assert _loss_scale(run) == 2 * scale
        assert equal({name: 2 * view for name, view in before.items()}, run.residuals())
        # The norm is told without the scale, a power of two: exact.
        unscaled = run.attachment.residual_norm() * run.attachment.unit.loss_scale
        assert unscaled == float(run.attachment.residuals.norm()) > 0


@pytest.mark.parametrize(("level", "ranks"), [("rank", 2), ("node", 4)], ids=["rank", "node"])
@on_ranks("ranks", timeout_s=TIMEOUT_S)
def test_rerun_mode_does_not_update_the_residual_twice(rank, level, ranks):
    """Three steps in Megatron's rerun mode, the second of them repeated, or none.

    At level `node` two of four ranks are on each node.
    """
    from megatron.core import rerun_state_machine as rerun

    os.environ[NODE_VARIABLE] = str(rank // 2)
    found = []
    for repeated in (None, 1):
        rerun.destroy_rerun_state_machine()
        rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.VALIDATE_RESULTS)
        with _running(level=level) as run:
            said = any("level node: 2 nodes of 2 ranks" in line for line in run.attachment.lines)
            assert said is (level == "node")
            runs = [_rerun_step(run.model, rank, step == repeated) for step in range(3)]
            assert runs == [1, 1 if repeated is None else 2, 1]
            found.append(run.model.weights() | run.residuals())
    assert equal(*found)
