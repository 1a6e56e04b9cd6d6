"""The items of the account of the plugin's memory, and which buffers belong to each."""

from __future__ import annotations

from typing import NamedTuple


class Item(NamedTuple):
    """An item of the account.

    Attributes:
        purpose: why the plugin holds it.
        without: how to do with less of it.
    """

    purpose: str
    without: str


ITEMS = {
    "residual": Item(
        "the part of gradients that was not sent yet", "compression.residual_dtype=bf16 halves it"
    ),
    "undo": Item(
        "a copy of the residual, to undo a step that is skipped or repeated",
        "megatron.rerun_mode=disabled, in runs without fp16 and without a loss per token",
    ),
    "messages": Item(
        "this rank's encoded selection; values in a narrower dtype; on a GPU for two buckets",
        "scheme.capacity: buffers as large as the density needs, not as the bucket",
    ),
    "received": Item(
        "records that peers have sent; on a GPU for one bucket at a time",
        "scheme=direct: one shard of each peer's message, not all of it",
    ),
    "sums": Item(
        "encoded sums; the fp32 sum of narrower gradients; on a GPU for one bucket at a time",
        "training.use_distributed_optimizer=true: a rank gets its own shard only",
    ),
    "workspace": Item(
        "scratch memory of the encoders, shared by all buckets",
        "training.overlap_grad_reduce=true: smaller buckets",
    ),
    "parameters": Item(
        "this rank's shards of the parameters once more, for exact and lossy gathers",
        "parameters.method=raw",
    ),
    "tables": Item("offsets of segments, shards and slots", "a shorter compression.ramp_iters"),
}
"""Every item that an account or a report may have, in the order in which they are shown."""

_ITEM_OF = {
    **dict.fromkeys(("message", "narrow", "shuffled", "lanes"), "messages"),
    **dict.fromkeys(("received", "incoming", "parts", "late", "given"), "received"),
    **dict.fromkeys(
        (
            *("gathered", "encoded", "outgoing", "sum", "piece", "partition", "early"),
            *("node_sum", "node_rest"),
        ),
        "sums",
    ),
    **dict.fromkeys(("scratch", "profile"), "workspace"),
}
"""The item of each purpose of `MessageBuffers`."""


def item_of(purpose: str) -> str:
    """The item that a buffer belongs to; `messages` for those of other packages' schemes."""
    return _ITEM_OF.get(purpose, "messages")
