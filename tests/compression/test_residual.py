"""Provisional selections: commit, rollback, repeat; residuals by parameter."""

from types import SimpleNamespace

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.compression.parameters import ParameterFilter
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.config.compression import CompressionConfig
from megatron_sparse.ddp.buckets import DDPBuckets
from megatron_sparse.errors import CheckpointError, SelectionError


def _bucket(name="b", sizes=(4, 6), padding=2, prefix="w"):
    pieces, start = [], 0
    for index, size in enumerate(sizes):
        pieces.append(ParameterSlice(f"{prefix}{index}", start, start + size))
        start += size + padding
    return Bucket(name, torch.zeros(start), pieces, CollectiveOp.ALL_REDUCE, 1)


def _store(undo=True, is_reported=True, dtype=torch.float32):
    store = ResidualStore(dtype)
    store.undo, store.is_reported = undo, is_reported
    return store


def _held(value, **sizes):
    """A store, and a bucket whose residual has this value everywhere."""
    store, bucket = _store(), _bucket(**sizes)
    store.begin(bucket).fill_(value)
    store.commit()
    return store, bucket


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("undo", [ResidualStore.rollback, lambda store: None])
def test_rollback_or_a_second_begin_undoes_the_first(undo, value):
    """A store that holds nothing yet has zeros again."""
    store, bucket = _held(value) if value else (_store(), _bucket())
    store.begin(bucket).fill_(2.0)
    undo(store)
    assert torch.equal(store.begin(bucket), torch.full((bucket.numel,), value))


def test_without_undo_a_second_begin_is_an_error_and_changes_nothing():
    store, bucket = _store(undo=False), _bucket()
    residual = store.begin(bucket)
    residual.fill_(1.0)
    with pytest.raises(SelectionError, match="undo=always"):
        store.begin(bucket)
    assert torch.equal(residual, torch.ones(bucket.numel))


def test_without_undo_a_skipped_step_is_an_error():
    store = _store(undo=False)
    store.begin(_bucket())
    with pytest.raises(SelectionError, match="skipped") as caught:
        store.rollback()
    # Not what a user has set: `undo=auto` keeps no copy where no step is expected to be skipped.
    assert caught.value.got == "none"
    assert "undo=always" in str(caught.value.remedy)


def test_assumed_outcome_accepts_every_selection():
    store, bucket = _store(undo=False, is_reported=False), _bucket()
    store.begin(bucket).fill_(1.0)
    assert torch.equal(store.begin(bucket), torch.ones(bucket.numel))


@pytest.mark.parametrize(
    ("undo", "dtype", "nbytes", "undo_nbytes"),
    [
        (False, torch.float32, 4000, 0),
        (True, torch.float32, 8000, 4000),
        (False, torch.bfloat16, 2000, 0),
    ],
)
def test_one_buffer_without_undo_and_two_with_it(undo, dtype, nbytes, undo_nbytes):
    store = _store(undo=undo, dtype=dtype)
    for _ in range(2):
        store.begin(_bucket(sizes=(1000,), padding=0))
        store.commit()
    assert (store.nbytes, store.undo_nbytes) == (nbytes, undo_nbytes)


def test_two_buffers_take_turns_so_that_nothing_is_copied():
    store, bucket = _held(1.0)
    first_N, second_N = store.begin_apart(bucket)
    assert torch.equal(first_N, torch.ones(bucket.numel)), "the old residual, which stays as it is"
    second_N.fill_(2.0)  # a selection writes all of it
    store.commit()
    assert store[bucket.name] is second_N
    old_N, residual_N = store.begin_apart(bucket)
    assert old_N is second_N
    assert residual_N is first_N
    residual_N.fill_(3.0)
    store.rollback()
    assert torch.equal(store[bucket.name], torch.full((bucket.numel,), 2.0))


def test_a_pass_that_adds_to_a_selection_changes_it_in_place():
    store, bucket = _held(1.0)
    _, selected_N = store.begin_apart(bucket)
    selected_N.fill_(2.0)
    store.go_on()
    old_N, residual_N = store.begin_apart(bucket)
    assert old_N is residual_N is selected_N
    store.rollback()
    assert torch.equal(store.begin(bucket), torch.ones(bucket.numel))


