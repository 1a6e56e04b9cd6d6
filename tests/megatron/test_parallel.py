"""The plugin in each of Megatron's layouts, 4 gloo ranks; docs/parallelism.md has the table.

Every layout is trained in the same process: by Megatron alone, densely through the plugin, by two
exact sparse schemes at density 1, and pruned.
"""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.cuda_ext.record_spec import KEEP_ALL
from tests.megatron import train_ranks as harness
from tests.megatron.parallel_gpt import (
    OVERLAP,
    PRUNED_FROM,
    SHARDED,
    Layout,
    ParallelGPT,
    parallel_state_of,
)
from tests.megatron.train_ranks import in_each_layout, running, train, train_ranks

STEPS = 3
WORLD_SIZE = 4
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
    "param_gather": Layout(ddp=SHARDED | OVERLAP | {"overlap_param_gather": True}),
    "average": Layout(ddp=SHARDED | OVERLAP | {"average_in_collective": True}),
    "expert_average": Layout(expert=2, experts=4, ddp={"average_in_collective": True}),
    "bf16": Layout(precision="bf16", ddp=OVERLAP),
    "bf16_in_fp32": Layout(precision="bf16", ddp=OVERLAP | {"grad_reduce_in_fp32": True}),
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
    "instances_average": Layout(
        instances=2, ddp=SHARDED | OVERLAP | {"average_in_collective": True}
    ),
    "hybrid": Layout(hybrid=True, tensor=2, ddp=SHARDED | OVERLAP),
    "hybrid_pipeline": Layout(hybrid=True, pipeline=2, microbatches=2, ddp=OVERLAP),
    "muon": Layout(optimizer="muon", ddp=OVERLAP),
    "muon_layer_wise": Layout(
        optimizer="muon",
        layer_wise=True,
        precision="bf16",
        microbatches=2,
        ddp=SHARDED | OVERLAP | {"overlap_param_gather": True},
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
    ddp=dict.fromkeys(
        (
            "use_distributed_optimizer",
            "overlap_grad_reduce",
            "overlap_param_gather",
            "average_in_collective",
            "grad_reduce_in_fp32",
            "check_for_nan_in_grad",
        ),
        True,
    ),
)
"""One chunk of four is trained, under the DDP settings of Megatron-Bridge's recipes."""
FORCED = [Layout(ddp=OVERLAP), Layout(ddp=SHARDED), Layout(ddp=SHARDED | OVERLAP)]


def _train(layout, **plugin):
    run = train(layout, STEPS, **(AT_TARGET | plugin if plugin else {}))
    run["pruned"] = {name for name, residual in run["residuals"].items() if residual.any()}
    return run


def _bytes(run):
    return run["records"].wire_bytes, run["records"].dense_bytes


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


def _with_keys(run):
    keys = _copies(run["model"])
    return {name: (keys[name], weight) for name, weight in run["weights"].items()}


def _report(layout):
    """The results of one layout's runs on this rank."""
    plain = _train(layout)
    dense = _train(layout, scheme="dense")
    whole = {name: _train(layout, scheme=name, density=1.0) for name in ("agsparse", "direct")}
    sparse = _train(layout, scheme="direct", density=0.1)
    bits = _train(layout, scheme="direct", density=0.1, value_bits=3, sum_bits=4)
    return {
        "plain": plain["losses"],
        "dense": dense["losses"],
        "differing": [n for n, w in plain["weights"].items() if not w.equal(dense["weights"][n])],
        "whole": {name: run["losses"] for name, run in whole.items()},
        "sparse": sparse["losses"],
        "pruned": sparse["pruned"],
        "bytes": _bytes(sparse),
        "dense bytes": _bytes(dense),
        "copies": _with_keys(sparse),
        "copies of few bits": _with_keys(bits),
    }


def _thresholds(scope):
    """This rank's tensor-parallel rank, thresholds of the pruned ranges by step, and weights."""
    from megatron.core import parallel_state

    run = _train(TENSOR, scheme="direct", density=0.1, threshold_scope=scope)
    rank = parallel_state.get_tensor_model_parallel_rank()
    records = [r.thresholds_R for r in run["records"].buckets if r.thresholds_R is not None]
    pruned = [thresholds_R[thresholds_R > KEEP_ALL].unique().tolist() for thresholds_R in records]
    return rank, pruned, _with_keys(run)


