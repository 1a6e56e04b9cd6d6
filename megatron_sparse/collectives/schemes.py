"""The registry of collectives: what the planner, the reducer and the benches choose from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, Cuts
from megatron_sparse.collectives.adaptive_ring import adaptive_ring
from megatron_sparse.collectives.agsparse import agsparse
from megatron_sparse.collectives.base import Steps
from megatron_sparse.collectives.dense import dense
from megatron_sparse.collectives.dense_allpairs import dense_allpairs
from megatron_sparse.collectives.dense_broadcast import dense_broadcast
from megatron_sparse.collectives.dense_hierarchical import dense_hierarchical
from megatron_sparse.collectives.dense_rhd import dense_rhd
from megatron_sparse.collectives.dense_ring import dense_ring
from megatron_sparse.collectives.direct import direct
from megatron_sparse.collectives.dsar_split_ag import dsar_split_ag
from megatron_sparse.collectives.hierarchical import hierarchical
from megatron_sparse.collectives.omnireduce import omnireduce
from megatron_sparse.collectives.options import SchemeOptions
from megatron_sparse.collectives.peer_two_shot import peer_two_shot
from megatron_sparse.collectives.sparse_ps import sparse_ps
from megatron_sparse.collectives.sparse_ring import sparse_ring
from megatron_sparse.collectives.ssar_rd import ssar_rd
from megatron_sparse.collectives.ssar_split_ag import ssar_split_ag
from megatron_sparse.collectives.straggler import straggler
from megatron_sparse.collectives.straggler_direct import straggler_cuts, straggler_direct
from megatron_sparse.collectives.zen import zen
from megatron_sparse.formats.message import Message, MessageBuffers
from megatron_sparse.recording import StageTimer
from megatron_sparse.transport import Transport
from megatron_sparse.transport.subset import SubsetTransport

BOTH = frozenset(CollectiveOp)
ALL_REDUCE_ONLY = frozenset({CollectiveOp.ALL_REDUCE})


def _no_cuts(bucket: Bucket) -> Cuts:
    return ()


class Input(StrEnum):
    """What a collective takes from each rank."""

    DENSE = "dense"
    SPARSE = "sparse"


@dataclass(frozen=True)
class Scheme:
    """A collective and what one must know to use it.

    Attributes:
        name: as in `scheme.name`; also its module's.
        takes: `DENSE`: (bucket, values_N, epoch, transport, buffers, watch), the values being the
            whole gradient; `SPARSE`: (bucket, message, transport, buffers, watch), and options.
        ops: what it can compute.
        needs_shards: its message is cut at the shards' borders even for an all-reduce.
        run: the collective.
        takes_options: the collective's last argument is a `SchemeOptions`.
        takes_slots: it takes messages of fixed size, as `scheme.capacity` has them made.
        extra_cuts: elements at which its messages of a bucket are cut beside the shards' borders.
        needs_windows: it runs in windows of peer memory (`collectives.peer_windows`), which must
            have been made for all buckets of the group: on CUDA, inside one machine.
    """

    name: str
    takes: Input
    ops: frozenset[CollectiveOp]
    needs_shards: bool
    run: Callable[..., Steps]
    takes_options: bool = False
    takes_slots: bool = False
    extra_cuts: Callable[[Bucket], Cuts] = _no_cuts
    needs_windows: bool = False

    def reduce(
        self,
        bucket: Bucket,
        values_N: torch.Tensor,
        epoch: int,
        transport: Transport,
        buffers: MessageBuffers,
        timer: StageTimer,
        options: SchemeOptions,
    ) -> Steps:
        """Runs a dense collective; `dense` describes the arguments."""
        extra = (options,) if self.takes_options else ()
        return self.run(bucket, values_N, epoch, transport, buffers, timer, *extra)

    def exchange(
        self,
        bucket: Bucket,
        message: Message,
        transport: Transport | SubsetTransport,
        buffers: MessageBuffers,
        timer: StageTimer,
        options: SchemeOptions,
    ) -> Steps:
        """Runs a sparse collective; its own docstring describes the arguments.

        The message is in the format of `options.message_format`. In capacity mode what the codec
        calls have reported is looked at here, when everything has been posted.

        Raises:
            WireFormatError: a peer's records are not what was announced.
        """
        extra = (options,) if self.takes_options else ()
        sent_bytes = yield from self.run(bucket, message, transport, buffers, timer, *extra)
        if message.reports is not None:
            read = message.reports.begin_read()
            if not read.ready():
                yield read
            read.finish()
        return sent_bytes

    def is_sharded(self, op: CollectiveOp) -> bool:
        """Whether messages for this form are cut at the shards' borders."""
        reduce_scatter = op is CollectiveOp.REDUCE_SCATTER
        return self.takes is Input.SPARSE and (self.needs_shards or reduce_scatter)


