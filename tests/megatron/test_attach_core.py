"""The plugin on megatron.core, 2 gloo ranks: overlap x distributed optimizer x scheme."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_sparse.megatron import cpu_mode
from megatron_sparse.megatron.small_gpt import SmallGPTConfig
from megatron_sparse.recording import NullSink
from tests.ranks import run_ranks

STEPS = 5
COMBINATIONS = list(itertools.product((False, True), (False, True)))
AT_TARGET = {"value_bits": None, "warmup_iters": 0, "ramp_iters": 0, "keep_below_numel": 256}


def _train(setting, steps=STEPS, **plugin):
    from megatron_sparse.megatron import attach, detach
    from megatron_sparse.megatron.small_gpt import SmallGPT

    toy = SmallGPT(setting)
    attachment = attach(toy.ddp, toy.optimizer, **plugin) if plugin else None
    losses = [toy.step()[0] for _ in range(steps)]
    weights = toy.weights()
    residual = None
    if attachment is not None:
        residual = dict(attachment.residuals.by_parameter())
        residual = {name: value.clone() for name, value in residual.items()}
        detach(attachment)
    return losses, weights, residual


def _matrix(rank, world_size):
    cpu_mode.enable()
    results = {}
    for overlap, distributed in COMBINATIONS:
        setting = SmallGPTConfig(overlap=overlap, distributed_optimizer=distributed)
        runs = {
            "megatron": _train(setting),
            "dense": _train(setting, scheme="dense", **AT_TARGET),
            "warmup": _train(
                setting, scheme="agsparse", value_bits=None, warmup_iters=100, ramp_iters=0
            ),
            "whole": _train(setting, scheme="agsparse", density=1.0, **AT_TARGET),
            "sparse": _train(setting, scheme="agsparse", density=0.05, **AT_TARGET),
            "again": _train(setting, scheme="agsparse", density=0.05, **AT_TARGET),
            "one": _train(setting, steps=1, scheme="agsparse", density=0.05, **AT_TARGET),
            "bf16 wire": _train(
                setting, scheme="agsparse", density=0.05, wire_dtype="bf16", **AT_TARGET
            ),
        }
        results[overlap, distributed] = runs
    return results


@pytest.fixture(scope="module")
def matrix():
    return run_ranks(_matrix, 2, timeout_s=280)


@pytest.mark.parametrize("combination", COMBINATIONS)
class TestMatrix:
    """One training of every kind for each combination of overlap and distributed optimizer."""

    def test_dense_is_bit_for_bit_megatron(self, matrix, combination):
        for rank in matrix:
            losses, weights, _ = rank[combination]["megatron"]
            for kind in ("dense", "warmup"):
                assert rank[combination][kind][0] == losses
                assert torch.equal(rank[combination][kind][1], weights)

    def test_density_one_is_megatron_up_to_the_order_of_addition(self, matrix, combination):
        for rank in matrix:
            expected = torch.tensor(rank[combination]["megatron"][0])
            got = torch.tensor(rank[combination]["whole"][0])
            # With 2 ranks fp32 addition commutes, so gradients agree to the bit; 1e-6 leaves room
            # for a backend that adds in another order.
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)

    def test_sparse_training_learns_and_keeps_ranks_identical(self, matrix, combination):
        for kind in ("sparse", "bf16 wire"):
            losses, weights, residual = matrix[0][combination][kind]
            assert losses[-1] < losses[0]
            assert torch.equal(weights, matrix[1][combination][kind][1])
            assert sum(float(value.abs().sum()) for value in residual.values()) > 0

    def test_a_repeated_run_is_bit_exact(self, matrix, combination):
        for rank in matrix:
            first, again = rank[combination]["sparse"], rank[combination]["again"]
            assert first[0] == again[0]
            assert all(torch.equal(first[2][name], again[2][name]) for name in first[2])


@pytest.mark.parametrize("distributed", [False, True])
def test_selection_is_the_same_with_overlap_on_and_off(matrix, distributed):
    """threshold_scope=parameter: the cut into buckets does not change the selection.

    One step, because with the distributed optimizer Megatron itself adds up the gradient norm in
    another order when the buckets change, and the weights of later steps differ in the last bit.
    """
    off, on = matrix[0][False, distributed]["one"], matrix[0][True, distributed]["one"]
    assert off[0] == on[0]
    assert off[2].keys() == on[2].keys()
    assert all(torch.equal(off[2][name], on[2][name]) for name in off[2])


def _events(rank, world_size):
    """Skipped and repeated steps, NaN, the running switch, detach."""
    cpu_mode.enable()
    from megatron_sparse.megatron import attach, detach
    from megatron_sparse.megatron.small_gpt import SmallGPT, SmallGPTConfig

    report = {}

    def snapshot(attachment):
        return {n: v.clone() for n, v in attachment.residuals.by_parameter()}

    # fp16: an Inf in one rank's gradient skips the step on every rank and leaves the residual.
    for distributed in (False, True):
        plain = SmallGPT(SmallGPTConfig(fp16=True, distributed_optimizer=distributed))
        toy = SmallGPT(SmallGPTConfig(fp16=True, distributed_optimizer=distributed))
        attachment = attach(toy.ddp, toy.optimizer, density=0.05, scheme="agsparse", **AT_TARGET)
        toy.step(), plain.step()
        before, weights = snapshot(attachment), toy.weights()
        scale = float(toy.optimizer.get_loss_scale())
        for model in (toy, plain):
            _poison(model, rank, float("inf"))
        taken, plain_taken = toy.step()[1], plain.step()[1]
        after = snapshot(attachment)
        new_scale = float(toy.optimizer.get_loss_scale())
        factor = new_scale / scale
        report["skip", distributed] = {
            "taken": taken,
            "plain_taken": plain_taken,
            "weights same": torch.equal(weights, toy.weights()),
            "residual same": all(torch.equal(before[n] * factor, after[n]) for n in before),
            "scales": (new_scale, float(plain.optimizer.get_loss_scale())),
            "goes on": toy.step()[1],
        }
        detach(attachment)

    # fp32 without a NaN check: the NaN is sent, as by Megatron.
    toy = SmallGPT(SmallGPTConfig())
    attachment = attach(toy.ddp, toy.optimizer, density=0.05, scheme="agsparse", **AT_TARGET)
    _poison(toy, rank, float("nan"))
    toy.step()
    report["nan travels"] = bool(toy.weights().isnan().any())
    report["residual finite"] = all(v.isfinite().all() for v in snapshot(attachment).values())
    detach(attachment)

    # A repeated step: same gradients and residual, as if the first had not happened.
    toy = SmallGPT(SmallGPTConfig())
    attachment = attach(
        toy.ddp, toy.optimizer, density=0.05, scheme="agsparse", undo="always", **AT_TARGET
    )
    toy.step()
    tokens = toy.batch()
    toy.gradients(tokens)
    once = [b.grad_N.clone() for b in attachment.buckets], snapshot(attachment)
    toy.gradients(tokens)
    twice = [b.grad_N.clone() for b in attachment.buckets], snapshot(attachment)
    report["repeat"] = all(map(torch.equal, once[0], twice[0])) and all(
        torch.equal(once[1][n], twice[1][n]) for n in once[1]
    )
    toy.optimizer.step()
    # The switch: the next step sends everything and empties the residual.
    attachment.enabled = False
    toy.step()
    report["emptied"] = all(not v.any() for v in snapshot(attachment).values())
    attachment.enabled = True
    toy.step()
    report["refilled"] = any(v.any() for v in snapshot(attachment).values())
    detach(attachment)
    report |= _change_density(rank)
    report["detached"] = "step" not in toy.optimizer.__dict__ and toy.step()[1]

    # Without an undo copy a repeated synchronisation is an error, not a wrong residual.
    toy = SmallGPT(SmallGPTConfig())
    attachment = attach(toy.ddp, toy.optimizer, density=0.05, scheme="agsparse", **AT_TARGET)
    toy.step()
    toy.gradients(toy.batch())
    try:
        toy.gradients(toy.batch())
    except Exception as error:
        report["no undo"] = f"{type(error).__name__}: {error}"
    detach(attachment)
    return report


def _change_density(rank):
    """What is sent before and after `set_density`, and the error of ranks that disagree."""
    from megatron_sparse.megatron import attach, detach
    from megatron_sparse.megatron.small_gpt import SmallGPT

    records = Records()
    toy = SmallGPT(SmallGPTConfig())
    attachment = attach(
        toy.ddp, toy.optimizer, sink=records, density=0.05, scheme="agsparse", **AT_TARGET
    )
    toy.step()
    try:
        attachment.set_density(0.1 + 0.1 * rank)
    except Exception as error:
        disagree = f"{type(error).__name__}: {error}", attachment.config.compression.density
    attachment.set_density(0.25)
    toy.step()
    detach(attachment)
    return {"disagree": disagree, "densities": records.by_step()}


def _poison(toy, rank, value):
    """The next backward pass of rank 1 leaves `value` in one gradient."""
    if rank != 1:
        return
    parameter = next(p for p in toy.ddp.parameters() if p.dim() == 2)
    handle = parameter.register_hook(lambda grad: (handle.remove(), grad.fill_(value))[1])


class Records(NullSink):
    """Keeps each bucket's record."""

    def __init__(self):
        self.records = []

    def record_bucket(self, record):
        self.records.append(record)

    def by_step(self):
        """By step, the densities asked for and the fraction of all elements that was sent."""
        found = {}
        for step in {r.step for r in self.records}:
            of_step = [r for r in self.records if r.step == step]
            sent = sum(r.nnz for r in of_step) / sum(r.numel for r in of_step)
            found[step] = {r.density for r in of_step}, sent
        return found


