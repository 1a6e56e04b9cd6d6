"""Lossy gathers of parameters in Megatron's layouts, 4 gloo ranks, and their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_sparse.config.parameters import ParametersConfig
from tests.megatron.checkpoint_cases import save
from tests.megatron.parallel_gpt import SHARDED, Layout, parallel_state_of
from tests.megatron.test_parameter_gather import BOTH
from tests.megatron.train_ranks import equal, logged, running, train_ranks

WORLD_SIZE = 4
STEPS = 6
LAYOUTS = {
    "overlapped": Layout(ddp=BOTH),
    "expert": Layout(expert=2, experts=4, ddp=SHARDED),
    "instances": Layout(instances=2, ddp=SHARDED),
}
BF16 = Layout(precision="bf16", ddp=BOTH)
LOSSY = ParametersConfig("lossy", "rans", verify_every=1)
SKIPPED = 3


def _running(layout, parameters=LOSSY):
    return running(layout, scheme="dense", parameters=parameters)


def _held(model):
    """Copies of the parameters as they are, without a gather."""
    return {
        name: parameter.detach().clone()
        for chunk in model.chunks
        for name, parameter in chunk.module.named_parameters()
    }


def _masters(attachment):
    """Copies of this rank's masters, by parameter and first element."""
    from megatron_sparse.megatron.parameter_masters import saved_parts

    parts = saved_parts(attachment.parameters.lossy)
    return {(piece.name, piece.offset): values_M.clone() for _, piece, values_M in parts}


def _train(layout, parameters):
    """Losses, methods of the gathers, the line for the log, and the memory."""
    with _running(layout, parameters) as run:
        for _ in range(STEPS):
            run.losses.append(run.model.gradients())
            run.model.optimizer.step()
            run.model.weights()  # gathers again, as an evaluation does
        return {
            "losses": run.losses,
            "methods": [
                (r.method, r.wire_bytes, r.dense_bytes, r.bucket) for r in run.records.gathers
            ],
            "lines": list(run.attachment.parameters.lines),
            "kept": run.attachment.memory_report().get("parameters", 0),
        }


def _skipped():
    """The replica before and after a step that the optimizer skips, and after two more steps."""
    with _running(Layout(ddp=SHARDED)) as run:
        model = run.model
        for step in range(STEPS):
            model.gradients()
            if step == SKIPPED:
                before = _held(model)
                model.optimizer.prepare_grads = lambda: True
                success, *_ = model.optimizer.step()
                del model.optimizer.prepare_grads
                assert success is False
                after = _held(model)
                continue
            model.optimizer.step()
        return before, after, _held(model)


def _switched():
    """Methods with `enabled` off for two steps, and after `forget_parameters`."""
    with _running(Layout(ddp=SHARDED)) as run:
        for enabled in (True, True, False, False, True, True):
            run.attachment.enabled = enabled
            run.step()
        run.attachment.forget_parameters()
        run.step()
    return [record.method for record in run.records.gathers]


def _moved_to_other_buckets(folder):
    """Masters as saved, and as restored with buckets cut otherwise."""
    from megatron_sparse.megatron import checkpoint

    with _running(Layout(ddp=BOTH)) as run:
        for _ in range(3):
            run.model.gradients()
            run.model.optimizer.step()
            run.model.weights()
        saved = _masters(run.attachment)
        save(run.attachment, Path(folder, "sharded"))
        weights = [chunk.state_dict() for chunk in run.model.chunks]
        restored = {}
        for kind in ("sharded", "nothing"):
            with _running(Layout(ddp=SHARDED)) as other:
                for chunk, state in zip(other.model.chunks, weights, strict=True):
                    chunk.load_state_dict(state)
                with logged() as lines:
                    checkpoint.load(other.attachment, Path(folder, kind), iteration=3)
                masters = _masters(other.attachment)
                other.step()
                restored[kind] = (masters, [r.method for r in other.records.gathers], lines)
        return saved, restored, _held(run.model)


def _saved_with(layout, folder):
    """This rank's masters as saved in a distributed checkpoint, and as restored."""
    from megatron_sparse.megatron import checkpoint

    found = []
    with _running(layout) as run:
        for _ in range(3):
            run.step()
        save(run.attachment, Path(folder))
        for _ in range(2):
            found.append(_masters(run.attachment))
            run.attachment.forget_parameters()
            checkpoint.load(run.attachment, Path(folder), iteration=3)
    return found