def test_state_moves_between_bucket_layouts_by_parameter_name():
    store = _store()
    first = _bucket("one", (4, 6), padding=2)
    residual = store.begin(first)
    residual[:] = torch.arange(first.numel, dtype=torch.float32)
    store.commit()
    saved = {key: view.clone() for key, view in store.slices()}
    other = _store()
    pieces = [ParameterSlice("w1", 0, 6), ParameterSlice("w0", 8, 12)]
    bucket = Bucket("two", torch.zeros(16), pieces, CollectiveOp.ALL_REDUCE, 1)
    other.load([bucket], saved | {("gone", 0): torch.ones(3)})
    moved = other.begin(bucket)
    assert torch.equal(moved[0:6], saved["w1", 0])
    assert torch.equal(moved[8:12], saved["w0", 0])
    assert not moved[6:8].any()


def test_two_slices_of_one_parameter_are_told_apart():
    pieces = [ParameterSlice("w", 0, 3, offset=2), ParameterSlice("w", 3, 7, offset=10)]
    bucket = Bucket("part", torch.zeros(7), pieces, CollectiveOp.ALL_REDUCE, 1)
    store = _store()
    store.begin(bucket).copy_(torch.arange(7.0))
    saved = {key: view.clone() for key, view in store.slices()}
    assert saved.keys() == {("w", 2), ("w", 10)}
    other = _store()
    other.load([bucket], {("w", 10): saved["w", 10]})
    assert other.begin(bucket).tolist() == [0, 0, 0, 3, 4, 5, 6]


def test_a_saved_residual_of_another_size_is_refused():
    store = _store()
    with pytest.raises(CheckpointError, match="does not fit"):
        store.load([_bucket()], {("w0", 0): torch.zeros(5)})


def test_loading_replaces_residuals_and_pending_selections():
    store, bucket = _store(), _bucket()
    store.begin(bucket).fill_(1.0)
    store.load([bucket], {})
    assert not store.begin(bucket).any()


def test_loading_a_bucket_leaves_the_pending_selections_of_others():
    """As in plain DDP, which places residuals in its new buckets one by one."""
    store, first, second = _store(), _bucket("first"), _bucket("second", prefix="v")
    store.begin(first).fill_(1.0)
    store.commit()
    store.begin(first).fill_(2.0)
    store.load([second], {})
    store.rollback()
    assert (store["first"] == 1.0).all()


def test_rescale_and_norm():
    store, bucket = _store(), _bucket(sizes=(4,), padding=0)
    store.begin(bucket).fill_(3.0)
    assert float(store.norm()) == 6.0
    store.rescale(0.5)
    assert float(store.norm()) == 3.0


def test_a_change_of_unit_corrects_the_old_residuals_part():
    """`e' = x - sent + (change - 1) * e`: as if the old residual had come in the new unit."""
    store, bucket = _store(), _bucket(sizes=(4,), padding=0)
    old = torch.tensor([1.0, 2.0, 3.0, 4.0])
    store.begin(bucket).copy_(old)
    store.commit()
    selected = store.begin(bucket)
    selected[:2] = 0  # sent
    store.commit(torch.tensor(1.5))
    assert torch.equal(store.settled(bucket), torch.tensor([0.5, 1.0, 4.5, 6.0]))


def test_a_change_of_unit_rescales_buckets_without_a_selection():
    store, bucket = _held(2.0, sizes=(4,), padding=0)
    store.commit(torch.tensor(0.5))
    assert torch.equal(store.settled(bucket), torch.ones(4))


def test_the_first_selection_has_no_part_in_an_older_unit():
    store, bucket = _store(), _bucket(sizes=(4,), padding=0)
    store.begin(bucket).fill_(2.0)
    store.commit(torch.tensor(3.0))
    assert torch.equal(store.settled(bucket), torch.full((4,), 2.0))


