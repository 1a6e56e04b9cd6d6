"""Which ranks share a node: the sources, and answers that contradict one another."""

import os

import pytest
import torch

from megatron_sparse.errors import ConfigError
from megatron_sparse.transport import ProcessGroupTransport
from megatron_sparse.transport.membership import (
    NODE_VARIABLE,
    NodeAnswer,
    agreed_nodes,
    node_of_cluster,
)
from tests.ranks import on_ranks

CPU = torch.device("cpu")
TORCHRUN = {"GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {"SLURM_NODEID": "1", "SLURM_PROCID": "3"}


def _nodes(*ranks):
    """The nodes of ranks that are given as (environment, host)."""
    return agreed_nodes([NodeAnswer.of(*rank) for rank in ranks])


@pytest.mark.parametrize(
    ("ranks", "nodes"),
    [
        ([({}, "a"), ({}, "b"), ({}, "a")], (0, 1, 0)),
        # As in containers that all have one name, or two launchers on one machine.
        *(
            ([*[(launcher | {variable: "0"}, "x")] * 2, *[(launcher, "x")] * 2], (0, 0, 2, 2))
            for variable, launcher in (("GROUP_RANK", TORCHRUN), ("SLURM_NODEID", SRUN))
        ),
        ([({NODE_VARIABLE: str(node)} | TORCHRUN, "x") for node in (0, 0, 0, 5)], (0, 0, 0, 3)),
    ],
)
def test_a_given_number_comes_before_a_launchers_node_and_that_before_host_names(ranks, nodes):
    assert _nodes(*ranks) == nodes


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([(TORCHRUN, "a"), ({}, "a")], r"different sources[\s\S]*rank 1: the host's name"),
        ([(SRUN, "a"), (SRUN, "b")], "ranks of different hosts on one node"),
        # Two launchers on one machine with the same node rank.
        ([(TORCHRUN, "a")] * 3, "more ranks than its launcher has started"),
        ([({NODE_VARIABLE: "first"}, "a")], f"{NODE_VARIABLE} does not say"),
    ],
)
def test_answers_that_contradict_one_another_are_refused(ranks, words):
    with pytest.raises(ConfigError, match=words):
        _nodes(*ranks)


def test_one_machine_stands_for_the_nodes_of_the_configuration():
    started = [{"RANK": str(rank), "LOCAL_WORLD_SIZE": "4"} for rank in range(4)]
    found = [node_of_cluster(each, 2, 2).get(NODE_VARIABLE) for each in started]
    assert found == ["0", "0", "1", "1"]
    assert node_of_cluster(started[0], 1, 4) == {}
    assert node_of_cluster(started[0] | {"LOCAL_WORLD_SIZE": "2"}, 2, 2) == {}
    assert node_of_cluster(started[0] | {NODE_VARIABLE: "7"}, 2, 2) == {}


@on_ranks(4)
def test_gloo_ranks_agree_or_all_raise_the_error(rank):
    os.environ[NODE_VARIABLE] = str(rank // 2)
    transport = ProcessGroupTransport(range(4), 30.0, CPU)
    assert transport.nodes == (0, 0, 2, 2)
    transport.close()
    if rank == 3:
        del os.environ[NODE_VARIABLE]
    with pytest.raises(ConfigError, match="different sources"):
        ProcessGroupTransport(range(4), 30.0, CPU)
