"""Exact gathers of parameters in Megatron's layouts, 4 gloo ranks: Megatron's own bits."""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.config.parameters import ParametersConfig
from megatron_sparse.errors import ConfigError
from tests.megatron.parallel_gpt import OVERLAP, SHARDED, Layout, ParallelGPT, parallel_state_of
from tests.megatron.train_ranks import in_each_layout, running, train_ranks

WORLD_SIZE = 4
STEPS, LOADED = 6, 3
MANY_STEPS = 200
BOTH = SHARDED | OVERLAP | {"overlap_param_gather": True}

LAYOUTS = {
    "bf16": Layout(precision="bf16", ddp=SHARDED),
    "bf16_overlapped": Layout(precision="bf16", microbatches=2, ddp=BOTH),
    "fp32": Layout(ddp=SHARDED),
    "fp16_overlapped": Layout(precision="fp16", ddp=BOTH),
    "tensor": Layout(tensor=2, precision="bf16", ddp=BOTH),
    "pipeline": Layout(pipeline=2, precision="bf16", microbatches=2, ddp=BOTH),
    "expert": Layout(expert=2, experts=4, precision="bf16", ddp=BOTH),
    "instances": Layout(instances=2, precision="bf16", ddp=SHARDED),
    "muon_layer_wise": Layout(optimizer="muon", layer_wise=True, precision="bf16", ddp=BOTH),
}
SLOW = {
    "fp32_overlapped": Layout(ddp=BOTH),
    "fp16": Layout(precision="fp16", ddp=SHARDED),
    "virtual_pipeline": Layout(
        pipeline=2, virtual=2, layers=4, precision="bf16", microbatches=2, ddp=BOTH
    ),
    "instances_expert": Layout(
        instances=2, expert=2, experts=4, precision="bf16", ddp=SHARDED | OVERLAP
    ),
}
EXACT = ParametersConfig("exact", "rans", verify_every=1)


def _train(layout, parameters=None, steps=STEPS):
    """Losses, and the parameters after the forward pass of each step, and at the end."""
    seen, losses, saved = [], [], None
    options = {} if parameters is None else {"scheme": "dense", "parameters": parameters}
    with running(layout, **options) as run:
        model = run.model
        for step in range(steps):
            losses.append(model.gradients())
            # Without a gather of its own: what the forward pass has gathered.
            seen.append(_held(model))
            model.optimizer.step()
            if step == 1:
                saved = [_state(chunk) for chunk in model.chunks]
            if step == LOADED:
                # As an evaluation does, before other parameters are loaded: a second gather.
                model.weights()
                model.weights()
                for chunk, state in zip(model.chunks, saved, strict=True):
                    chunk.load_state_dict(state)
        seen.append(model.weights())
        memory = {} if run.attachment is None else run.attachment.memory_report()
    return {"losses": losses, "seen": seen, "records": run.records, "memory": memory}


def _held(model):
    return {
        f"{number}.{name}": parameter.detach().clone()
        for number, chunk in enumerate(model.chunks)
        for name, parameter in chunk.module.named_parameters()
    }


def _state(chunk):
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in chunk.state_dict().items()
    }


def _differing(one, other):
    return [
        (step, name)
        for step, (mine, theirs) in enumerate(zip(one["seen"], other["seen"], strict=True))
        for name, value in mine.items()
        if not torch.equal(value, theirs[name])
    ]


def _report(layout, steps=STEPS):
    plain, exact = _train(layout, steps=steps), _train(layout, EXACT, steps=steps)
    records = exact["records"].gathers
    own = plain["seen"]
    return {
        "losses": (plain["losses"], exact["losses"]),
        "differing": _differing(plain, exact),
        "moved": sum(not torch.equal(own[1][n], value) for n, value in own[-1].items()),
        "unmoved": all(torch.equal(own[1][n], value) for n, value in own[0].items()),
        "methods": {
            name: [record.method for record in records if record.bucket == name]
            for name in {record.bucket for record in records}
        },
        "bytes": [(r.method, r.wire_bytes, r.dense_bytes) for r in records],
        "seconds": exact["records"].seconds,
        "memory": exact["memory"],
    }


def _raw(layout):
    """Megatron's own gather under the plugin is timed and counted too."""
    run = _train(layout, ParametersConfig("raw"))
    records = run["records"]
    return [(r.method, r.wire_bytes, r.dense_bytes) for r in records.gathers], records.seconds


