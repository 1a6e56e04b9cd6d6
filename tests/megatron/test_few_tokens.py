"""A loss per token while the number of tokens varies, also from step to step to few and to none.

Learning rates are zero, so that Megatron alone sees the same gradients.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from megatron_sparse.megatron.units import ResidualUnit
from megatron_sparse.transport.membership import NODE_VARIABLE
from tests.megatron.parallel_gpt import OVERLAP, SHARDED, Layout, parallel_state_of
from tests.megatron.test_parallel import AT_TARGET, SPARSE, WORLD_SIZE
from tests.megatron.train_ranks import equal, of_all_ranks, on_ranks, running

COUNTS = ((16, 4), (3, 5), (12, 16), (1, 2), (16, 16), (0, 0), (13, 7), (8, 7))
"""Tokens of each sequence that count, by step and data-parallel rank, modulo 2."""
FEW = (1, 3, 5)
"""Steps with less than half of the tokens of the step before."""
LAYOUTS = {
    "tied": Layout(pipeline=2, tied=True, microbatches=2, per_token=True, ddp=OVERLAP),
    "tied_shards": Layout(pipeline=2, tied=True, per_token=True, ddp=SHARDED | OVERLAP),
    "instances": Layout(instances=2, per_token=True, ddp=SHARDED),
    "experts": Layout(expert=2, experts=4, per_token=True, ddp=OVERLAP),
}
"""Where the second sum of a step with few tokens crosses more than one group."""


def _steps(layout, total=False, **plugin):
    """Each step's norm, gradients and residuals, with `total` those of all ranks; by parameter.

    All are in units of the gradient that Megatron's optimizer sees.
    """
    from megatron.core import parallel_state

    steps = []
    with running(layout, **(AT_TARGET | plugin if plugin else {})) as run:
        for group in run.model.optimizer.param_groups:
            group["lr"] = 0.0
        for of_ranks in COUNTS:
            run.model.counted = of_ranks[parallel_state.get_data_parallel_rank() % 2]
            run.model.gradients()
            gradients = {
                name: parameter.main_grad.clone()
                for chunk in run.model.chunks
                for name, parameter in chunk.module.named_parameters()
            }
            step = {"gradients": gradients, "norm": run.model.optimizer.step()[1]}
            if plugin:
                step["unit"] = run.attachment.unit.of_gradient()
                held = run.total_residuals() if total else run.residuals()
                step["residuals"] = {name: view * step["unit"] for name, view in held.items()}
                step["lines"] = run.attachment.lines
                assert run.attachment.residuals.undo is True
            steps.append(step)
    assert not any("scale_gradients" in vars(chunk) for chunk in run.model.chunks)
    return steps


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks(WORLD_SIZE)
def test_few_tokens_have_megatrons_gradient_and_leave_residuals_alone(rank, name):
    layout = LAYOUTS[name]
    leak = 0.5 if name == "experts" else 1.0  # both are exact in fp32
    with parallel_state_of(layout):
        plain, sparse = _steps(layout), _steps(layout, **SPARSE, level="rank", leak=leak)
    assert sparse[2]["norm"] != pytest.approx(plain[2]["norm"], rel=1e-3)  # it is pruned
    assert any(residual.any() for residual in sparse[2]["residuals"].values())
    for step in FEW:
        # Two ranks' residuals of about the gradient's size are added and taken away again.
        assert sparse[step]["norm"] == pytest.approx(plain[step]["norm"], rel=1e-5, abs=1e-5)
        if name == "tied":
            for parameter, expected in plain[step]["gradients"].items():
                got = sparse[step]["gradients"][parameter]
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        for parameter, residual in sparse[step]["residuals"].items():
            before = sparse[step - 1]["residuals"][parameter]
            torch.testing.assert_close(residual, before, rtol=1e-5, atol=1e-6)
    for step in (6, 7):
        # In the unit of the step without tokens, residuals would count hundreds of times.
        assert sparse[step]["norm"] < 10 * plain[step]["norm"]


@on_ranks(WORLD_SIZE)
def test_few_tokens_leave_copies_of_a_norm_with_the_same_gradient(rank):
    """With sequence parallelism each tensor-parallel rank has the gradient of some tokens.

    In few bits a norm is sent in bf16, which leaves a residual.
    """
    layout = Layout(tensor=2, sequence_parallel=True, per_token=True)
    with parallel_state_of(layout):
        plain = _steps(layout)
        sparse = _steps(layout, **SPARSE, value_bits=4, level="rank")
    norms = [name for name in plain[0]["gradients"] if "norm" in name]
    for step in FEW:
        rounded = any(sparse[step]["residuals"][name].any() for name in norms)
        assert any(of_all_ranks(rounded))  # some ranks' tokens may all be out of the loss
        found = {name: sparse[step]["gradients"][name] for name in norms}
        for name, gradient in found.items():
            expected = plain[step]["gradients"][name]
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)  # fp32 sums
        assert all(equal(found, other) for other in of_all_ranks(found))


@on_ranks(2)
def test_few_tokens_have_megatrons_gradient_in_fp32_copies_of_it(rank):
    """The optimizer reads the copies alone, which Megatron has made before it knows the tokens."""
    patterns = {"param_name_patterns_for_fp32_local_accumulation": ("*weight",)}
    layout = Layout(precision="bf16", per_token=True, ddp=patterns)
    with parallel_state_of(layout):
        plain, sparse = _steps(layout), _steps(layout, total=True, **SPARSE, level="rank")
    for step in FEW:
        for name, expected in plain[step]["gradients"].items():
            assert (expected.dtype == torch.float32) is name.endswith("weight")
            old = sparse[step - 1]["residuals"][name] / sparse[step - 1]["unit"]
            sent = expected.abs().max() + (old * sparse[step]["unit"]).abs().max()
            # Both runs' sums are rounded to bf16, each by up to 2^-8 of its value.
            error = 2**-7 * float(sent)
            got = sparse[step]["gradients"][name]
            torch.testing.assert_close(got, expected, rtol=0, atol=error)


def test_gradients_are_summed_over_tensor_parallel_ranks_where_megatron_sums_them():
    from megatron_sparse.megatron.replica_sums import replica_sums

    module = torch.nn.ModuleDict(
        {name: torch.nn.Linear(1, 1, bias=False) for name in ("norm", "q_layernorm", "mean", "mlp")}
    )
    vars(module["norm"].weight)["sequence_parallel"] = True
    vars(module["mean"].weight)["average_gradients_across_tp_domain"] = True
    tensor = SimpleNamespace(size=lambda: 2)

    def found(**config):
        chunk = SimpleNamespace(module=module, config=SimpleNamespace(**config), tp_group=tensor)
        names = {parameter: name for name, parameter in module.named_parameters()}
        return {names[each.parameter]: each.op.name for each in replica_sums([chunk])}

    always = {"mean.weight": "AVG"}
    assert found(sequence_parallel=False, qk_layernorm=False) == always
    assert found(sequence_parallel=True, qk_layernorm=False) == always | {"norm.weight": "SUM"}
    assert found(sequence_parallel=False, qk_layernorm=True) == always | {
        "q_layernorm.weight": "SUM"
    }


@pytest.mark.parametrize(("level", "ranks"), [("rank", 2), ("node", 4)], ids=["rank", "node"])
@on_ranks("ranks")
def test_with_a_loss_per_token_nothing_is_lost_when_the_number_of_tokens_changes(
    rank, level, ranks
):
    """Old residuals + gradients = Megatron's result + new residuals, each in its own unit.

    A step with few tokens is that of its gradients alone: residuals of earlier steps would count as
    many times as there are fewer tokens. At level `node` two of four ranks are on each node.
    """
    os.environ[NODE_VARIABLE] = str(rank // 2)
    for ddp in ({}, OVERLAP):
        layout = Layout(per_token=True, ddp=ddp)
        with parallel_state_of(layout):
            plain = _steps(layout)
            sparse = _steps(layout, total=True, **SPARSE, level=level)
        said = any("level node: 2 nodes of 2 ranks" in line for line in sparse[0]["lines"])
        assert said is (level == "node")
        _assert_nothing_is_lost(plain, sparse)
        assert sparse[-1]["unit"] == pytest.approx(1 / (ranks * sum(COUNTS[-1])), rel=1e-6)  # fp32


def _assert_nothing_is_lost(plain, sparse):
    """Of all ranks' sums; Megatron alone has the gradients of each step."""

    def flat(tensors):
        return torch.cat([tensors[name].double().view(-1) for name in sorted(tensors)])

    old, unit = torch.zeros(()), None
    for number, (alone, step) in enumerate(zip(plain, sparse, strict=True)):
        computed, got, new = map(flat, (alone["gradients"], step["gradients"], step["residuals"]))
        largest = float(max(values.abs().max() for values in (computed, old)))
        # Each of a dozen fp32 operations rounds by at most 6e-8 of the largest value in it.
        error = 1e-6 * largest
        assert float((old + computed - got - new).abs().max()) < error, number
        if unit is not None:
            unit_ignored = old * (step["unit"] / unit)
            assert float((unit_ignored - old).abs().max()) > 1e-3 * largest
        if number in FEW:
            assert float((got - computed).abs().max()) < error, number
            assert float((new - old).abs().max()) < error, number
        old, unit = new, step["unit"]


def test_the_factor_of_a_skipped_step_does_not_count():
    unit = ResidualUnit([], lambda: None)
    for factor, accepted in ((0.5, True), (0.125, False), (0.25, True)):
        unit._new_factor = torch.tensor(factor)
        change = unit.end_step(accepted)
    assert float(change) == 2.0
