"""Gathers of parameters in Megatron's layouts, 4 gloo ranks: exact ones have Megatron's own bits.

Lossy ones train like raw ones, and keep their masters in checkpoints.
"""

import warnings
from copy import deepcopy

import pytest
import torch

from megatron_sparse.config.parameters import ParametersConfig
from megatron_sparse.errors import CommunicationError, ConfigError
from megatron_sparse.megatron.optimizer_step import UPDATE, parts_of
from tests.megatron.checkpoint_cases import save
from tests.megatron.parallel_gpt import OVERLAP, SHARDED, Layout, ParallelGPT, parallel_state_of
from tests.megatron.train_ranks import equal, logged, of_all_ranks, on_ranks, running

# A busy machine takes minutes to train a layout on four ranks.
pytestmark = pytest.mark.timeout(600)
WORLD_SIZE = 4
STEPS, LOADED, MANY_STEPS = 6, 3, 200
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
LOSSY_LAYOUTS = {
    "overlapped": Layout(ddp=BOTH),
    "expert": Layout(expert=2, experts=4, ddp=SHARDED),
    "instances": Layout(instances=2, ddp=SHARDED),
}
SMALL = Layout(ddp=SHARDED)
EXACT, LOSSY = (ParametersConfig(each, verify_every=1) for each in ("exact", "lossy"))


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
                saved = [deepcopy(chunk.state_dict()) for chunk in model.chunks]
            if step == LOADED:
                # As an evaluation does, before other parameters are loaded: a second gather.
                model.weights()
                model.weights()
                for chunk, state in zip(model.chunks, saved, strict=True):
                    chunk.load_state_dict(state)
        seen.append(model.weights())
        memory = {} if run.attachment is None else run.attachment.memory_report()
    return {"losses": run.losses, "seen": seen, "records": run.records, "memory": memory}


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((name, STEPS) for name in LAYOUTS),
        *(pytest.param(name, MANY_STEPS, marks=pytest.mark.slow) for name in LAYOUTS | SLOW),
    ],
)
@on_ranks(WORLD_SIZE, timeout_s=580)
def test_every_rank_holds_megatrons_own_bits_after_each_step(rank, name, steps):
    """Also where fp16's loss scale skips the first step."""
    layout = (LAYOUTS | SLOW)[name]
    with parallel_state_of(layout):
        plain, exact = (_train(layout, parameters, steps) for parameters in (None, EXACT))
    assert exact["losses"] == plain["losses"]
    assert all(map(equal, exact["seen"], plain["seen"]))
    assert not equal(plain["seen"][1], plain["seen"][-1]), "the model does not learn anything"
    if "fp16" in name:
        assert equal(*exact["seen"][:2]), "the first step was not skipped"
    for bucket in {record.bucket for record in exact["records"].gathers}:
        methods = [each.method for each in exact["records"].gathers if each.bucket == bucket]
        assert methods.count("raw") == 2, "the first one, and the one after the load"
        assert methods.count("exact") >= 2
        assert (methods[0], methods[-1]) == ("raw", "exact")
    assert exact["records"].seconds["param_wait"] > 0
    assert exact["memory"]["parameters"] > 0
    for record in exact["records"].gathers:
        assert record.dense_bytes > 0
        if record.method == "raw":
            assert record.wire_bytes == record.dense_bytes
        assert record.wire_bytes <= record.dense_bytes + 4096


@on_ranks(WORLD_SIZE)
def test_with_overlap_all_gathers_start_before_the_first_wait(rank):
    layout, seen = LAYOUTS["bf16_overlapped"], []
    with parallel_state_of(layout), _running(layout, EXACT) as run, warnings.catch_warnings():
        warnings.filterwarnings("error", message="The next bucket")  # Megatron's
        attachment, parameters = run.attachment, run.attachment.parameters
        start, gathered = attachment.start_gather, parameters.gathered
        run.step()
        attachment.start_gather = lambda group: seen.append("start") or start(group)
        parameters.gathered = lambda pending: seen.append("wait") or gathered(pending)
        run.step()
        count = len(attachment.groups)
    assert count > 1
    assert seen[: 2 * count] == ["start"] * count + ["wait"] * count


