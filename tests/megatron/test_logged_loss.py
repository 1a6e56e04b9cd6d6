"""The training loss that Megatron logs, averaged while the backward pass runs."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.megatron.train_ranks import on_ranks


@on_ranks(2)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_it_is_megatrons_average(rank, micro_batches):
    """Weighted by tokens: ranks and micro-batches have different numbers of them."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    from megatron_sparse.megatron.batches import loss_function
    from megatron_sparse.megatron.logged_loss import LoggedLoss

    init_num_microbatches_calculator(rank, None, 2 * micro_batches, 1, 2)
    generator = torch.Generator().manual_seed(rank)
    batches = [
        (
            (torch.rand(3, 5, generator=generator) < 0.3 + 0.4 * rank).float(),
            torch.rand(3, 5, generator=generator).requires_grad_(),
        )
        for _ in range(micro_batches)
    ]

    def forward_step(mask):
        return "output", lambda losses: loss_function(mask, losses)

    model = SimpleNamespace(pg_collection=SimpleNamespace(dp_cp=dist.group.WORLD))
    forward = LoggedLoss(forward_step, [model]).forward_step
    for _ in range(2):  # Megatron may repeat an iteration
        averages = []
        for mask, losses in batches:
            loss, tokens, logged = forward(mask)[1](losses)
            averages.append(logged["lm loss"].fill_(math.nan))  # written after the backward pass
            loss /= tokens  # in place, as Megatron does
            loss.backward()
        total = torch.vstack([loss_function(*batch)[2]["lm loss"] for batch in batches]).sum(dim=0)
        dist.all_reduce(total)
        assert torch.cat(averages).mean() == total[0] / total[1]


def test_it_leaves_to_megatron_what_megatron_does_not_reduce():
    from megatron_sparse.megatron.logged_loss import LoggedLoss

    loss = torch.ones((), requires_grad=True)
    pair = {"lm loss": torch.ones(2)}
    results = [
        (loss, {"lm loss": torch.ones(1)}),  # averaged by the script
        (loss, 3, {"lm loss": torch.ones(1)}),
        (loss.detach(), 3, pair),  # a validation
        {"logits": loss},
    ]
    model = SimpleNamespace(pg_collection=SimpleNamespace(dp_cp=None))
    for result in results:
        step = LoggedLoss(lambda result=result: ("output", lambda _: result), [model])
        assert step.forward_step()[1]("output") is result
