"""The plugin in each of Megatron's layouts, 4 gloo ranks; docs/parallelism.md has the table.

Every layout is trained in the same process: by Megatron alone, densely through the plugin, by an
exact sparse scheme at density 1, and pruned, in few bits.
"""

import pytest
import torch

from megatron_sparse.config.sparse import SparseConfig, StragglerConfig
from tests.megatron import train_ranks as harness
from tests.megatron.parallel_gpt import (
    AVERAGE,
    GATHERED,
    IN_FP32,
    OVERLAP,
    PRUNED_FROM,
    SHARDED,
    Layout,
    ParallelGPT,
    parallel_state_of,
)
from tests.megatron.train_ranks import (
    equal,
    of_all_ranks,
    on_ranks,
    running,
    train,
    train_ranks,
)

STEPS = 3
WORLD_SIZE = 4
SPARSE = {"scheme": "direct", "density": 0.1}
AT_TARGET = harness.AT_TARGET | {"keep_below_numel": PRUNED_FROM}

LAYOUTS = {
    "tensor": Layout(tensor=2),
    "sequence": Layout(tensor=2, sequence_parallel=True, ddp=OVERLAP),
    "pipeline": Layout(pipeline=2, microbatches=3, ddp=OVERLAP),
    "virtual_pipeline": Layout(
        pipeline=2, virtual=2, layers=4, microbatches=2, ddp=OVERLAP, aligned=True
    ),
    "tied_embeddings": Layout(pipeline=2, tied=True, microbatches=2, ddp=SHARDED | OVERLAP),
    "context": Layout(context=2, attention=False, ddp=OVERLAP),
    "expert": Layout(expert=2, experts=4, ddp=OVERLAP),
    "expert_and_tensor": Layout(
        tensor=2,
        sequence_parallel=True,
        expert=2,
        expert_tensor=1,
        experts=4,
        ddp=SHARDED | OVERLAP,
    ),
    "microbatches": Layout(microbatches=3, ddp=OVERLAP),
    "all_reduce": Layout(),
    "reduce_scatter": Layout(ddp=SHARDED),
    "param_gather": Layout(ddp=GATHERED),
    "average": Layout(ddp=SHARDED | OVERLAP | AVERAGE),
    "expert_average": Layout(expert=2, experts=4, ddp=AVERAGE),
    "bf16": Layout(precision="bf16", ddp=OVERLAP),
    "bf16_in_fp32": Layout(precision="bf16", ddp=OVERLAP | IN_FP32),
    "extra_main_grads": Layout(
        precision="bf16",
        microbatches=3,
        ddp=OVERLAP | {"param_name_patterns_for_fp32_local_accumulation": ("*weight",)},
    ),
    "fp32_accumulation": Layout(
        precision="bf16", ddp=SHARDED | OVERLAP | {"reduce_scatter_with_fp32_accumulation": True}
    ),
    "instances": Layout(instances=2, ddp=SHARDED),
    "instances_overlapped": Layout(
        instances=2, precision="bf16", microbatches=2, ddp=SHARDED | OVERLAP
    ),
    "instances_average": Layout(instances=2, ddp=SHARDED | OVERLAP | AVERAGE),
    "hybrid": Layout(hybrid=True, tensor=2, ddp=SHARDED | OVERLAP),
    "hybrid_pipeline": Layout(hybrid=True, pipeline=2, microbatches=2, ddp=OVERLAP),
    "muon": Layout(optimizer="muon", ddp=OVERLAP),
    "muon_layer_wise": Layout(
        optimizer="muon", layer_wise=True, precision="bf16", microbatches=2, ddp=GATHERED
    ),
    "muon_layer_wise_all_reduce": Layout(
        optimizer="muon", layer_wise=True, precision="bf16", ddp=OVERLAP
    ),
    "instances_expert": Layout(instances=2, expert=2, experts=4, ddp=SHARDED | OVERLAP),
}
TENSOR = LAYOUTS["tensor"]
ONE_RANK = Layout(tensor=2, pipeline=2)
FROZEN = Layout(
    pipeline=2,
    virtual=2,
    layers=4,
    microbatches=2,
    precision="bf16",
    trained="embedding",
    ddp=GATHERED | AVERAGE | IN_FP32 | {"check_for_nan_in_grad": True},
)
"""One chunk of four is trained, under the DDP settings of Megatron-Bridge's recipes."""


