"""compression.level=node and instance in Megatron: gloo ranks that count as nodes of two ranks.

One launch of 4 ranks has the layouts in which a node has two data-parallel ranks, and the
checkpoints; one of 8 ranks has tensor parallelism inside a node, and nodes inside an instance.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_sparse.run.local_ranks import run_loopback
from megatron_sparse.transport.membership import NODE_VARIABLE
from tests.megatron.checkpoint_cases import save
from tests.megatron.parallel_gpt import OVERLAP, PRUNED_FROM, SHARDED, Layout, parallel_state_of
from tests.megatron.test_parallel import _assert_equal_copies, _copies
from tests.megatron.test_pretrain import command_of
from tests.megatron.test_resume import TARGET, assert_goes_on_exactly, resumed_from
from tests.megatron.train_ranks import equal, logged, running, train, train_ranks

STEPS = 3
AT_TARGET: dict[str, Any] = {"warmup_iters": 0, "ramp_iters": 0, "keep_below_numel": PRUNED_FROM}
TWO_OF_TWO = "2 nodes of 2 ranks"

LAYOUTS = {
    "all_reduce": (Layout(ddp=OVERLAP), "node"),
    "reduce_scatter": (Layout(ddp=SHARDED), "node"),
    "overlap": (Layout(microbatches=2, ddp=SHARDED | OVERLAP), "node"),
    "param_gather": (
        Layout(precision="bf16", ddp=SHARDED | OVERLAP | {"overlap_param_gather": True}),
        "auto",
    ),
    "average": (Layout(ddp=SHARDED | OVERLAP | {"average_in_collective": True}), "node"),
    "fp16": (Layout(precision="fp16", ddp=SHARDED | OVERLAP), "node"),
    "fp32_accumulation": (
        Layout(
            precision="bf16",
            ddp=SHARDED | OVERLAP | {"reduce_scatter_with_fp32_accumulation": True},
        ),
        "node",
    ),
    "instances": (Layout(instances=2, ddp=SHARDED | OVERLAP), "instance"),
}
"""Name -> layout and level, on 4 ranks."""
CHECKPOINTS = ("all_reduce", "overlap", "instances")
ONE_EACH = {"tensor": (Layout(tensor=2, ddp=OVERLAP), "node")}
"""Two nodes with one data-parallel rank of each group: they run at level `rank`, and say so."""
ONE_NODE = {"pipeline": (Layout(pipeline=2, microbatches=2, ddp=OVERLAP), "node")}
"""Each data-parallel group is on one node, where nothing is compressed."""
LARGE = {
    "tensor": (Layout(tensor=2, ddp=SHARDED | OVERLAP), "node"),
    "expert": (Layout(expert=2, experts=4, ddp=OVERLAP), "node"),
    "nodes_in_instances": (Layout(instances=2, ddp=SHARDED | OVERLAP), "node"),
}
"""On 8 ranks in nodes of 4, or with instances of 2."""


def _train(layout, level, **plugin):
    with logged() as lines, running(layout, level=level, **AT_TARGET | plugin) as run:
        for _ in range(STEPS):
            run.step()
        attachment, copies = run.attachment, _copies(run.model)
        return {
            "losses": run.losses,
            "copies": {name: (copies[name], w) for name, w in run.model.weights().items()},
            "pruned": {name for name, held in run.residuals().items() if held.any()},
            "residual": attachment.memory_report()["residual"],
            "account": attachment.memory_account().nbytes.get("residual", 0),
            "whole": 4 * sum(bucket.numel for bucket in attachment.buckets),
            "lines": [line for line in lines if "compressed at level" in line],
        }


def _report(layout, level):
    return {
        "plain": train(layout, STEPS)["losses"],
        "dense": _train(layout, level, scheme="dense")["losses"],
        "whole": _train(layout, level, scheme="direct", density=1.0)["losses"],
        "sparse": _train(layout, level, scheme="direct", density=0.1),
        "bits": _train(layout, level, scheme="direct", density=0.1, value_bits=3, sum_bits=4),
    }


def _on_node(rank, ranks_per_node):
    os.environ[NODE_VARIABLE] = str(rank // ranks_per_node)


def _four(rank, folder):
    _on_node(rank, 2)
    reports = {}
    for name, (layout, level) in (LAYOUTS | ONE_EACH | ONE_NODE).items():
        with parallel_state_of(layout):
            reports[name] = _report(layout, level)
    for name in CHECKPOINTS:
        with parallel_state_of(LAYOUTS[name][0]):
            reports[f"checkpoint {name}"] = _checkpoints(*LAYOUTS[name], Path(folder, name))
    return reports


def _eight(rank):
    reports = {}
    for name, (layout, level) in LARGE.items():
        _on_node(rank, 2 if layout.instances > 1 else 4)
        with parallel_state_of(layout):
            reports[name] = _report(layout, level)
    return reports


def _pruning(layout, level):
    return running(layout, level=level, scheme="direct", density=0.1, **AT_TARGET)


@contextmanager
def _loaded(folder, layout, level):
    """A run with the residuals of a checkpoint, and the warnings that loading logged."""
    from megatron_sparse.megatron import checkpoint

    with _pruning(layout, level) as run:
        with logged(logging.WARNING) as warnings:
            checkpoint.load(run.attachment, folder, iteration=77)
        yield run, warnings


def _held(run):
    """This rank's residuals, by parameter and first element."""
    return {key: values.clone() for key, values in run.attachment.residuals.slices()}


