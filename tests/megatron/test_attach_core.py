"""The plugin on megatron.core, 2 gloo ranks: overlap x distributed optimizer x scheme."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_sparse.megatron.small_gpt import SmallGPTConfig
from tests.megatron.train_ranks import (
    AT_TARGET,
    SPARSE,
    equal,
    poison,
    running,
    spoilt_step,
    train,
    train_ranks,
)

STEPS = 5
COMBINATIONS = list(itertools.product((False, True), (False, True)))


def _matrix(rank):
    results = {}
    for overlap, distributed in COMBINATIONS:
        setting = SmallGPTConfig(overlap=overlap, distributed_optimizer=distributed)
        warmup = {"scheme": "agsparse", "value_bits": None, "warmup_iters": 100, "ramp_iters": 0}
        runs = {
            "megatron": (STEPS, {}),
            "dense": (STEPS, {"scheme": "dense", **AT_TARGET}),
            "warmup": (STEPS, warmup),
            "whole": (STEPS, SPARSE | {"density": 1.0}),
            "sparse": (STEPS, SPARSE),
            "again": (STEPS, SPARSE),
            "one": (1, SPARSE),
            "bf16 wire": (STEPS, SPARSE | {"wire_dtype": "bf16"}),
        }
        results[overlap, distributed] = {}
        for name, (steps, options) in runs.items():
            run = train(setting, steps, **options)
            found = run["losses"], run["weights"], run["residuals"]
            results[overlap, distributed][name] = found
    return results


@pytest.fixture(scope="module")
def matrix():
    return train_ranks(_matrix, 2)


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
            assert equal(first[2], again[2])


@pytest.mark.parametrize("distributed", [False, True])
def test_selection_is_the_same_with_overlap_on_and_off(matrix, distributed):
    """threshold_scope=parameter: the cut into buckets does not change the selection.

    One step, because with the distributed optimizer Megatron itself adds up the gradient norm in
    another order when the buckets change, and the weights of later steps differ in the last bit.
    """
    off, on = matrix[0][False, distributed]["one"], matrix[0][True, distributed]["one"]
    assert off[0] == on[0]
    assert equal(off[2], on[2])


def _events(rank):
    """Skipped and repeated steps, NaN, the running switch, detach."""
    report = {("skip", distributed): _skip(rank, distributed) for distributed in (False, True)}

    # fp32 without a NaN check: the NaN is sent, as by Megatron.
    with running(SmallGPTConfig(), **SPARSE) as run:
        poison(run.model, rank, float("nan"))
        run.step()
        report["nan travels"] = bool(run.model.weights().isnan().any())
        report["residual finite"] = all(v.isfinite().all() for v in run.residuals().values())

    # A repeated step: same gradients and residual, as if the first had not happened.
    with running(SmallGPTConfig(), undo="always", **SPARSE) as run:
        run.step()
        tokens, found = run.model.batch(), []
        for _ in range(2):
            run.model.gradients(tokens)
            gradients = {b.name: b.grad_N.clone() for b in run.attachment.buckets}
            found.append((gradients, run.residuals()))
        report["repeat"] = all(map(equal, *found))
        run.model.optimizer.step()
        # The switch: the next step sends everything and empties the residual.
        run.attachment.enabled = False
        run.step()
        report["emptied"] = not any(v.any() for v in run.residuals().values())
        run.attachment.enabled = True
        run.step()
        report["refilled"] = any(v.any() for v in run.residuals().values())
    report["detached"] = "step" not in run.model.optimizer.__dict__ and run.step()[1]
    report |= _change_density(rank)
    report["trials"] = _try_presets()

    # Without an undo copy a repeated synchronisation is an error, not a wrong residual.
    with running(SmallGPTConfig(), **SPARSE) as run:
        run.step()
        run.model.gradients(run.model.batch())
        try:
            run.model.gradients(run.model.batch())
        except Exception as error:
            report["no undo"] = f"{type(error).__name__}: {error}"
    return report


def _skip(rank, distributed):
    """fp16: an Inf in one rank's gradient skips the step on every rank and leaves the residual."""
    setting = SmallGPTConfig(fp16=True, distributed_optimizer=distributed)
    return spoilt_step(setting, SPARSE, rank, float("inf"), whole=True)


def _change_density(rank):
    """What is sent before and after `set_density`, and the error of ranks that disagree."""
    with running(SmallGPTConfig(), **SPARSE) as run:
        run.step()
        try:
            run.attachment.set_density(0.1 + 0.1 * rank)
        except Exception as error:
            density = run.attachment.config.compression.density
            disagree = f"{type(error).__name__}: {error}", density
        run.attachment.set_density(0.25)
        run.step()
    return {"disagree": disagree, "densities": _by_step(run.records.buckets)}


def _try_presets():
    """What `density=auto` has run by step, what it took, and the state that a checkpoint keeps."""
    with running(SmallGPTConfig(), config="auto", warmup_iters=2, ramp_iters=2) as run:
        for _ in range(30):
            run.step()
        phases = {r.step: (str(r.phase), r.density) for r in run.records.buckets}
        state = run.attachment.trials.state_dict()
        try:
            run.attachment.set_density(0.1)
        except Exception as error:
            refused = str(error)
        sent = sum(r.nnz for r in run.records.buckets if r.step == 29)
    with running(SmallGPTConfig(), config="auto") as again:
        again.attachment.trials.load_state_dict(state, 30)
        goes_on = again.attachment.trials.chosen
    return phases, state, refused, sent, goes_on


def _by_step(records):
    """By step, the densities asked for and the fraction of all elements that was sent."""
    found = {}
    for step in {r.step for r in records}:
        of_step = [r for r in records if r.step == step]
        sent = sum(r.nnz for r in of_step) / sum(r.numel for r in of_step)
        found[step] = {r.density for r in of_step}, sent
    return found


@pytest.fixture(scope="module")
def events():
    return train_ranks(_events, 2)


@pytest.mark.parametrize("distributed", [False, True])
def test_an_overflow_in_one_rank_skips_the_step_everywhere_and_restores_the_residual(
    events, distributed
):
    for report in events:
        skip = report["skip", distributed]
        assert skip["taken"] == (False, False)
        assert skip["weights kept"]
        assert skip["restored"]
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


def test_presets_are_tried_and_every_rank_takes_the_same(events):
    (phases, state, refused, sent, goes_on), other = (report["trials"] for report in events)
    assert (phases, state) == other[:2]
    assert phases[10] == ("trial", 0.22)
    # The others were tried unless the one before took too long.
    tried = list(state["times_ms"])
    assert tried == ["safe", "quantised", "lossless"][: len(tried)]
    assert len(tried) > 1
    best_ms = min(state["times_ms"].values())
    assert state["times_ms"][state["chosen"]] <= 1.02 * best_ms
    ended = {"lossless": ("off", 1.0), "quantised": ("target", 1.0), "safe": ("target", 0.22)}
    assert phases[29] == ended[state["chosen"]]
    assert sent
    assert "name a density at the start" in refused
    assert goes_on == state["chosen"]