@pytest.mark.parametrize("name", ["bf16", "bf16_overlapped"])
@on_ranks(WORLD_SIZE)
def test_megatrons_own_gather_is_measured_too(rank, name):
    with parallel_state_of(LAYOUTS[name]):
        records = _train(LAYOUTS[name], ParametersConfig("raw"))["records"]
    assert {record.method for record in records.gathers} == {"raw"}
    assert all(r.wire_bytes == r.dense_bytes > 0 for r in records.gathers)
    assert records.seconds["param_wait"] > 0


@on_ranks(WORLD_SIZE)
def test_exact_is_refused_without_the_distributed_optimizer_and_leaves_nothing_attached(rank):
    from megatron_sparse.megatron import attach, detach

    with parallel_state_of(Layout()):
        model = ParallelGPT(Layout())
        with pytest.raises(ConfigError, match="without the distributed optimizer"):
            attach(model.chunks, model.optimizer, scheme="dense", parameters=EXACT)
        detach(attach(model.chunks, model.optimizer, scheme="dense"))


@on_ranks(WORLD_SIZE)
def test_ranks_with_different_settings_are_told_when_they_attach(rank):
    from megatron_sparse.megatron import attach

    parameters = ParametersConfig("exact", "never" if rank == 2 else "always")
    with parallel_state_of(Layout()):
        model = ParallelGPT(Layout(ddp=SHARDED))
        with pytest.raises(CommunicationError, match=r"parameters\.per_node") as caught:
            attach(model.chunks, model.optimizer, scheme="dense", parameters=parameters)
    assert ("rank 0" if rank == 2 else "rank 2") in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "parameters"), [(LAYOUTS["bf16"], EXACT), (SMALL, LOSSY)], ids=["exact", "lossy"]
)
@on_ranks(WORLD_SIZE)
def test_switched_off_and_after_forget_the_gather_is_megatrons_own(rank, layout, parameters):
    """Then raw, then as before again."""
    with parallel_state_of(layout), _running(layout, parameters) as run:
        for enabled in (True, True, False, False, True, True):
            run.attachment.enabled = enabled
            run.step()
        run.attachment.forget_parameters()
        run.step()
    own = parameters.method
    methods = [record.method for record in run.records.gathers]
    assert methods == ["raw", own, "raw", "raw", "raw", own, "raw"]


def _running(layout, parameters=LOSSY):
    return running(layout, scheme="dense", parameters=parameters)


def _masters(attachment):
    """Copies of this rank's masters, by parameter and first element."""
    from megatron_sparse.megatron.parameter_masters import saved_parts

    parts = saved_parts(attachment.parameters.lossy)
    return {(piece.name, piece.offset): values_M.clone() for _, piece, values_M in parts}


def _step(model):
    """Returns the loss; an evaluation then gathers again."""
    loss = model.gradients()
    model.optimizer.step()
    model.weights()
    return loss


@pytest.mark.parametrize("name", LOSSY_LAYOUTS)
@on_ranks(WORLD_SIZE)
def test_lossy_trains_like_raw_and_sends_an_eighth(rank, name):
    """`verify_every=1` compares the replicas in each gather."""
    layout, losses = LOSSY_LAYOUTS[name], []
    with parallel_state_of(layout):
        for parameters in (ParametersConfig("raw"), LOSSY):
            with _running(layout, parameters) as run:
                losses.append([_step(run.model) for _ in range(STEPS)])
                kept = run.attachment.memory_report().get("parameters", 0)
    optimizers = [run.model.optimizer, *parts_of(run.model.optimizer)]
    assert not any(UPDATE in vars(each) for each in optimizers), "detached"
    raw, lossy = losses
    assert lossy[0] == raw[0]
    assert lossy[1:] != raw[1:], "nothing was withheld"
    assert lossy == pytest.approx(raw, rel=0.01)
    for bucket in {record.bucket for record in run.records.gathers}:
        first, *others = [each for each in run.records.gathers if each.bucket == bucket]
        assert first.method == "raw"
        assert {each.method for each in others} == {"lossy"}
        # With experts there are two optimizers, each of which gathers all buckets: only the one
        # that has changed a bucket sends it.
        sent = [each.wire_bytes > 0 for each in others]
        assert sum(sent) in (STEPS - 1, STEPS), "the raw gather may come before the first step"
        assert all(sent) is (name != "expert")
        assert all(each.wire_bytes < each.dense_bytes / 6 + 400 for each in others)
    assert kept > 0
    assert "buckets lossy, 4 bits" in run.attachment.parameters.lines[0]


