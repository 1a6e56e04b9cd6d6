"""Lossy gathers of parameters in Megatron's layouts, 4 gloo ranks, and their checkpoints."""

import pytest
import torch

from megatron_sparse.config.parameters import ParametersConfig
from tests.megatron.checkpoint_cases import save
from tests.megatron.parallel_gpt import SHARDED, Layout, parallel_state_of
from tests.megatron.test_parameter_gather import BOTH
from tests.megatron.train_ranks import equal, logged, of_all_ranks, on_ranks, running

WORLD_SIZE = 4
STEPS = 6
LAYOUTS = {
    "overlapped": Layout(ddp=BOTH),
    "expert": Layout(expert=2, experts=4, ddp=SHARDED),
    "instances": Layout(instances=2, ddp=SHARDED),
}
SMALL = Layout(ddp=SHARDED)
LOSSY = ParametersConfig("lossy", "rans", verify_every=1)
# A busy machine takes minutes to train a layout on four ranks.
pytestmark = pytest.mark.timeout(600)


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


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks(WORLD_SIZE)
def test_it_trains_like_raw_and_sends_an_eighth(rank, name):
    """`verify_every=1` compares the replicas in each gather."""
    layout, losses = LAYOUTS[name], []
    with parallel_state_of(layout):
        for parameters in (ParametersConfig("raw"), LOSSY):
            with _running(layout, parameters) as run:
                losses.append([_step(run.model) for _ in range(STEPS)])
                kept = run.attachment.memory_report().get("parameters", 0)
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
def test_bf16_parameters_are_gathered_exactly(rank):
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
            run.model.gradients()
            run.model.optimizer.step()
        run.model.gradients()
        before = run.model.held()
        run.model.optimizer.prepare_grads = lambda: True
        success, *_ = run.model.optimizer.step()
        del run.model.optimizer.prepare_grads
        assert success is False
        assert equal(before, run.model.held())
        for _ in range(2):
            run.model.gradients()
            run.model.optimizer.step()
        last = run.model.held()
    assert not equal(before, last)
    for replicas in (before, last):
        assert all(equal(replicas, others) for others in of_all_ranks(replicas))


@on_ranks(WORLD_SIZE)
def test_switched_off_and_after_forget_the_gather_is_raw(rank):
    with parallel_state_of(SMALL), _running(SMALL) as run:
        for enabled in (True, True, False, False, True, True):
            run.attachment.enabled = enabled
            run.step()
        run.attachment.forget_parameters()
        run.step()
    methods = [record.method for record in run.records.gathers]
    assert methods == ["raw", "lossy", "raw", "raw", "raw", "lossy", "raw"]


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

    with parallel_state_of(LAYOUTS[name]), _running(LAYOUTS[name]) as run:
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