def _totals(run):
    """Each parameter's residual over all ranks, in fp64: exact for sums of two fp32 numbers."""
    whole = {
        piece.name: torch.zeros(piece.stop - piece.start, dtype=torch.float64)
        for bucket in run.attachment.buckets
        for piece in bucket.parameters
    }
    for (name, start), view in _held(run).items():
        whole[name][start : start + view.numel()] += view
    for values in whole.values():
        torch.distributed.all_reduce(values)
    return whole


def _rounded(totals):
    return {name: values.float() for name, values in totals.items()}


def _checkpoints(layout, level, folder):
    """Whether residuals survive, by what was saved and what loads it."""
    with _pruning(layout, level) as run:
        for _ in range(2):
            run.step()
        held, totals = _held(run), _totals(run)
        for mode in ("full", "sum"):
            save(run.attachment, folder / mode, mode)
    found = {"any": any(values.any() for values in totals.values())}
    with _loaded(folder / "full", layout, level) as (again, warnings):
        found["own slices"] = equal(_held(again), held)
        found["all parameters known"] = warnings == []
        again.step()
    one_bucket = replace(layout, ddp=layout.ddp | {"overlap_grad_reduce": False})
    with _loaded(folder / "full", one_bucket, level) as (again, _):
        found["total in other buckets"] = equal(_totals(again), totals)
    for other in (level, "rank"):
        with _loaded(folder / "sum", layout, other) as (again, _):
            found[f"sum: total at {other}"] = equal(_rounded(_totals(again)), _rounded(totals))
    with _loaded(folder / "full", layout, "rank") as (ranks, _):
        found["total at rank"] = equal(_totals(ranks), totals)
        save(ranks.attachment, folder / "of ranks")
    with _loaded(folder / "of ranks", layout, level) as (again, _):
        found[f"of ranks: back at {level}"] = equal(_held(again), held)
    return found