@on_ranks(WORLD_SIZE)
def test_lossy_gathers_bf16_parameters_exactly(rank):
    layout = Layout(precision="bf16", ddp=BOTH)
    with parallel_state_of(layout), _running(layout) as run:
        for _ in range(STEPS):
            _step(run.model)
    assert {record.method for record in run.records.gathers} == {"raw", "exact"}
    assert "buckets exact" in run.attachment.parameters.lines[0]


@on_ranks(WORLD_SIZE)
def test_a_skipped_step_leaves_the_replicas(rank):
    with parallel_state_of(SMALL), _running(SMALL) as run:
        for _ in range(3):
            run.step()
        run.model.gradients()
        before = run.model.held()
        run.model.optimizer.prepare_grads = lambda: True
        success, *_ = run.model.optimizer.step()
        del run.model.optimizer.prepare_grads
        assert success is False
        assert equal(before, run.model.held())
        for _ in range(2):
            run.step()
        last = run.model.held()
    assert not equal(before, last)
    for replicas in (before, last):
        assert all(equal(replicas, others) for others in of_all_ranks(replicas))


@on_ranks(WORLD_SIZE)
def test_masters_move_to_other_buckets_and_without_saved_ones_the_next_gather_is_raw(
    rank, tmp_path
):
    from megatron_sparse.megatron import checkpoint

    layout = Layout(ddp=BOTH)
    with parallel_state_of(layout), _running(layout) as run:
        for _ in range(3):
            _step(run.model)
        saved, held = _masters(run.attachment), run.model.held()
        save(run.attachment, tmp_path / "saved")
        weights = [chunk.state_dict() for chunk in run.model.chunks]
        restored = {}
        for folder in ("saved", "nothing"):
            with _running(SMALL) as other:
                for chunk, state in zip(other.model.chunks, weights, strict=True):
                    chunk.load_state_dict(state)
                with logged() as lines:
                    checkpoint.load(other.attachment, tmp_path / folder, iteration=3)
                restored[folder] = _masters(other.attachment)
                other.step()
            methods = [record.method for record in other.records.gathers]
            assert methods == (["lossy"] if folder == "saved" else ["raw"])
            if rank == 0:
                said = "masters of the parameters restored" in lines
                assert said is (folder == "saved")
    assert restored["nothing"] == {}
    assert saved.keys() != restored["saved"].keys(), "cut otherwise"
    whole = _whole(of_all_ranks(saved), held)
    assert not equal(whole, held), "nothing was withheld"
    assert equal(whole, _whole(of_all_ranks(restored["saved"]), held))


@pytest.mark.parametrize("name", ["expert", "instances"])
@on_ranks(WORLD_SIZE)
def test_every_layout_gets_its_masters_back(rank, name, tmp_path):
    from megatron_sparse.megatron import checkpoint

    layout = LOSSY_LAYOUTS[name]
    with parallel_state_of(layout), _running(layout) as run:
        for _ in range(3):
            run.step()
        save(run.attachment, tmp_path)
        saved = _masters(run.attachment)
        run.attachment.forget_parameters()
        checkpoint.load(run.attachment, tmp_path, iteration=3)
        assert saved
        assert equal(saved, _masters(run.attachment))


def _whole(parts_of_ranks, held):
    """All masters; checks that each element belongs to one rank."""
    masters = {name: torch.full((value.numel(),), float("nan")) for name, value in held.items()}
    for parts in parts_of_ranks:
        for (name, start), values in parts.items():
            span = masters[f"0.{name}"][start : start + values.numel()]
            assert bool(span.isnan().all())
            span.copy_(values)
    assert not any(bool(values.isnan().any()) for values in masters.values())
    return {name: values.view(held[name].shape) for name, values in masters.items()}
