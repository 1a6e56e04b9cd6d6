"""fp32, bf16 and fp16 with loss scaling: overflows, repeats, scales and tokens that vary.

docs/precision.md has the table of these tests.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed as dist

from megatron_sparse.errors import ConfigError
from megatron_sparse.megatron.small_gpt import SmallGPTConfig
from megatron_sparse.transport.membership import NODE_VARIABLE
from tests.doc_tables import untrue_rows
from tests.megatron.train_ranks import (
    SPARSE,
    equal,
    loss_scale,
    poison,
    running,
    spoilt_step,
    train_ranks,
)

TIMEOUT_S = 500.0
"""A test machine may be many times slower than a quiet one."""
SMALL = {"layers": 1, "hidden": 32, "sequence": 16, "micro_batch": 2}
PRECISIONS = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}
INJECTIONS = list(itertools.product(PRECISIONS, ("nan", "inf"), ("one", "all")))
CHECKED = list(itertools.product(("fp32", "bf16"), ("nan", "inf")))
COUNTS = ((16, 4), (3, 5), (12, 16), (1, 2), (16, 16), (0, 0), (13, 7), (8, 7))
"""Tokens of each sequence that count, by step and rank; of four ranks two have the same."""
FEW = (1, 3, 5)
"""Steps with less than half of the tokens of the step before."""
AT_NODE = {"level": "node"}


def _running(attached=True, plugin=None, **setting):
    options = SPARSE | (plugin or {}) if attached else {}
    return running(SmallGPTConfig(**SMALL | setting), **options)


def _inject(rank, precision, value, extent):
    setting = PRECISIONS[precision] | {"distributed_optimizer": precision == "bf16"}
    whole = extent == "all"
    return spoilt_step(SmallGPTConfig(**SMALL | setting), SPARSE, rank, float(value), whole=whole)


def _checked(rank, precision, value):
    """Megatron's own check of each rank's gradient, which raises before anything is sent.

    Only the rank with the spoilt gradient runs, as the other would wait for it.
    """
    setting, errors = PRECISIONS[precision] | {"check_for_nan": True}, []
    with _running(attached=False, **setting) as plain, _running(**setting) as run:
        run.step()
        before = run.residuals()
        for model in (plain.model, run.model):
            poison(model, rank, float(value), whole=False)
            if rank == 1:
                with pytest.raises(RuntimeError, match="in local grad norm") as raised:
                    model.gradients(model.batch())
                errors.append(str(raised.value))
        report = {"errors": errors, "intact": equal(before, run.residuals())}
        dist.barrier()
    return report


def _growth():
    """The loss scale doubles after two good steps; the residual is as it was, in the new unit."""
    with _running(fp16=True, loss_scale_window=2) as run:
        run.step()
        run.model.gradients(run.model.batch())
        before, scale = run.residuals(), loss_scale(run)
        run.model.optimizer.step()
        factor = loss_scale(run) / scale
        scaled = {name: view * factor for name, view in before.items()}
        return {
            "factor": factor,
            "rescaled": equal(scaled, run.residuals()),
            "unscaled": run.attachment.residual_norm() * run.attachment.unit.loss_scale,
            "norm": float(run.attachment.residuals.norm()),
        }


def _rerun_step(model, rank, reject):
    """One step as Megatron's loop takes it; returns how often the gradients were computed."""
    from megatron.core.rerun_state_machine import RerunDataIterator, get_rerun_state_machine

    machine = get_rerun_state_machine()
    iterator = RerunDataIterator(iter([model.batch()]))
    runs = 0
    while machine.should_run_forward_backward(iterator):
        loss = model.gradients(next(iterator))
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


def _rerun(rank, plugin=None):
    """Three steps in Megatron's rerun mode, the second of them repeated, or none."""
    from megatron.core import rerun_state_machine as rerun

    results = []
    for repeated in (None, 1):
        rerun.destroy_rerun_state_machine()
        rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.VALIDATE_RESULTS)
        with _running(plugin=plugin) as run:
            runs = [_rerun_step(run.model, rank, step == repeated) for step in range(3)]
            results.append((runs, run.model.weights(), run.residuals()))
    rerun.destroy_rerun_state_machine()
    return results


