"""A scheme: a collective, and the facts that the rest of the program needs to use it.

Every file of this package that holds a scheme ends with `SCHEME = Scheme(...)`; the registry finds
it there. docs/adding-a-scheme.md shows how to write one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from megatron_sparse.bucket import Bucket, CollectiveOp, Cuts
from megatron_sparse.collectives.base import Steps
from megatron_sparse.config.sparse import SchemeConfig

ALL_REDUCE_ONLY = frozenset({CollectiveOp.ALL_REDUCE})


class Input(StrEnum):
    """The input that a collective takes from each rank."""

    DENSE = "dense"
    SPARSE = "sparse"


@dataclass(frozen=True)
class Scheme:
    """A collective and the facts that are needed to use it.

    Attributes:
        name: as in `scheme.name`; also its module's.
        takes: a `DENSE` scheme runs on the whole gradient, a `SPARSE` one on an encoded message.
        run: the collective: a `DenseCollective` or a `SparseCollective`.
        place: tables and lists are sorted by it. If schemes have the same predicted time, the
            planner takes the one with the lowest place.
        cost: predicts the time: runs the scheme's rounds, without data, on the modelled clocks of a
            `DryRun`. None: the planner never chooses the scheme.
        ops: the operations that it can compute.
        needs_shards: its messages are cut at the shards' borders even for an all-reduce.
        sends_by_shard: it sends a message of shards by `direct.split`, so each may be encoded while
            the one before is sent.
        extra_cuts: further elements of a bucket, beside its shards' borders, at which its messages
            are cut.
        own_format: the format of its messages; None: the one that `scheme.format` names.
        sends_whole: its messages hold every element, quantised (`MessageSpec.whole`).
        takes_slots: it takes messages of fixed size, which `scheme.capacity` asks for.
        has_engine: with `scheme.nccl_engine` a bucket is one call of C++ (`nccl_sum`).
        skips_straggler: it does not wait for `Exchange.straggler`, and needs `straggler.mode` to
            name one.
        waits_on_cuda: on CUDA the CPU waits for the GPU many times for each record; the predicted
            costs leave that out.
    """

    name: str
    takes: Input
    run: Callable[..., Steps]
    place: int
    cost: Callable[..., None] | None = None
    ops: frozenset[CollectiveOp] = frozenset(CollectiveOp)
    needs_shards: bool = False
    sends_by_shard: bool = False
    extra_cuts: Callable[[Bucket], Cuts] = lambda _: ()
    own_format: str | None = None
    sends_whole: bool = False
    takes_slots: bool = False
    has_engine: bool = False
    skips_straggler: bool = False
    waits_on_cuda: bool = False

    @property
    def takes_all(self) -> bool:
        """Whether every element travels, whatever the density."""
        return self.takes is Input.DENSE or self.sends_whole

    def message_format(self, options: SchemeConfig) -> str:
        """The format in which selection encodes the scheme's messages."""
        return self.own_format or options.format

    def is_sharded(self, op: CollectiveOp) -> bool:
        """Whether messages for this operation are cut at the shards' borders."""
        reduce_scatter = op is CollectiveOp.REDUCE_SCATTER
        return self.takes is Input.SPARSE and (self.needs_shards or reduce_scatter)