def _hierarchical(
    bucket: Bucket,
    message: Message,
    transport: Transport,
    buffers: MessageBuffers,
    timer: StageTimer,
    options: SchemeOptions,
) -> Steps:
    inner = SCHEMES[options.inner]
    return hierarchical(bucket, message, transport, buffers, timer, options, inner)


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("dense", Input.DENSE, BOTH, False, dense),
        Scheme("dense_ring", Input.DENSE, BOTH, False, dense_ring),
        Scheme("dense_rhd", Input.DENSE, BOTH, False, dense_rhd),
        Scheme("dense_allpairs", Input.DENSE, BOTH, False, dense_allpairs),
        Scheme(
            "dense_broadcast",
            Input.DENSE,
            ALL_REDUCE_ONLY,
            False,
            dense_broadcast,
            takes_options=True,
        ),
        Scheme("dense_hierarchical", Input.DENSE, BOTH, False, dense_hierarchical),
        Scheme("agsparse", Input.SPARSE, BOTH, False, agsparse, takes_slots=True),
        Scheme("direct", Input.SPARSE, BOTH, True, direct, takes_slots=True),
        Scheme("ssar_rd", Input.SPARSE, ALL_REDUCE_ONLY, False, ssar_rd),
        Scheme(
            "ssar_split_ag", Input.SPARSE, ALL_REDUCE_ONLY, True, ssar_split_ag, takes_slots=True
        ),
        Scheme(
            "dsar_split_ag", Input.SPARSE, ALL_REDUCE_ONLY, True, dsar_split_ag, takes_slots=True
        ),
        Scheme("sparse_ring", Input.SPARSE, BOTH, True, sparse_ring),
        Scheme("sparse_ps", Input.SPARSE, BOTH, False, sparse_ps),
        Scheme("omnireduce", Input.SPARSE, BOTH, True, omnireduce, takes_options=True),
        Scheme("zen", Input.SPARSE, ALL_REDUCE_ONLY, False, zen, takes_options=True),
        Scheme("adaptive_ring", Input.SPARSE, BOTH, True, adaptive_ring, takes_options=True),
        Scheme("hierarchical", Input.SPARSE, BOTH, False, _hierarchical, takes_options=True),
        Scheme("straggler", Input.DENSE, BOTH, False, straggler, takes_options=True),
        Scheme(
            "straggler_direct",
            Input.SPARSE,
            BOTH,
            True,
            straggler_direct,
            takes_options=True,
            extra_cuts=straggler_cuts,
        ),
        Scheme(
            "peer_two_shot",
            Input.SPARSE,
            BOTH,
            True,
            peer_two_shot,
            takes_options=True,
            takes_slots=True,
            needs_windows=True,
        ),
    )
}
"""All collectives by name."""

OVER_GROUPS = {name: scheme for name, scheme in SCHEMES.items() if not scheme.needs_windows}
"""Those that run over any process group and on the virtual cluster."""