def _all(rank, folder):
    reports: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        with parallel_state_of(layout):
            raw = _train(layout, ParametersConfig("raw"))
            reports[name] = raw["losses"], _train(layout, LOSSY)
            if name != "overlapped":
                reports[f"{name}, saved"] = _saved_with(layout, f"{folder}/{name}")
    with parallel_state_of(BF16):
        reports["bf16"] = _train(BF16, LOSSY)
        reports["skipped"] = _skipped()
        reports["switched"] = _switched()
        reports["moved"] = _moved_to_other_buckets(folder)
    return reports


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    # A busy machine takes minutes to train all of them on four ranks.
    return train_ranks(_all, WORLD_SIZE, str(tmp_path_factory.mktemp("lossy")), timeout_s=400)


pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_trains_like_raw_with_equal_replicas(ranks, name):
    """`verify_every=1` compares the replicas in each gather."""
    for rank in ranks:
        raw, lossy = rank[name]
        assert lossy["losses"][0] == raw[0]
        assert lossy["losses"][1:] != raw[1:], "nothing was withheld"
        assert lossy["losses"] == pytest.approx(raw, rel=0.01)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_first_gather_is_raw_and_later_ones_take_an_eighth(ranks, name):
    for rank in ranks:
        for bucket in {row[3] for row in rank[name][1]["methods"]}:
            rows = [row for row in rank[name][1]["methods"] if row[3] == bucket]
            assert rows[0][0] == "raw"
            assert {row[0] for row in rows[1:]} == {"lossy"}
            # With experts there are two optimizers, each of which gathers all buckets: only the one
            # that has changed a bucket sends it.
            sent = [wire > 0 for _, wire, _, _ in rows[1:]]
            assert sum(sent) in (STEPS - 1, STEPS), "the raw gather may come before the first step"
            assert all(sent) is (name != "expert")
            assert all(wire < dense / 6 + 400 for _, wire, dense, _ in rows[1:])
        assert rank[name][1]["kept"] > 0
        assert "buckets lossy, 4 bits" in rank[name][1]["lines"][0]


def test_bf16_parameters_are_gathered_exactly(ranks):
    for rank in ranks:
        assert {row[0] for row in rank["bf16"]["methods"]} == {"raw", "exact"}
        assert "buckets exact" in rank["bf16"]["lines"][0]


def test_a_skipped_step_leaves_the_replicas(ranks):
    for rank in ranks:
        for number, held in enumerate(rank["skipped"]):
            assert equal(held, ranks[0]["skipped"][number])
        before, after, last = rank["skipped"]
        assert equal(before, after)
        assert not equal(before, last)


def test_switched_off_and_after_forget_the_gather_is_raw(ranks):
    for rank in ranks:
        methods = rank["switched"]
        assert methods == ["raw", "lossy", "raw", "raw", "raw", "lossy", "raw"]


def test_masters_move_to_other_buckets(ranks):
    whole = _whole([rank["moved"][0] for rank in ranks], ranks[0]["moved"][2])
    held = ranks[0]["moved"][2]
    assert not equal(whole, held), "nothing was withheld"
    restored = _whole([rank["moved"][1]["sharded"][0] for rank in ranks], held)
    assert equal(whole, restored)
    for rank in ranks:
        assert rank["moved"][0].keys() != rank["moved"][1]["sharded"][0].keys(), "cut otherwise"
        assert rank["moved"][1]["sharded"][1] == ["lossy"]
    assert "masters of the parameters restored" in ranks[0]["moved"][1]["sharded"][2]


@pytest.mark.parametrize("name", ["expert", "instances"])
def test_every_layout_gets_its_masters_back(ranks, name):
    for rank in ranks:
        saved, restored = rank[f"{name}, saved"]
        assert saved
        assert equal(saved, restored)


def test_without_saved_masters_the_next_gather_is_raw(ranks):
    for rank in ranks:
        masters, methods, _ = rank["moved"][1]["nothing"]
        assert masters == {}
        assert methods == ["raw"]


def _whole(parts_of_ranks, held):
    """All masters; checks that each element belongs to one rank."""
    masters = {name: torch.full((value.numel(),), float("nan")) for name, value in held.items()}
    for parts in parts_of_ranks:
        for (name, start), values in parts.items():
            span = masters[name][start : start + values.numel()]
            assert bool(span.isnan().all())
            span.copy_(values)
    assert not any(bool(values.isnan().any()) for values in masters.values())
    return {name: values.view(held[name].shape) for name, values in masters.items()}