def test_without_undo_a_change_of_unit_is_an_error():
    store, bucket = _store(undo=False), _bucket()
    store.begin(bucket)
    store.commit()
    store.begin(bucket)
    with pytest.raises(SelectionError, match="unit changes"):
        store.commit(torch.tensor(2.0))


def test_a_checkpoint_does_not_see_a_pending_selection():
    store, bucket = _store(), _bucket(sizes=(4,), padding=0)
    store.begin(bucket).fill_(1.0)
    assert store.settled(bucket) is None
    store.commit()
    store.begin(bucket).fill_(2.0)
    assert torch.equal(store.settled(bucket), torch.ones(4))
    store.commit()
    assert torch.equal(store.settled(bucket), torch.full((4,), 2.0))


@pytest.mark.parametrize(("unit", "left"), [(None, 26.0), (torch.tensor(2.0), 27.0)])
def test_of_a_spike_a_share_of_the_change_stays(unit, left):
    """The old residual of 1 enters in this step's unit; the share is taken before that."""
    (store, bucket), new = _held(1.0, name="a"), _bucket("b")
    store.begin(bucket).fill_(101.0)
    store.begin(new).fill_(50.0)  # its first selection: it was zero before
    store.commit(unit, share=0.25)
    assert (store["a"] == left).all()
    assert (store["b"] == 12.5).all()


@pytest.mark.parametrize("leak", [1.0, 0.5])
def test_apart_the_sum_is_that_of_the_gradient_and_the_residual_is_as_before(leak):
    store, bucket = _held(1.0)
    whole_N = torch.arange(bucket.numel) + 1.0  # the gradient and the residual of 1
    kept_N = whole_N > 5
    store.begin(bucket).copy_(torch.where(kept_N, 0, leak * whole_N))
    sent_N = torch.where(kept_N, whole_N, 0)
    assert torch.equal(sent_N + store.take_apart(leak)["b"], torch.arange(bucket.numel))
    store.commit(torch.tensor(3.0))
    assert (store["b"] == 3.0).all()  # in this step's unit


def test_the_step_after_one_apart_is_a_usual_one():
    store, bucket = _store(), _bucket()
    store.begin(bucket).fill_(1.0)
    store.take_apart(1.0)
    store.commit()
    assert not store["b"].any()
    store.begin(bucket).fill_(2.0)
    store.commit()
    assert (store["b"] == 2.0).all()


@pytest.mark.parametrize(
    ("changes", "left"),
    [({"share": 0.25}, 3.0), ({"unit_change": torch.tensor(1.5)}, 2.0), ({}, None)],
)
def test_of_a_dense_step_that_does_not_count_whole_the_rest_stays(changes, left):
    """What was sent whole is dropped only where nothing is left of it."""
    store, bucket = _held(4.0)
    store.begin(bucket).zero_()
    store.drop_later(bucket)
    store.commit(**changes)
    assert ("b" in store) == (left is not None)
    assert left is None or (store["b"] == left).all()


@pytest.mark.parametrize("held", [{}, {"v": 5.0, "w": 7.0}])
def test_a_step_goes_on_in_new_buckets(held):
    """DDP makes new ones after its first pass; a step that is then skipped leaves nothing."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in "vw"})
    v, w = (model[name].weight for name in "vw")
    store = _store()
    buckets = DDPBuckets(model, ParameterFilter(CompressionConfig()), 2, store)
    buckets.load({f"{name}.weight": torch.full((4,), value) for name, value in held.items()})

    def place(index, *parameters):
        values_N = torch.zeros(4 * len(parameters))
        made = SimpleNamespace(parameters=lambda: parameters, buffer=lambda: values_N)
        return buckets.place(made, index)

    for index, parameter in enumerate((v, w)):
        store.begin(place(index, parameter)).fill_(1.0)
    buckets.end_pass()
    store.go_on()
    store.begin(place(0, w, v)).add_(1.0)
    assert (store["bucket0"] == 2.0).all()
    store.rollback()
    assert store["bucket0"].tolist() == [held.get(name, 0.0) for name in "wv" for _ in range(4)]
    assert list(store._buckets) == ["bucket0"], "the old ones keep no gradient alive"