def _copies(model):
    """By parameter, which of Megatron's ranks hold a copy of it: those with the same key."""
    from megatron.core import parallel_state as state

    tensor = state.get_tensor_model_parallel_rank()
    stage = state.get_pipeline_model_parallel_rank()
    expert = state.get_expert_model_parallel_rank(), state.get_expert_tensor_parallel_rank()
    keys = {}
    for number, chunk in enumerate(model.chunks):
        for name, parameter in chunk.module.named_parameters():
            if not getattr(parameter, "allreduce", True):
                key = ("expert", stage, *expert)
            elif getattr(parameter, "tensor_model_parallel", False):
                key = ("sharded", stage, tensor)
            else:
                key = ("replicated", stage)
            keys[f"{number}.{name}"] = key
    return keys


def run_of(layout, **plugin):
    """One run: `copies` has each parameter's key and weight, `pruned` those with a residual."""
    run = train(layout, STEPS, **(AT_TARGET | plugin if plugin else {}))
    keys = _copies(run.pop("model"))
    run["copies"] = {name: (keys[name], weight) for name, weight in run.pop("weights").items()}
    run["pruned"] = {name for name, held in run.pop("residuals").items() if held.any()}
    return run


def report(layout, **plugin):
    """The results of one layout's runs on this rank, with these options of the plugin."""
    return {
        "plain": run_of(layout),
        "dense": run_of(layout, **plugin, scheme="dense"),
        "whole": run_of(layout, **plugin, scheme="direct", density=1.0)["losses"],
        # In few bits, where copies of a replicated parameter could also be rounded differently.
        "sparse": run_of(layout, **plugin, **SPARSE, value_bits=3, sum_bits=4),
        # Sums of the same numbers: one rounding in 2^24 apart in fp32, and in bf16 one in 2^8,
        # where Megatron itself rounds after every addition. Adam divides by the gradient's size, so
        # two steps later the loss is apart by that, times the learning rate of 1e-2.
        "rtol": 1e-5 if layout.precision == "fp32" else 5e-3,
    }


def _matrix(rank):
    found = {}
    for name, layout in LAYOUTS.items():
        with parallel_state_of(layout):
            found[name] = report(layout)
    return found


@pytest.fixture(scope="module")
def matrix():
    return train_ranks(_matrix, WORLD_SIZE, timeout_s=800)


@pytest.fixture
def reports(matrix, name):
    """Those of one layout, by rank."""
    return [rank[name] for rank in matrix]


# The fixture trains every layout on four ranks, which takes a busy machine minutes.
pytestmark = pytest.mark.timeout(1000)
each_layout = pytest.mark.parametrize("name", LAYOUTS)


def _assert_same_weights(one, other):
    assert equal(*({name: w for name, (_, w) in run["copies"].items()} for run in (one, other)))


@each_layout
def test_dense_is_megatron(reports):
    """Bit for bit, losses and weights."""
    for rank in reports:
        assert rank["dense"]["losses"] == rank["plain"]["losses"]
        _assert_same_weights(rank["plain"], rank["dense"])
        assert len(set(rank["plain"]["losses"])) == STEPS, "the model does not learn anything"


@each_layout
def test_density_one_is_megatron(reports):
    """Up to the order of addition."""
    for rank in reports:
        assert rank["whole"] == pytest.approx(rank["plain"]["losses"], rel=rank["rtol"])


def assert_equal_copies(runs):
    """Of all ranks: those that hold a parameter, or the same shard of it, hold the same bits."""
    first = {}
    for copies in (run["copies"] for run in runs):
        for parameter, (key, weight) in copies.items():
            copy = first.setdefault((parameter, key), weight)
            assert torch.equal(copy, weight), f"{parameter} of {key}"
    assert len(first) < sum(len(run["copies"]) for run in runs)


@each_layout
def test_copies_stay_equal_and_pruned_values_are_held_back(reports):
    assert_equal_copies([rank["sparse"] for rank in reports])
    for rank in reports:
        assert rank["sparse"]["losses"] != rank["plain"]["losses"]
        assert any("mlp" in parameter for parameter in rank["sparse"]["pruned"])


@each_layout
def test_fewer_bytes_are_sent(reports):
    for rank in reports:
        sparse, dense = (rank[kind]["records"] for kind in ("sparse", "dense"))
        assert 0 < sparse.wire_bytes < sparse.dense_bytes
        # A ring's bytes, rounded down bucket by bucket.
        assert dense.wire_bytes == pytest.approx(dense.dense_bytes, rel=1e-3)


