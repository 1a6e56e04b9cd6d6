"""Collectives: one file per algorithm, written against `Transport` and the wire formats.

Each collective is a generator that yields the works it must wait for, so that one thread can drive
many of them at once (`reduction.progress`). It yields `POSTED` when it will post nothing more, or
`UNORDERED` when its remaining posts need no order. From then on the next bucket may post while this
one still waits and decodes.

`SCHEMES` maps each value of `scheme.name` to its scheme.
"""

from megatron_sparse.collectives.base import POSTED, QUEUED, UNORDERED, Exchange, Steps
from megatron_sparse.collectives.registry import (
    AUTO,
    SCHEMES,
    candidates,
    check,
    check_capacity,
    check_names,
    check_op,
    skips_straggler,
)
from megatron_sparse.collectives.scheme import Input, Scheme

__all__ = [
    "AUTO",
    "POSTED",
    "QUEUED",
    "SCHEMES",
    "UNORDERED",
    "Exchange",
    "Input",
    "Scheme",
    "Steps",
    "candidates",
    "check",
    "check_capacity",
    "check_names",
    "check_op",
    "skips_straggler",
]