def _sum(tensors):
    """One fp64 vector of all tensors, added up over the ranks."""
    flat = torch.cat([tensor.double().view(-1) for tensor in tensors])
    dist.all_reduce(flat)
    return flat


def _per_token_step(model, attachment, n_tokens):
    """One step whose loss counts `n_tokens` of each sequence.

    Returns, in units of the averaged gradient: the old residuals, the gradients, Megatron's result,
    and the new residuals.
    """
    from megatron.core.distributed import finalize_model_grads

    computed = {}
    launch = attachment.launch

    def remember(group):
        computed.update({bucket.name: bucket.grad_N.clone() for bucket in group.buckets})
        return launch(group)

    attachment.launch = remember
    unit, old = attachment.unit.gradient_factor, _residual_by_bucket(attachment)
    model.ddp.zero_grad_buffer()
    model.optimizer.zero_grad()
    tokens = model.batch()
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    losses = model.ddp(tokens, positions, mask, labels=tokens).float()
    losses[:, :n_tokens].sum().backward()
    count = torch.tensor(n_tokens * tokens.shape[0])
    finalize_model_grads([model.ddp], num_tokens=count)
    del attachment.launch
    got = torch.cat([bucket.grad_N.double() for bucket in attachment.buckets])
    model.optimizer.step()
    factor = 1.0 / max(float(count), 1.0)  # to which Megatron has added the other ranks' tokens
    return {
        "old": _sum(old) * (0.0 if unit is None else float(unit)),
        "old, unit ignored": _sum(old) * factor,
        "computed": _sum([computed[bucket.name] for bucket in attachment.buckets]) * factor,
        "got": got,
        "new": _sum(_residual_by_bucket(attachment)) * factor,
    }


def _residual_by_bucket(attachment):
    """At level `node` a rank holds a part of each, which stands in its place here."""
    result = []
    for group in attachment.groups:
        for bucket in group.buckets:
            part = attachment.reducer(group).part(bucket)
            values_M, whole_N = attachment.residuals.settled(part), torch.zeros_like(bucket.grad_N)
            starts = {each.name: each.start for each in bucket.parameters}
            for each in part.parameters if values_M is not None else ():
                start = starts[each.name] + each.offset
                stop = start + each.stop - each.start
                whole_N[start:stop] = values_M[each.start : each.stop]
            result.append(whole_N)
    return result


def _per_token_steps(rank, overlap, plugin=None):
    """A report of each step, and the state at the end."""
    setting = {"overlap": overlap, "bucket_size": 8_000, "loss_per_token": True}
    with _running(plugin=plugin, **setting) as run:
        attachment = run.attachment
        reports = [_per_token_step(run.model, attachment, counts[rank % 2]) for counts in COUNTS]
        state = attachment.residuals.undo, float(attachment.unit.gradient_factor)
    return reports, (*state, "scale_gradients" not in vars(run.model.ddp))


def _per_token(rank):
    from megatron_sparse.megatron import attach

    reports = {}
    for overlap in (False, True):
        reports[overlap], reports["state"] = _per_token_steps(rank, overlap)
    with (
        _running(attached=False, loss_per_token=True) as run,
        pytest.raises(ConfigError) as refused,
    ):
        attach(run.model.ddp, config=None, **SPARSE)
    reports["no optimizer"] = str(refused.value)
    return reports