TIMEOUT_S = 1500.0
"""A test machine may be many times slower than a quiet one."""
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return train_ranks(_four, 4, str(tmp_path_factory.mktemp("level")), timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def eight():
    return train_ranks(_eight, 8, timeout_s=TIMEOUT_S)


def _assert_trains(ranks, name, layout):
    # As in test_parallel: the same numbers added in another order, and Adam's division.
    rtol = 1e-5 if layout.precision == "fp32" else 5e-3
    for rank in ranks:
        report = rank[name]
        assert report["dense"] == report["plain"], "dense runs are Megatron's, bit for bit"
        assert report["whole"] == pytest.approx(report["plain"], rel=rtol)
        assert report["sparse"]["losses"] != report["plain"]
        assert any("mlp" in parameter for parameter in report["sparse"]["pruned"])
    for run in ("sparse", "bits"):
        _assert_equal_copies([rank[name][run]["copies"] for rank in ranks])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains(four, name):
    layout, level = LAYOUTS[name]
    if layout.precision != "fp16":  # whose first steps overflow and are skipped
        _assert_trains(four, name, layout)
    _assert_equal_copies([rank[name]["sparse"]["copies"] for rank in four])
    for rank in four:
        sparse = rank[name]["sparse"]
        assert sparse["residual"] == sparse["account"] == sparse["whole"] // 2
    said = [line for rank in four for line in rank[name]["sparse"]["lines"]]
    expected = "level instance" if level == "instance" else f"level node: {TWO_OF_TWO}"
    assert said
    assert all(expected in line for line in said)


@pytest.mark.parametrize("name", ONE_EACH)
def test_nodes_with_one_rank_of_a_group_run_at_level_rank(four, name):
    for rank in four:
        sparse = rank[name]["sparse"]
        assert sparse["residual"] == sparse["whole"]
    said = [line for rank in four for line in rank[name]["sparse"]["lines"]]
    assert said
    assert all("level rank: each node has one rank" in line for line in said)


@pytest.mark.parametrize("name", ONE_NODE)
def test_a_group_on_one_node_is_dense(four, name):
    for rank in four:
        report = rank[name]
        assert report["sparse"]["losses"] == report["bits"]["losses"] == report["plain"]
        assert report["sparse"]["residual"] == 0
    said = [line for rank in four for line in rank[name]["sparse"]["lines"]]
    assert said
    assert all("2 ranks on one node" in line for line in said)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_and_changes_of_level_keep_the_residual(four, name):
    for rank in four:
        found = rank[f"checkpoint {name}"]
        assert [case for case, holds in found.items() if not holds] == []


def _train_on_two_nodes(folder, name, *overrides):
    """A run whose 4 ranks are started on this machine and count as 2 nodes; its folder."""
    command = command_of(
        folder,
        name,
        "cluster.nodes=2",
        "cluster.ranks_per_node=2",
        "compression.level=node",
        "scheme=direct",
        "training.global_batch_size=8",
        "training.overlap_grad_reduce=true",
        "training.use_distributed_optimizer=true",
        "parameters.method=exact",
        "parameters.verify_every=1",
        *TARGET,
        *overrides,
    )
    with (folder / f"{name}.log").open("w") as log:
        code = run_loopback(command, 4, log)
    assert code == 0, (folder / f"{name}.log").read_text()[-6000:]
    return folder / name


def test_resuming_is_bit_exact(tmp_path):
    whole = _train_on_two_nodes(tmp_path, "whole")
    resumed = _train_on_two_nodes(tmp_path, "resumed", *resumed_from(whole))
    tensors = assert_goes_on_exactly(resumed, whole)
    residuals = [value for name, value in tensors.items() if ".residual." in name]
    assert residuals
    assert all(len(rows) == 2 for rows in residuals), "one for each node"
    assert all(any(bool(rows[row].any()) for rows in residuals) for row in range(2))
    said = (tmp_path / "whole.log").read_text()
    assert f"level node: {TWO_OF_TWO}" in said
    assert "once per node" in said, "parameters take the lanes"


@pytest.mark.slow  # eight processes that import Megatron
@pytest.mark.parametrize("name", LARGE)
def test_a_layout_of_eight_ranks_trains(eight, name):
    _assert_trains(eight, name, LARGE[name][0])
    for rank in eight:
        sparse = rank[name]["sparse"]
        # With experts, nodes have four ranks of the dense group and two of the experts'.
        assert 0 < sparse["residual"] <= sparse["whole"] // 2
