"""Exact gathers of parameters in Megatron's layouts, 4 gloo ranks: Megatron's own bits."""

import pytest
import torch

from megatron_sparse.config.parameters import ParametersConfig
from megatron_sparse.errors import CommunicationError, ConfigError
from tests.megatron.parallel_gpt import OVERLAP, SHARDED, Layout, ParallelGPT, parallel_state_of
from tests.megatron.train_ranks import equal, on_ranks, running

# A busy machine takes minutes to train a layout on four ranks.
pytestmark = pytest.mark.timeout(600)
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
    """Losses, records, memory, and the parameters after each step's forward pass and at the end."""
    seen, saved = [], None
    options = {} if parameters is None else {"scheme": "dense", "parameters": parameters}
    with running(layout, **options) as run:
        model = run.model
        for step in range(steps):
            run.losses.append(model.gradients())
            # Without a gather of its own: what the forward pass has gathered.
            seen.append(model.held())
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
    return {"losses": run.losses, "seen": seen, "records": run.records, "memory": memory}


def _state(chunk):
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in chunk.state_dict().items()
    }


def _exact_run(layout, steps=STEPS):
    """A run that has Megatron's own bits after each step, and the methods of each bucket."""
    with parallel_state_of(layout):
        plain, exact = (_train(layout, parameters, steps) for parameters in (None, EXACT))
    assert exact["losses"] == plain["losses"]
    assert all(map(equal, exact["seen"], plain["seen"]))
    assert not equal(plain["seen"][1], plain["seen"][-1]), "the model does not learn anything"
    methods = {}
    for record in exact["records"].gathers:
        methods.setdefault(record.bucket, []).append(record.method)
    for of_bucket in methods.values():
        assert of_bucket.count("raw") == 2, "the first one, and the one after the load"
    return exact, methods.values()


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks(WORLD_SIZE)
def test_every_rank_holds_megatrons_own_bits_after_each_step(rank, name):
    exact, methods = _exact_run(LAYOUTS[name])
    if "fp16" in name:
        assert equal(*exact["seen"][:2]), "the first step was not skipped"
    for of_bucket in methods:
        assert of_bucket[0] == "raw"
        assert of_bucket.count("exact") >= 2
        assert of_bucket[-1] == "exact"
    assert exact["records"].seconds["param_wait"] > 0
    assert exact["memory"]["parameters"] > 0
    for record in exact["records"].gathers:
        assert record.dense_bytes > 0
        if record.method == "raw":
            assert record.wire_bytes == record.dense_bytes
        assert record.wire_bytes <= record.dense_bytes + 4096


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYOUTS, *SLOW])
@on_ranks(WORLD_SIZE, timeout_s=580)
def test_two_hundred_steps(rank, name):
    _, methods = _exact_run((LAYOUTS | SLOW)[name], MANY_STEPS)
    for of_bucket in methods:
        # Steps that fp16's loss scale skips gather nothing.
        assert len(of_bucket) > 0.9 * MANY_STEPS


@pytest.mark.parametrize("name", ["bf16", "bf16_overlapped"])
@on_ranks(WORLD_SIZE)
def test_megatrons_own_gather_is_measured_too(rank, name):
    with parallel_state_of(LAYOUTS[name]):
        records = _train(LAYOUTS[name], ParametersConfig("raw"))["records"]
    assert {record.method for record in records.gathers} == {"raw"}
    assert all(r.wire_bytes == r.dense_bytes > 0 for r in records.gathers)
    assert records.seconds["param_wait"] > 0


@pytest.mark.parametrize(
    ("ddp", "has_optimizer", "words"),
    [
        ({}, True, "without the distributed optimizer"),
        (SHARDED, False, "needs the optimizer"),
    ],
)
@on_ranks(WORLD_SIZE)
def test_exact_is_refused_where_it_cannot_work(rank, ddp, has_optimizer, words):
    from megatron_sparse.megatron import attach

    with parallel_state_of(Layout()):
        model = ParallelGPT(Layout(ddp=ddp))
        optimizer = model.optimizer if has_optimizer else None
        with pytest.raises(ConfigError, match=words):
            attach(model.chunks, optimizer, scheme="dense", parameters=EXACT)


@on_ranks(WORLD_SIZE)
def test_ranks_with_different_settings_are_told_when_they_attach(rank):
    from megatron_sparse.megatron import attach

    parameters = ParametersConfig("exact", "packed" if rank == 2 else "rans")
    with parallel_state_of(Layout()):
        model = ParallelGPT(Layout(ddp=SHARDED))
        with pytest.raises(CommunicationError, match=r"parameters\.coder") as caught:
            attach(model.chunks, model.optimizer, scheme="dense", parameters=parameters)
    assert ("rank 0" if rank == 2 else "rank 2") in str(caught.value)


@on_ranks(WORLD_SIZE)
def test_switched_off_the_gather_is_megatrons_own(rank):
    """Then raw, then exact again."""
    layout = LAYOUTS["bf16"]
    with parallel_state_of(layout), running(layout, scheme="dense", parameters=EXACT) as run:
        for enabled in (True, True, False, False, True, True):
            run.attachment.enabled = enabled
            run.step()
    methods = [record.method for record in run.records.gathers]
    assert methods == ["raw", "exact", "raw", "raw", "raw", "exact"]
