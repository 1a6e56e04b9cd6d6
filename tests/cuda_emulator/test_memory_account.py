"""The account of the plugin's memory on a GPU: what a reducer holds after steps there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.reduction.memory import MemoryShare, account, held
from tests.cuda_emulator.device import Place
from tests.cuda_emulator.test_no_waiting import IN_CAPACITY, STEPS, Ranks
from tests.reduction.reducers import at_target

CASES: list[tuple[CollectiveOp, dict[str, Any]]] = [
    *((op, {"scheme": name, "capacity": 1.5}) for name, op in IN_CAPACITY),
    (CollectiveOp.ALL_REDUCE, {"scheme": "direct", "capacity": 1.5, "ramp_iters": 2}),
    (CollectiveOp.ALL_REDUCE, {"scheme": "direct", "capacity": "auto"}),
    (CollectiveOp.ALL_REDUCE, {"scheme": "direct", "capacity": 1.5, "dtype": torch.bfloat16}),
    (CollectiveOp.ALL_REDUCE, {"scheme": "direct", "wire_dtype": "bf16", "warmup_iters": 1}),
]


@pytest.mark.parametrize(("op", "overrides"), CASES)
def test_the_account_is_what_is_held(place: Place, op: CollectiveOp, overrides) -> None:
    """To the byte: in capacity mode all sizes are known beforehand."""
    ranks = Ranks(op, **overrides)
    for step in range(STEPS):
        ranks.fill(step)
        ranks.step(step)
    config = at_target(samples=200, **{k: v for k, v in overrides.items() if k != "dtype"})
    for rank, each in enumerate(ranks.each):
        reducer, bucket = each.reducer, each.bucket
        found = held(reducer.selector.residuals, [reducer])
        expected = dict(account(config, [MemoryShare(rank, [bucket])], undo=False).nbytes)
        # Lent by torch's allocator for each call; and copies of tables, in a cache.
        assert expected.pop("workspace", 1) > 0
        assert expected.pop("tables", 1) > 0
        assert {item: nbytes for item, nbytes in found.items() if nbytes} == expected
