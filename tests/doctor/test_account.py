"""The account of the plugin's memory, of buckets without memory."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.config.sparse import SparseConfig, StragglerConfig
from megatron_sparse.doctor.memory import MemoryAccount, account
from tests.reduction import reducers

NUMEL, RANKS = 2**20, 8


def bucket(name: str = "0", *, device: str = "cuda", numel: int = NUMEL) -> Bucket:
    """A bucket of two pruned parameters and a kept one, without memory."""
    with FakeTensorMode():
        grad_N = torch.empty(numel, device=device)
    half = numel // 2
    pieces = [
        ParameterSlice("v", 0, half),
        ParameterSlice("b", half, half + 64, keep=True),
        ParameterSlice("w", half + 64, numel),
    ]
    return Bucket(name, grad_N, pieces, CollectiveOp.ALL_REDUCE, RANKS)


at_target = partial(reducers.at_target, scheme="direct", density=0.01, sum_bits=None)
"""A configuration without warm-up and ramp."""


NODES = (0, 0, 0, 0, 1, 1, 1, 1)


def of(
    config: SparseConfig, *buckets: Bucket, nodes: Sequence[int] = NODES, undo: bool = False
) -> MemoryAccount:
    return account(config, buckets, nodes, undo=undo)


def test_on_a_gpu_only_residuals_grow_with_the_number_of_buckets() -> None:
    one, four = of(at_target(), bucket()), of(at_target(), *(bucket(str(i)) for i in range(4)))
    assert four.nbytes["residual"] == 4 * one.nbytes["residual"]
    assert four.nbytes["messages"] == 2 * one.nbytes["messages"]
    for item in ("received", "sums", "workspace"):
        assert four.nbytes[item] == one.nbytes[item]


def test_the_ramp_s_first_step_counts() -> None:
    ramp = at_target(ramp_iters=1000, ramp_start_density=0.25)
    start = at_target(density=0.25)
    assert of(ramp, bucket()).nbytes["messages"] == of(start, bucket()).nbytes["messages"]


@pytest.mark.parametrize("op", list(CollectiveOp))
def test_at_level_node_residual_and_messages_are_those_of_a_part(op: CollectiveOp) -> None:
    whole = replace(bucket(), op=op)
    found = of(at_target(level="node"), whole, undo=True)
    at_rank = of(at_target(), whole, undo=True)
    assert found.parameters == at_rank.parameters
    for item in ("residual", "undo"):
        assert found.nbytes[item] == pytest.approx(at_rank.nbytes[item] / 4)
    assert found.nbytes["messages"] == pytest.approx(at_rank.nbytes["messages"] / 4, rel=0.1)
    if op is CollectiveOp.REDUCE_SCATTER:
        assert found.nbytes["sums"] >= NUMEL // 4 * 4, "the shards of a part, back to back"


def test_sums_of_narrow_gradients_inside_a_node_count_once() -> None:
    """Over gloo ranks send pieces and add them in fp32, whether Megatron asks for it or not."""
    with FakeTensorMode():
        narrow = replace(bucket(), grad_N=torch.empty(NUMEL, dtype=torch.bfloat16))
    asked = of(at_target(level="node"), replace(narrow, fp32_sums=True))
    assert asked.nbytes == pytest.approx(of(at_target(level="node"), narrow).nbytes, rel=0.001)


def test_a_dense_run_holds_nothing() -> None:
    assert not of(at_target(scheme="dense"), bucket(), undo=True).nbytes
    assert of(at_target(enabled=False), bucket(), undo=True).total == 0


def test_capacity_sizes_messages_by_density() -> None:
    """8 bytes for 1.25 % of the elements, against room for all of them."""
    fixed, sent = of(at_target(), bucket()), of(at_target(capacity=None), bucket())
    assert fixed.nbytes["messages"] == pytest.approx(0.0125 * 8 * NUMEL, rel=0.06)
    assert sent.nbytes["messages"] == pytest.approx(4 * NUMEL, rel=0.001)
    auto_on_cpu = of(at_target(), bucket(device="cpu"))
    assert auto_on_cpu.nbytes["messages"] == sent.nbytes["messages"]


def test_lossless_parameters_are_received_whole() -> None:
    """Half of the bucket, of seven other ranks; of the other half a hundredth."""
    plain = bucket(device="cpu")
    first, *others = plain.parameters
    half = replace(plain, parameters=[replace(first, lossless=True), *others])
    config = at_target(scheme="agsparse", capacity=None)
    found, pruned = (of(config, each).nbytes["received"] for each in (half, plain))
    assert found - pruned == pytest.approx(7 * 4 * NUMEL / 2, rel=0.05)


def test_few_bits_take_a_workspace_with_room_for_all_values() -> None:
    """fp32 for every element, two bitmaps and 1/16 byte for the groups; and that of sums."""
    few = of(at_target(density=0.05, value_bits=4), bucket()).nbytes["workspace"]
    assert (4 + 2 / 8 + 1 / 16) * NUMEL < few < 4.75 * NUMEL


def test_a_scheme_that_skips_a_rank_takes_the_straggler_s_records_too() -> None:
    straggler = StragglerConfig(mode="pinned", rank=1)
    skips, waits = of(at_target(straggler=straggler), bucket()), of(at_target(), bucket())
    assert not skips.notes
    assert skips.nbytes["received"] > waits.nbytes["received"]


def test_a_hierarchy_takes_its_buffers_by_the_ranks_of_its_nodes() -> None:
    """Two nodes of four: three parts of a quarter of the bucket. Nodes of one rank: none."""
    config, fp32 = at_target(scheme="hierarchical", capacity=None), 4 * NUMEL
    pairs, alone = (
        of(config, bucket(), nodes=nodes).nbytes["received"] for nodes in (NODES, range(RANKS))
    )
    assert 0.75 * fp32 < pairs < 0.85 * fp32
    assert alone < 0.1 * fp32
