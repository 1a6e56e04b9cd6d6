"""The plugin on megatron.core, 2 gloo ranks: overlap x distributed optimizer x scheme."""

import itertools
import threading
from dataclasses import replace

import pytest

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.config.sparse import SparseConfig, StragglerConfig
from megatron_sparse.errors import CommunicationError, ConfigError, SelectionError
from megatron_sparse.transport import groups
from tests.megatron.parallel_gpt import AVERAGE, OVERLAP, SHARDED, Layout
from tests.megatron.train_ranks import (
    AT_TARGET,
    SPARSE,
    equal,
    of_all_ranks,
    on_ranks,
    running,
    train,
)
from tests.straggler.settings import section_for

STEPS = 5
WHOLE = AT_TARGET | {"density": 1.0}
LAYOUTS = [Layout(ddp=ddp) for ddp in ({}, SHARDED, OVERLAP, SHARDED | OVERLAP)]


@on_ranks(2)
def test_dense_is_bit_for_bit_megatron(rank):
    """Under the dense plan, and in the warm-up of another."""
    warmup = {"scheme": "agsparse", "value_bits": None, "warmup_iters": 100, "ramp_iters": 0}
    for layout in LAYOUTS:
        plain = train(layout, STEPS)
        for options in (AT_TARGET | {"scheme": "dense"}, warmup):
            run = train(layout, STEPS, **options)
            assert run["losses"] == plain["losses"]
            assert equal(run["weights"], plain["weights"])
            assert not any(view.any() for view in run["residuals"].values())


@on_ranks(2)
def test_density_one_is_bit_for_bit_megatron(rank):
    """Also where the reducer divides before it selects, as with `average_in_collective`.

    With two ranks halves are exact, and two numbers have one sum.
    """
    for layout in LAYOUTS:
        plain = train(layout, STEPS)
        for average, scheme in ((False, "agsparse"), (True, "direct"), (True, "dense")):
            averaged = replace(layout, ddp=layout.ddp | (AVERAGE if average else {}))
            whole = train(averaged, STEPS, **WHOLE, scheme=scheme)
            assert whole["losses"] == plain["losses"]
            assert equal(whole["weights"], plain["weights"])


@on_ranks(2)
def test_every_scheme_trains_a_megatron_model_to_the_same_bits(rank):
    """At density 1 residuals stay empty, and the sum of two numbers has only one rounding."""
    for op in CollectiveOp:
        sharded = op is CollectiveOp.REDUCE_SCATTER
        layout = Layout(ddp=OVERLAP | (SHARDED if sharded else {}))
        plain = train(layout, 2)["weights"]
        for name, scheme in SCHEMES.items():
            options = WHOLE | {"scheme": name, "straggler": section_for(name)}
            if op not in scheme.ops:
                with pytest.raises(ConfigError, match=f"{name} cannot do the {op}"):
                    train(layout, 2, **options)
                continue
            weights = train(layout, 2, **options)["weights"]
            if scheme.sends_whole:
                # Rounded gradients: where they become 0, weights lag behind by a step of Adam.
                lag = max(float((weights[n] - plain[n]).abs().mean()) for n in plain)
                assert lag < 0.5 * 1e-2, (op, name, lag)
            else:
                assert equal(weights, plain), (op, name, weights)


@on_ranks(2)
def test_sparse_training_learns_keeps_ranks_identical_and_repeats(rank):
    for layout, wire_dtype in itertools.product(LAYOUTS, ("fp32", "bf16")):
        run, again = (train(layout, STEPS, **SPARSE, wire_dtype=wire_dtype) for _ in range(2))
        assert run["losses"][-1] < run["losses"][0]
        assert run["losses"] == again["losses"] != train(layout, STEPS)["losses"]
        assert equal(run["residuals"], again["residuals"])
        assert any(view.any() for view in run["residuals"].values())
        assert all(equal(run["weights"], other) for other in of_all_ranks(run["weights"]))


@on_ranks(2)
def test_selection_is_the_same_with_overlap_on_and_off(rank):
    """A threshold for each parameter: the cut into buckets does not change the selection.

    One step, because with the distributed optimizer Megatron itself adds up the gradient norm in
    another order when the buckets change, and the weights of later steps differ in the last bit.
    """
    for ddp in ({}, SHARDED):
        off, on = (train(Layout(ddp=ddp | overlap), 1, **SPARSE) for overlap in ({}, OVERLAP))
        assert off["losses"] == on["losses"]
        assert equal(off["residuals"], on["residuals"])


@pytest.mark.parametrize("enabled", [True, False])
@on_ranks(2)
def test_a_repeated_step_does_not_update_the_residual_twice(rank, enabled):
    """Same gradients and residual, as if the first had not happened.

    Where compression was switched off, the residual is sent again.
    """
    with running(Layout(), undo="always", **SPARSE) as run:
        run.step()
        run.attachment.config.compression.enabled = enabled
        batches, found = run.model.batches(), []
        for _ in range(2):
            run.model.gradients(batches)
            gradients = {b.name: b.grad_N.clone() for b in run.attachment.buckets}
            found.append((gradients, run.residuals()))
        assert all(map(equal, *found))


@on_ranks(2)
def test_a_repeat_without_undo_copy_is_a_typed_error(rank):
    with running(Layout(), **SPARSE) as run:
        run.step()
        run.model.gradients()
        with pytest.raises(SelectionError, match=r"compression\.undo=always"):
            run.model.gradients()


