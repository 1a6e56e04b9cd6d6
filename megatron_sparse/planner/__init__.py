"""Plans: how each bucket is synchronised in a step; every rank derives the same."""

from megatron_sparse.planner.plan import Plan, Planner

__all__ = ["Plan", "Planner"]