@pytest.fixture(scope="module")
def events():
    return run_ranks(_events, 2, timeout_s=200)


@pytest.mark.parametrize("distributed", [False, True])
def test_an_overflow_in_one_rank_skips_the_step_everywhere_and_restores_the_residual(
    events, distributed
):
    for report in events:
        skip = report["skip", distributed]
        assert skip["taken"] is False
        assert skip["plain_taken"] is False
        assert skip["weights same"]
        assert skip["residual same"]
        assert skip["scales"][0] == skip["scales"][1]
        assert skip["goes on"] is True


def test_nan_travels_and_the_residual_stays_finite(events):
    assert all(report["nan travels"] and report["residual finite"] for report in events)


def test_a_repeated_step_does_not_update_the_residual_twice(events):
    assert all(report["repeat"] for report in events)


def test_a_repeat_without_undo_copy_is_a_typed_error(events):
    for report in events:
        assert report["no undo"].startswith("SelectionError")
        assert "compression.undo=always" in report["no undo"]


def test_the_running_switch_empties_the_residual_and_detach_restores_megatron(events):
    for report in events:
        assert report["emptied"]
        assert report["refilled"]
        assert report["detached"]


def test_set_density_holds_from_the_next_step_on(events):
    for report in events:
        (asked_first, sent_first), (asked, sent) = report["densities"].values()
        assert (asked_first, asked) == ({0.05}, {0.25})
        assert sent > 2 * sent_first


def test_ranks_that_disagree_about_the_density_change_nothing(events):
    for report in events:
        error, density = report["disagree"]
        assert error.startswith("CommunicationError: ranks want different densities")
        assert "rank 0: 0.1, rank 1: 0.2" in error
        assert density == 0.05
