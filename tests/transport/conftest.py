"""Fixtures of the transports' tests."""

from tests.collectives.conftest import forked_ranks

__all__ = ["forked_ranks"]
