"""The levels of compression, which the key `compression.level` names."""

from __future__ import annotations

RANK, NODE, INSTANCE, AUTO = "rank", "node", "instance", "auto"
LEVELS = (RANK, NODE, INSTANCE, AUTO)
"""Allowed values of `compression.level`: which ranks' gradients are added up before selection."""