def _on_two_nodes(rank):
    os.environ[NODE_VARIABLE] = str(rank // 2)
    with _running(plugin=AT_NODE) as run:
        lines = run.attachment.lines
    return {
        "lines": lines,
        "rerun": _rerun(rank, AT_NODE),
        "per token": {
            overlap: _per_token_steps(rank, overlap, AT_NODE)[0] for overlap in (False, True)
        },
    }


def _all(rank):
    return {
        "injected": {case: _inject(rank, *case) for case in INJECTIONS},
        "checked": {case: _checked(rank, *case) for case in CHECKED},
        "growth": _growth(),
        "rerun": _rerun(rank),
        "per token": _per_token(rank),
    }


@pytest.fixture(scope="module")
def ranks():
    return train_ranks(_all, 2, timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def nodes():
    """Four ranks, two on each node."""
    return train_ranks(_on_two_nodes, 4, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("case", [case for case in INJECTIONS if case[0] == "fp16"])
def test_with_loss_scaling_every_rank_skips_the_step_and_restores_the_residual(ranks, case):
    for rank in ranks:
        report = rank["injected"][case]
        assert report["taken"] == (False, False)
        assert report["scales"][0] == report["scales"][1]
        assert report["weights kept"]
        assert report["restored"]


@pytest.mark.parametrize("case", [case for case in INJECTIONS if case[0] != "fp16"])
def test_without_loss_scaling_the_same_weights_become_nan_as_without_the_plugin(ranks, case):
    for rank in ranks:
        report = rank["injected"][case]
        assert report["taken"] == (True, True)
        assert report["nan"][1].any()
        assert torch.equal(*report["nan"])
        assert report["finite"]


@pytest.mark.parametrize("case", CHECKED)
def test_megatrons_check_of_each_gradient_raises_its_own_error(ranks, case):
    assert ranks[0]["checked"][case]["errors"] == []
    plain, plugin = ranks[1]["checked"][case]["errors"]
    assert plugin == plain
    assert f"found {'NaN' if case[1] == 'nan' else 'Inf'}" in plain
    assert all(rank["checked"][case]["intact"] for rank in ranks)


def test_the_residual_follows_a_loss_scale_that_grows(ranks):
    for rank in ranks:
        assert rank["growth"]["factor"] == 2.0
        assert rank["growth"]["rescaled"]


def test_the_alarm_compares_norms_without_the_loss_scale(ranks):
    for rank in ranks:
        # The scale is a power of two: exact.
        assert rank["growth"]["unscaled"] == rank["growth"]["norm"] > 0


def test_the_four_ranks_compress_per_node(nodes):
    for rank in nodes:
        assert any("level node: 2 nodes of 2 ranks" in line for line in rank["lines"])


@pytest.mark.parametrize("group", ["ranks", "nodes"])
def test_rerun_mode_does_not_update_the_residual_twice(group, request):
    for rank in request.getfixturevalue(group):
        (once, weights, residuals), (repeated, weights_too, residuals_too) = rank["rerun"]
        assert once == [1, 1, 1]
        assert repeated == [1, 2, 1]
        assert torch.equal(weights, weights_too)
        assert equal(residuals, residuals_too)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("group", ["ranks", "nodes"])
def test_with_a_loss_per_token_nothing_is_lost_when_the_number_of_tokens_changes(
    group, overlap, request
):
    """Old residuals + gradients = Megatron's result + new residuals, each in its own unit."""
    for rank in request.getfixturevalue(group):
        for step, report in enumerate(rank["per token"][overlap]):
            error = report["old"] + report["computed"] - report["got"] - report["new"]
            largest = float(max(report[name].abs().max() for name in ("computed", "old")))
            # Each of a dozen fp32 operations rounds by at most 6e-8 of the largest value in it.
            assert float(error.abs().max()) < 1e-6 * largest
            if step:
                ignored = float((report["old, unit ignored"] - report["old"]).abs().max())
                assert ignored > 1e-3 * largest


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("group", ["ranks", "nodes"])
def test_a_step_with_few_tokens_is_that_of_its_gradients_alone(group, overlap, request):
    """Residuals of earlier steps would count as many times as there are fewer tokens."""
    for rank in request.getfixturevalue(group):
        for step in FEW:
            report = rank["per token"][overlap][step]
            largest = float(max(report[name].abs().max() for name in ("computed", "old")))
            for sent, expected in (("got", "computed"), ("new", "old")):
                error = float((report[sent] - report[expected]).abs().max())
                assert error < 1e-6 * largest, (step, sent)  # as above


def test_a_loss_per_token_keeps_undo_copies_and_its_factor(ranks):
    for rank in ranks:
        undo, factor, detached = rank["per token"]["state"]
        assert undo is True
        assert factor == pytest.approx(1 / (2 * sum(COUNTS[-1])), rel=1e-6)  # fp32
        assert detached


def test_a_loss_per_token_without_the_optimizer_is_refused(ranks):
    assert all("needs the optimizer" in rank["per token"]["no optimizer"] for rank in ranks)


@pytest.mark.parametrize("page", ["docs/precision.md", "docs/checkpoints.md"])
def test_every_row_of_the_documentation_names_a_test_that_exists(page):
    assert untrue_rows(page) == []