@on_ranks(2)
def test_the_running_switch_empties_the_residual_and_detach_restores_megatron(rank):
    from megatron_sparse.megatron import detach
    from megatron_sparse.megatron.checkpoint import save_with

    with running(Layout(), **SPARSE) as run:
        optimizer = run.model.optimizer
        optimizer.sharded_state_dict = lambda: {}  # a wrapper of the user's, before and after
        save_with(run.attachment, optimizer)
        with_plugin = optimizer.sharded_state_dict
        optimizer.sharded_state_dict = lambda: with_plugin() | {"user": 1}
        for enabled in (True, False, True):
            run.attachment.enabled = enabled
            run.step()
            assert any(view.any() for view in run.residuals().values()) is enabled
    weights = []
    for ddp in (SHARDED, SHARDED | AVERAGE):
        with running(Layout(ddp=ddp), **SPARSE) as sharded:
            for enabled in (True, False):
                sharded.attachment.enabled = enabled
                sharded.step()
            weights.append(sharded.model.weights())
    assert equal(*weights), "halves are exact, and two numbers have one sum"
    assert "step" not in run.model.optimizer.__dict__
    assert run.model.optimizer.sharded_state_dict() == {"user": 1}
    detach(run.attachment)  # again, as in a `finally`
    assert run.step()


@on_ranks(2)
def test_where_nothing_is_compressed_megatrons_own_collectives_run_and_are_recorded(rank):
    """From the second step on, and again from the second after a skipped one."""
    for layout in LAYOUTS:
        with running(layout, enabled=False) as run:
            for _ in range(3):
                run.step()
            run.attachment._step_ended(success=False, grad_norm=None)
            run.attachment.step -= 1
            for _ in range(2):
                run.step()
            names = [bucket.name for bucket in run.attachment.buckets]
        steps = [[r for r in run.records.buckets if r.step == step] for step in range(5)]
        assert all(sorted(r.bucket for r in step) == sorted(names) for step in steps)
        # The progress thread worked for the plugin's own.
        own = [any(record.host_wall_us for record in step) for step in steps]
        assert own == [True, False, False, True, False]
        assert all(step[0].timer.times_us()["network"] for step in steps)
        assert all(step[0].finished_s > step[0].launched_s for step in steps)
        sent = [[(r.wire_bytes, r.nnz, r.density, r.scheme) for r in step] for step in steps]
        assert all(sorted(step) == sorted(sent[0]) for step in sent)


@on_ranks(2)
def test_set_density_holds_from_the_next_step_on_and_ranks_that_disagree_change_nothing(rank):
    given = SparseConfig.from_overrides(**SPARSE)
    with running(Layout(), config=given) as run:
        run.step()
        with pytest.raises(CommunicationError, match="ranks want different densities") as caught:
            run.attachment.set_density(0.1 + 0.1 * rank)
        assert "rank 0: 0.1, rank 1: 0.2" in str(caught.value)
        assert run.attachment.config.compression.density == 0.05
        run.attachment.set_density(0.25)
        assert given.compression.density == 0.05, "it may serve another model too"
        run.step()
    steps = [[r for r in run.records.buckets if r.step == step] for step in range(2)]
    assert [{r.density for r in step} for step in steps] == [{0.05}, {0.25}]
    first, second = (sum(r.nnz for r in step) for step in steps)
    assert second > 2 * first


@on_ranks(2)
def test_presets_are_tried_and_every_rank_takes_the_same(rank):
    from megatron_sparse.megatron.checkpoint import _restore
    from megatron_sparse.megatron.checkpoint_layout import Saved, common_state

    with running(Layout(), config="auto", warmup_iters=2, ramp_iters=2) as run:
        for _ in range(30):
            run.step()
        state = common_state(run.attachment)["trials"]
        with pytest.raises(ConfigError, match="name a density at the start"):
            run.attachment.set_density(0.1)
    phases = {r.step: (str(r.phase), r.density) for r in run.records.buckets}
    assert of_all_ranks((phases, state)) == [(phases, state)] * 2
    assert phases[10] == ("trial", 0.22)
    # The others were tried unless the one before took too long.
    tried = list(state["times_ms"])
    assert tried == ["safe", "quantised", "lossless"][: len(tried)]
    assert len(tried) > 1
    best_ms = min(state["times_ms"].values())
    assert state["times_ms"][state["chosen"]] <= 1.02 * best_ms
    ended = {"lossless": ("off", 1.0), "quantised": ("target", 1.0), "safe": ("target", 0.22)}
    assert phases[29] == ended[state["chosen"]]
    assert sum(r.nnz for r in run.records.buckets if r.step == 29)
    with running(Layout(), config="auto") as again:
        _restore(again.attachment, Saved(30, True, trials=state))
        assert again.attachment.trials.chosen == state["chosen"]


@on_ranks(2)
def test_a_refused_attachment_gives_its_thread_and_groups_back(rank):
    with (
        pytest.raises(ConfigError, match=r"straggler\.rank"),
        running(LAYOUTS[0], straggler=StragglerConfig(mode="pinned", rank=99)),
    ):
        pass
    assert not groups._lent
    assert not [thread for thread in threading.enumerate() if thread.name == "megatron_sparse"]
