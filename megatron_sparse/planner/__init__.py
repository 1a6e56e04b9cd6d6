"""Plans: how each bucket is synchronised in a step, agreed by all ranks without talking."""

from megatron_sparse.planner.plan import FixedPlanner, Plan, Planner

__all__ = ["FixedPlanner", "Plan", "Planner"]
