"""compression.level=node and instance in Megatron: gloo ranks that count as nodes of two ranks.

With 4 ranks a node has two data-parallel ones; with 8 there are tensor parallelism inside a node,
and nodes inside an instance.
"""

import logging
import os
from dataclasses import replace

import pytest

from megatron_sparse.transport.membership import NODE_VARIABLE
from tests.megatron import test_parallel
from tests.megatron.checkpoint_cases import loaded, save
from tests.megatron.parallel_gpt import GATHERED, OVERLAP, SHARDED, Layout, parallel_state_of
from tests.megatron.test_parallel import AT_TARGET, SPARSE, report
from tests.megatron.train_ranks import equal, of_all_ranks, on_ranks, running

LAYOUTS = {
    "all_reduce": (Layout(ddp=OVERLAP), "node"),
    "overlap": (Layout(microbatches=2, ddp=SHARDED | OVERLAP), "node"),
    "param_gather": (Layout(precision="bf16", ddp=GATHERED), "auto"),
    "fp16": (Layout(precision="fp16", ddp=SHARDED | OVERLAP), "node"),
    "instances": (Layout(instances=2, ddp=SHARDED | OVERLAP), "instance"),
    **{
        name: (test_parallel.LAYOUTS[name], "node")
        for name in ("reduce_scatter", "average", "fp32_accumulation")
    },
}
"""Name -> layout and level, on 4 ranks."""
LARGE = {
    "tensor": Layout(tensor=2, ddp=SHARDED | OVERLAP),
    "expert": Layout(expert=2, experts=4, ddp=OVERLAP),
    "nodes_in_instances": Layout(instances=2, ddp=SHARDED | OVERLAP),
}
"""On 8 ranks in nodes of 4, or with instances of 2."""


def _reports(rank, layout, level, ranks_per_node=2):
    """Of all ranks, where so many consecutive ones are a node."""
    os.environ[NODE_VARIABLE] = str(rank // ranks_per_node)
    with parallel_state_of(layout):
        return of_all_ranks(report(layout, level=level))


def _assert_trains(reports):
    test_parallel.test_dense_is_megatron(reports)
    test_parallel.test_density_one_is_megatron(reports)
    test_parallel.test_copies_stay_equal_and_pruned_values_are_held_back(reports)


def _assert_all_say(reports, words):
    lines = [line for rank in reports for line in rank["sparse"]["lines"]]
    said = [line for line in lines if "compressed at level" in line]
    assert said
    assert all(words in line for line in said)


TIMEOUT_S = 1500.0
"""A test machine may be many times slower than a quiet one."""
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks(4, timeout_s=TIMEOUT_S)
def test_a_layout_trains(rank, name):
    layout, level = LAYOUTS[name]
    reports = _reports(rank, layout, level)
    if layout.precision != "fp16":  # whose first steps overflow and are skipped
        _assert_trains(reports)
    test_parallel.assert_equal_copies([each["sparse"] for each in reports])
    sparse = reports[rank]["sparse"]
    # In bytes of fp32: half of the elements.
    assert sparse["memory"]["residual"] == 2 * sparse["numel"]
    at_node = "level node: 2 nodes of 2 ranks"
    _assert_all_say(reports, "level instance" if level == "instance" else at_node)


@on_ranks(4, timeout_s=TIMEOUT_S)
def test_nodes_with_one_rank_of_a_group_run_at_level_rank(rank):
    """With two nodes and one data-parallel rank of each group on them; the start says so."""
    reports = _reports(rank, Layout(tensor=2, ddp=OVERLAP), "node")
    sparse = reports[rank]["sparse"]
    assert sparse["memory"]["residual"] == 4 * sparse["numel"]
    _assert_all_say(reports, "level rank: each node has one rank")


@on_ranks(4, timeout_s=TIMEOUT_S)
def test_a_group_on_one_node_is_dense(rank):
    """Where each data-parallel group is on one node, nothing is compressed."""
    reports = _reports(rank, Layout(pipeline=2, microbatches=2, ddp=OVERLAP), "node")
    plain, sparse = reports[rank]["plain"], reports[rank]["sparse"]
    assert sparse["losses"] == plain["losses"]
    assert sparse["memory"]["residual"] == 0
    _assert_all_say(reports, "2 ranks on one node")


def _pruning(layout, level):
    return running(layout, level=level, **SPARSE, **AT_TARGET)


def _loaded(folder, layout, level):
    """With the warnings that loading logged."""
    return loaded(folder, _pruning(layout, level), logging.WARNING)


def _held(run):
    """This rank's residuals, by parameter and first element."""
    return {key: values.clone() for key, values in run.attachment.residuals.slices()}


def _rounded(totals):
    return {name: values.float() for name, values in totals.items()}


SAVED = {name: LAYOUTS[name] for name in ("all_reduce", "overlap", "instances")} | {
    name: (test_parallel.LAYOUTS[name], "rank")
    for name in ("expert_and_tensor", "virtual_pipeline")
}
SAMPLE = ("overlap", "expert_and_tensor")
"""The others are slow tests."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SAMPLE else pytest.mark.slow) for n in SAVED]
)
@on_ranks(4, timeout_s=TIMEOUT_S)
def test_checkpoints_and_changes_of_level_keep_the_residual(rank, name, tmp_path):
    """By what was saved and what loads it."""
    os.environ[NODE_VARIABLE] = str(rank // 2)
    layout, level = SAVED[name]
    with parallel_state_of(layout):
        with _pruning(layout, level) as run:
            for _ in range(2):
                run.step()
            held, totals = _held(run), run.total_residuals()
            for mode in ("full", "sum"):
                save(run.attachment, tmp_path / mode, mode)
        assert any(values.any() for values in totals.values())
        with _loaded(tmp_path / "full", layout, level) as (again, warnings):
            assert equal(_held(again), held)
            assert warnings == [], "all parameters are known"
            again.step()
        other_buckets = replace(layout, ddp=layout.ddp | {"overlap_grad_reduce": False})
        with _loaded(tmp_path / "full", other_buckets, level) as (again, _):
            assert equal(again.total_residuals(), totals)
        for other in (level, "rank"):
            with _loaded(tmp_path / "sum", layout, other) as (again, _):
                assert equal(_rounded(again.total_residuals()), _rounded(totals))
        with _loaded(tmp_path / "full", layout, "rank") as (again, _):
            assert equal(again.total_residuals(), totals)
            save(again.attachment, tmp_path / "of ranks")
        with _loaded(tmp_path / "of ranks", layout, level) as (again, _):
            assert equal(_held(again), held)


@pytest.mark.slow  # eight processes that import Megatron
@pytest.mark.parametrize("name", LARGE)
@on_ranks(8, timeout_s=TIMEOUT_S)
def test_a_layout_of_eight_ranks_trains(rank, name):
    layout = LARGE[name]
    reports = _reports(rank, layout, "node", 2 if layout.instances > 1 else 4)
    _assert_trains(reports)
    sparse = reports[rank]["sparse"]
    # With experts, nodes have four ranks of the dense group and two of the experts'.
    assert 0 < sparse["memory"]["residual"] <= 2 * sparse["numel"]