def _one_rank(layout):
    """A data-parallel group of one rank, where `auto` has nothing to send."""
    plain, attached = _train(layout), _train(layout, scheme="auto", density=0.1)
    return plain["losses"], attached["losses"], attached["pruned"], _bytes(attached)[0]


def _forced(layout):
    """A pruned step, a step as with --save-wgrads-interval, and a pruned one again."""

    def held():
        return torch.cat([residual for _, residual in sorted(run.residuals().items())])

    with running(layout, scheme="direct", density=0.1, **AT_TARGET) as run:
        run.step()
        residuals = [held()]
        run.model.gradients(force_all_reduce=True)
        gradients = torch.cat([bucket.grad_N.clone() for bucket in run.attachment.buckets])
        residuals.append(held())
        run.model.optimizer.step()
        run.step()
        residuals.append(held())
    return residuals, gradients


def _without_global_groups(layout):
    """Which parameters are kept whole, before and after Megatron forgets its global groups.

    With Bridge's `use_decentralized_pg` there are none: the DDP wrap alone has the groups.
    """
    from megatron.core import parallel_state

    from megatron_sparse.megatron.buckets import collect

    model = ParallelGPT(layout)
    config = SparseConfig.from_overrides(keep_below_numel=PRUNED_FROM)

    def kept():
        buckets = [bucket for group in collect(model.chunks, config) for bucket in group.buckets]
        return {piece.name for bucket in buckets for piece in bucket.parameters if piece.keep}

    before = kept()
    parallel_state.destroy_model_parallel()
    return before, kept()


def _frozen(layout):
    """Losses, weights and pruned parameters: of Megatron alone, and through the plugin."""
    runs = {"plain": _train(layout), "dense": _train(layout, scheme="dense")}
    runs["sparse"] = _train(layout, scheme="direct", density=0.1)
    return {name: (run["losses"], _with_keys(run), run["pruned"]) for name, run in runs.items()}


def _matrix(rank):
    reports = in_each_layout(LAYOUTS, _report)
    with parallel_state_of(TENSOR):
        reports["thresholds"] = {s: _thresholds(s) for s in ("tp_group", "bucket")}
    with parallel_state_of(ONE_RANK):
        reports["one rank"] = _one_rank(ONE_RANK)
    with parallel_state_of(TENSOR):
        reports["without global groups"] = _without_global_groups(TENSOR)
    with parallel_state_of(FROZEN):
        reports["frozen"] = _frozen(FROZEN)
    for layout in FORCED:
        with parallel_state_of(layout):
            reports.setdefault("forced", []).append(_forced(layout))
    return reports


@pytest.fixture(scope="module")
def matrix():
    return train_ranks(_matrix, WORLD_SIZE, timeout_s=800)


# The fixture trains every layout on four ranks, which takes a busy machine minutes.
pytestmark = pytest.mark.timeout(1000)
each_layout = pytest.mark.parametrize("name", LAYOUTS)


@each_layout
def test_dense_is_megatron(matrix, name):
    """Bit for bit, losses and weights."""
    for rank in matrix:
        assert rank[name]["dense"] == rank[name]["plain"]
        assert rank[name]["differing"] == []
        assert len(set(rank[name]["plain"])) == STEPS, "the model does not learn anything"


@each_layout
def test_density_one_is_megatron(matrix, name):
    """Up to the order of addition."""
    # Sums of the same numbers: one rounding in 2^24 apart in fp32, and in bf16 one in 2^8, where
    # Megatron itself rounds after every addition. Adam divides by the gradient's size, so two
    # steps later the loss is apart by that, times the learning rate of 1e-2.
    rtol = 1e-5 if LAYOUTS[name].precision == "fp32" else 5e-3
    for rank in matrix:
        for losses in rank[name]["whole"].values():
            assert losses == pytest.approx(rank[name]["plain"], rel=rtol)


def _assert_equal_copies(ranks):
    first = {}
    for copies in ranks:
        for parameter, (key, weight) in copies.items():
            copy = first.setdefault((parameter, key), weight)
            assert torch.equal(copy, weight), f"{parameter} of {key}"
    assert len(first) < sum(map(len, ranks))