@pytest.mark.parametrize("name", ["expert", "expert_and_tensor", "instances_expert"])
def test_experts_are_pruned(reports):
    for rank in reports:
        assert any("experts" in parameter for parameter in rank["sparse"]["pruned"])


def test_tied_embeddings_stay_tied(matrix):
    first, last = (matrix[rank]["tied_embeddings"]["sparse"]["copies"] for rank in (0, 2))
    (embedding,) = [weight for n, (_, weight) in first.items() if "word_embeddings" in n]
    (output,) = [weight for n, (_, weight) in last.items() if "output_layer" in n]
    assert torch.equal(embedding, output)


@on_ranks(WORLD_SIZE)
def test_frozen_weights_and_ranks_without_gradients(rank):
    """As with LoRA: only one chunk of the first stage has buckets."""
    with parallel_state_of(FROZEN):
        plain, dense = run_of(FROZEN), run_of(FROZEN, scheme="dense")
        sparse = run_of(FROZEN, **SPARSE)
    assert dense["losses"] == plain["losses"] != sparse["losses"]
    _assert_same_weights(plain, dense)
    for name, (_, weight) in plain["copies"].items():
        assert "embedding" in name or torch.equal(weight, sparse["copies"][name][1])
    pruned = {f"{kind}_embeddings.weight" for kind in ("word", "position") if rank < 2}
    assert {name.rpartition("embedding.")[2] for name in sparse["pruned"]} == pruned
    assert_equal_copies(of_all_ranks(sparse))


@on_ranks(WORLD_SIZE)
def test_replicated_parameters_are_kept_whole_without_global_groups(rank):
    """Before and after Megatron forgets its global groups.

    With Bridge's `use_decentralized_pg` there are none: the DDP wrap alone has the groups.
    """
    from megatron.core import parallel_state

    from megatron_sparse.megatron.buckets import collect

    config = SparseConfig.from_overrides(keep_below_numel=PRUNED_FROM)

    def kept():
        buckets = [bucket for group in collect(model.chunks, config) for bucket in group.buckets]
        return {piece.name for bucket in buckets for piece in bucket.parameters if piece.keep}

    with parallel_state_of(TENSOR):
        model = ParallelGPT(TENSOR)
        before = kept()
        parallel_state.destroy_model_parallel()
        assert kept() == before
    assert any("position_embeddings" in name for name in before), "large, but replicated"


@on_ranks(WORLD_SIZE)
def test_a_data_parallel_group_of_one_rank_is_left_alone(rank):
    """There `auto` has nothing to send."""
    with parallel_state_of(ONE_RANK):
        plain, attached = run_of(ONE_RANK), run_of(ONE_RANK, scheme="auto", density=0.1)
    assert attached["losses"] == plain["losses"]
    assert not attached["pruned"]
    assert attached["records"].wire_bytes == 0


@on_ranks(WORLD_SIZE)
def test_forced_all_reduce_is_megatrons_and_leaves_the_residual(rank):
    """A pruned step, a step as with --save-wgrads-interval, and a pruned one again."""
    for ddp in (OVERLAP, SHARDED, SHARDED | OVERLAP):
        layout = Layout(ddp=ddp)
        with parallel_state_of(layout), running(layout, **AT_TARGET, **SPARSE) as run:
            run.step()
            before = run.residuals()
            assert any(view.any() for view in before.values())
            run.model.gradients(force_all_reduce=True)
            gradients = torch.cat([bucket.grad_N.clone() for bucket in run.attachment.buckets])
            # The whole sum everywhere, with the distributed optimizer too: it is an all-reduce.
            assert all(torch.equal(gradients, other) for other in of_all_ranks(gradients))
            assert equal(before, run.residuals())
            run.model.optimizer.step()
            run.step()
            assert not equal(before, run.residuals())


@on_ranks(WORLD_SIZE)
def test_skipping_the_last_rank_gives_the_same_bits(rank):
    """Ranks add in order, then the straggler: with the last rank that is the order of `direct`."""
    layout, pinned = LAYOUTS["all_reduce"], StragglerConfig(mode="pinned", rank=WORLD_SIZE - 1)
    with parallel_state_of(layout):
        waiting = run_of(layout, **SPARSE)
        skipping = run_of(layout, **SPARSE | {"scheme": "straggler_direct"}, straggler=pinned)
    assert {record.straggler for record in skipping["records"].buckets} == {WORLD_SIZE - 1}
    assert skipping["losses"] == waiting["losses"]
    _assert_same_weights(skipping, waiting)