def _refusals(rank):
    from megatron_sparse.megatron import attach

    found = {}
    for name, ddp, optimizer in (("sharded", {}, True), ("optimizer", SHARDED, False)):
        model = ParallelGPT(Layout(ddp=ddp))
        given = model.optimizer if optimizer else None
        with pytest.raises(ConfigError) as caught:
            attach(model.chunks, given, scheme="dense", parameters=EXACT)
        found[name] = str(caught.value)
    return found


def _disagreeing(rank):
    from megatron_sparse.errors import CommunicationError
    from megatron_sparse.megatron import attach

    model = ParallelGPT(Layout(ddp=SHARDED))
    parameters = ParametersConfig("exact", "packed" if rank == 2 else "rans")
    with pytest.raises(CommunicationError) as caught:
        attach(model.chunks, model.optimizer, scheme="dense", parameters=parameters)
    return str(caught.value)


def _switched(layout):
    """`enabled` off for two steps: Megatron's own gather, then raw, then exact again."""
    with running(layout, scheme="dense", parameters=EXACT) as run:
        for enabled in (True, True, False, False, True, True):
            run.attachment.enabled = enabled
            run.step()
    return [record.method for record in run.records.gathers]


def _matrix(rank):
    reports = in_each_layout(LAYOUTS, _report)
    with parallel_state_of(LAYOUTS["bf16"]):
        reports["raw"] = [_raw(LAYOUTS[name]) for name in ("bf16", "bf16_overlapped")]
        reports["refusals"] = _refusals(rank)
        reports["switched"] = _switched(LAYOUTS["bf16"])
        reports["disagreeing"] = _disagreeing(rank)
    return reports


@pytest.fixture(scope="module")
def matrix():
    return train_ranks(_matrix, WORLD_SIZE, timeout_s=400)


# The fixture trains every layout on four ranks, which takes a busy machine minutes.
pytestmark = pytest.mark.timeout(600)
each_layout = pytest.mark.parametrize("name", LAYOUTS)


@each_layout
def test_every_rank_holds_megatrons_own_bits_after_each_step(matrix, name):
    for rank in matrix:
        plain, exact = rank[name]["losses"]
        assert exact == plain
        assert rank[name]["differing"] == []
        assert rank[name]["moved"] > 0, "the model does not learn anything"


@each_layout
def test_the_first_gather_is_raw_and_the_one_after_a_load(matrix, name):
    for rank in matrix:
        for methods in rank[name]["methods"].values():
            assert methods[0] == "raw"
            assert methods.count("raw") == 2, "the first one, and the one after the load"
            assert methods.count("exact") >= 2
            assert methods[-1] == "exact"


def test_the_first_step_in_fp16_was_skipped(matrix):
    assert all(rank["fp16_overlapped"]["unmoved"] for rank in matrix)


def test_gathers_are_measured(matrix):
    for name in LAYOUTS:
        for rank in matrix:
            report = rank[name]
            assert report["seconds"]["param_wait"] > 0
            assert report["memory"]["parameters"] > 0
            for method, wire, dense in report["bytes"]:
                assert dense > 0
                assert wire == dense if method == "raw" else wire <= dense + 4096


def test_megatrons_own_gather_is_measured_too(matrix):
    for rank in matrix:
        for rows, seconds in rank["raw"]:
            assert rows
            assert all(method == "raw" and wire == dense > 0 for method, wire, dense in rows)
            assert seconds["param_wait"] > 0


def test_exact_is_refused_where_it_cannot_work(matrix):
    for rank in matrix:
        assert "without the distributed optimizer" in rank["refusals"]["sharded"]
        assert "needs the optimizer" in rank["refusals"]["optimizer"]


def test_ranks_with_different_settings_are_told_when_they_attach(matrix):
    for number, rank in enumerate(matrix):
        assert "parameters.coder" in rank["disagreeing"]
        assert ("rank 0" if number == 2 else "rank 2") in rank["disagreeing"]


def test_switched_off_the_gather_is_megatrons_own(matrix):
    for rank in matrix:
        assert rank["switched"] == ["raw", "exact", "raw", "raw", "raw", "exact"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYOUTS, *SLOW])
def test_two_hundred_steps(name):
    for differing, all_methods in train_ranks(_many, WORLD_SIZE, name, timeout_s=580):
        assert differing == []
        for methods in all_methods:
            assert methods.count("raw") == 2, "the first one, and the one after the load"
            # Steps that fp16's loss scale skips gather nothing.
            assert len(methods) > 0.9 * MANY_STEPS


def _many(rank, name):
    layout = (LAYOUTS | SLOW)[name]
    with parallel_state_of(layout):
        report = _report(layout, MANY_STEPS)
    return report["differing"], list(report["methods"].values())