@each_layout
def test_copies_stay_equal(matrix, name):
    """Pruned: all ranks that hold a parameter, or the same shard of it, hold the same bits."""
    _assert_equal_copies([rank[name]["copies"] for rank in matrix])
    _assert_equal_copies([rank[name]["copies of few bits"] for rank in matrix])


@each_layout
def test_pruned_values_are_held_back(matrix, name):
    for rank in matrix:
        assert rank[name]["sparse"] != rank[name]["plain"]
        assert any("mlp" in parameter for parameter in rank[name]["pruned"])
        wire, dense = rank[name]["bytes"]
        assert 0 < wire < dense
        # A ring's bytes, rounded down bucket by bucket.
        assert rank[name]["dense bytes"][0] == pytest.approx(rank[name]["dense bytes"][1], rel=1e-3)


@pytest.mark.parametrize("name", ["expert", "expert_and_tensor", "instances_expert"])
def test_experts_are_pruned(matrix, name):
    for rank in matrix:
        assert any("experts" in parameter for parameter in rank[name]["pruned"])


def test_tied_embeddings_stay_tied(matrix):
    first, last = (matrix[rank]["tied_embeddings"]["copies"] for rank in (0, 2))
    (embedding,) = [weight for n, (_, weight) in first.items() if "word_embeddings" in n]
    (output,) = [weight for n, (_, weight) in last.items() if "output_layer" in n]
    assert torch.equal(embedding, output)


def test_one_threshold_for_the_ranks_of_a_tensor_parallel_group(matrix):
    """With threshold_scope=bucket each rank has its own; with tp_group they share one."""
    for scope, shared in (("tp_group", True), ("bucket", False)):
        ranks, thresholds, copies = zip(*(r["thresholds"][scope] for r in matrix), strict=True)
        assert ranks == (0, 1, 0, 1)
        assert all(len(of_bucket) == 1 for step in thresholds for of_bucket in step)
        assert len(thresholds[0]) == STEPS, "one bucket, without overlap"
        for first, second in ((0, 1), (2, 3)):
            assert (thresholds[first] == thresholds[second]) is shared
        assert thresholds[0] != thresholds[2], "another tensor-parallel group"
        # Even with their own thresholds, ranks must not prune parameters that they hold copies of.
        _assert_equal_copies(copies)


def test_frozen_weights_and_ranks_without_gradients(matrix):
    """As with LoRA: only one chunk of the first stage has buckets."""
    pruned = {f"{kind}_embeddings.weight" for kind in ("word", "position")}
    for number, rank in enumerate(matrix):
        plain, dense, sparse = (rank["frozen"][kind] for kind in ("plain", "dense", "sparse"))
        assert dense[0] == plain[0] != sparse[0]
        for name, (_, weight) in plain[1].items():
            assert torch.equal(weight, dense[1][name][1])
            assert "embedding" in name or torch.equal(weight, sparse[1][name][1])
        first_stage = number < 2
        assert {n.rpartition("embedding.")[2] for n in sparse[2]} == (
            pruned if first_stage else set()
        )
    _assert_equal_copies([rank["frozen"]["sparse"][1] for rank in matrix])


def test_replicated_parameters_are_kept_whole_without_global_groups(matrix):
    for rank in matrix:
        before, after = rank["without global groups"]
        assert after == before
        assert any("position_embeddings" in name for name in before), "large, but replicated"


def test_a_data_parallel_group_of_one_rank_is_left_alone(matrix):
    for rank in matrix:
        plain, attached, pruned, wire = rank["one rank"]
        assert attached == plain
        assert not pruned
        assert wire == 0


def test_forced_all_reduce_is_megatrons_and_leaves_the_residual(matrix):
    for forced in zip(*(rank["forced"] for rank in matrix), strict=True):
        for residuals, gradients in forced:
            assert residuals[0].any()
            assert torch.equal(residuals[0], residuals[1])
            assert not torch.equal(residuals[1], residuals[2])
            # The whole sum everywhere, with the distributed optimizer too: it is an all-reduce.
            assert torch.equal(gradients, forced[0][1])
