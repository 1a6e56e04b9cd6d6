"""Straggler-aware reduction: schedules, their proof, their cost. Nothing here communicates."""

from megatron_sparse.straggler.cost import (
    Cost,
    allpairs_cost,
    broadcast_cost,
    critical_delay_s,
    rhd_cost,
    ring_cost,
    straggler_aware_cost,
)
from megatron_sparse.straggler.generate import make_schedule
from megatron_sparse.straggler.schedule import Schedule, Transfer
from megatron_sparse.straggler.verify import verify

__all__ = [
    "Cost",
    "Schedule",
    "Transfer",
    "allpairs_cost",
    "broadcast_cost",
    "critical_delay_s",
    "make_schedule",
    "rhd_cost",
    "ring_cost",
    "straggler_aware_cost",
    "verify",
]
