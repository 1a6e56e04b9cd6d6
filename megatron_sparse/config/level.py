"""The levels of compression, which the key `compression.level` names."""

RANK, NODE, INSTANCE, AUTO = "rank", "node", "instance", "auto"
LEVELS = (RANK, NODE, INSTANCE, AUTO)
"""Allowed values of `compression.level`: which ranks' gradients are added up before selection."""
