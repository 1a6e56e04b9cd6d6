"""Straggler-aware reduction: schedules, their proof, their cost. Nothing here communicates."""
