"""What the plugin uses memory of a rank for, by item, and how many bytes a process uses now.

`doctor.memory` predicts the same items before a run.

Not counted: Megatron's own memory, the communicators' of NCCL and gloo, the caches of torch's
allocator, tables of offsets, and a few words for each bucket and step.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.reduction.reducer import GradientReducer


class Item(NamedTuple):
    """One use of memory.

    Attributes:
        purpose: what the memory contains.
        without: how to need less of it.
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
        "encoded sums; the fp32 sum of narrower gradients; on a GPU for one bucket at a time; the "
        "node's sum for two",
        "training.use_distributed_optimizer=true: a rank gets its own shard only",
    ),
    "workspace": Item(
        "scratch memory of the encoders, shared by all buckets",
        "training.overlap_grad_reduce=true: smaller buckets",
    ),
    "parameters": Item(
        "this rank's shards of the parameters once more, for exact and lossy gathers, and a bit "
        "for each parameter for exact ones",
        "parameters.method=raw",
    ),
}
"""Every use of memory that is reported, in the order in which they are shown."""

_ITEM_OF = {
    "residual": "residual",
    "undo": "undo",
    **dict.fromkeys(("message", "narrow", "shuffled", "lanes"), "messages"),
    **dict.fromkeys(("received", "incoming", "parts", "late", "given"), "received"),
    **dict.fromkeys(
        (
            *("gathered", "encoded", "outgoing", "sum", "piece", "partition", "early"),
            *("node_sum", "node_rest"),
        ),
        "sums",
    ),
    "profile": "workspace",
}
"""The item of residuals, of undo copies, and of each purpose of `MessageBuffers`."""


def item_of(purpose: str) -> str:
    """The item that a buffer belongs to; `messages` for those of other packages' schemes."""
    return _ITEM_OF.get(purpose, "messages")


def held(
    residuals: ResidualStore, reducers: Iterable[GradientReducer], parameters: int = 0
) -> dict[str, int]:
    """Bytes that the plugin uses in this process now: item of `ITEMS` -> bytes.

    `residual`, `undo` and `messages` are always included, other items only if they are in use.
    Temporary tensors within one call are not counted.

    `residuals` and `reducers` are those of all groups of ranks; `parameters` are bytes of the
    shards that exact and lossy gathers of parameters keep.
    """
    found: Counter[str] = Counter(undo=residuals.undo_nbytes, messages=0)
    found["residual"] = residuals.nbytes - residuals.undo_nbytes
    for reducer in reducers:
        for purpose, nbytes in reducer.buffers.by_purpose().items():
            found[item_of(purpose)] += nbytes
    if parameters:
        found["parameters"] = parameters
    return {item: found[item] for item in ITEMS if item in found}
