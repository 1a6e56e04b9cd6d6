"""Over gloo, small messages wait for no earlier ones: round trips cost more than their bytes."""

import pytest
import torch

from megatron_sparse.collectives import POSTED, UNORDERED
from megatron_sparse.collectives.base import SMALL_BYTES, Identity, exchange_sizes, whole_group
from megatron_sparse.collectives.gather import pairwise_all_to_all
from megatron_sparse.transport import ProcessGroupTransport
from tests.collectives.fault_ranks import bucket_of

N, RANK, WORK = 4, 1, "a work"


class Gloo(ProcessGroupTransport):
    """Records what is posted."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.device = RANK, N, torch.device("cpu")
        self.posts: list[list[int]] = []

    def exchange(self, sends, receives, tag):
        self.posts.append([peer for peer, _ in sends])
        return WORK

    def _collective(self, name, post):
        self.posts.append([])
        return WORK


@pytest.mark.parametrize(("nbytes", "at_once"), [(16, True), (SMALL_BYTES, False)])
def test_rounds_of_few_bytes_are_posted_together(nbytes, at_once):
    gloo, pieces = Gloo(), [torch.zeros(nbytes, dtype=torch.uint8)] * N
    steps = pairwise_all_to_all(pieces, pieces, whole_group(gloo, 5), last=True)
    first = next(steps)
    assert gloo.posts == ([[0], [3], [2]] if at_once else [[0]])
    assert first == (POSTED if at_once else WORK)
    assert [first, *steps].count(POSTED) == 1
    assert len(gloo.posts) == N - 1


def test_a_small_gather_is_one_round_to_all_ranks():
    gloo = Gloo()
    for numel in (4, 1024):
        own = torch.zeros(numel, dtype=torch.int64)
        gloo.all_gather(own.new_empty(N * numel), own)
    assert gloo.posts == [[0, 2, 3], []], "the large one is gloo's own"


@pytest.mark.parametrize("unordered", [False, True])
def test_the_next_bucket_may_agree_before_this_ones_agreement_has_come(unordered):
    gloo, identity = Gloo(), Identity("direct", bucket_of(RANK, N), "fp32", 0)
    steps = exchange_sizes([16] * N, identity, gloo, unordered=unordered)
    assert next(steps) == (UNORDERED if unordered else WORK)
    assert gloo.posts == [[0, 2, 3]]
