"""Straggler-aware reduction: schedules and their cost. Nothing here communicates."""
