"""The levels of compression, which the key `compression.level` names."""

from __future__ import annotations

RANK, NODE, INSTANCE, AUTO = "rank", "node", "instance", "auto"
NODE_INSTANCE = "node+instance"
LEVELS = (RANK, NODE, INSTANCE, NODE_INSTANCE, AUTO)
"""Allowed values of `compression.level`: which ranks' gradients are added up before selection."""
