"""Transport over shared memory between the ranks of a host, over gloo between hosts.

- Pairwise messages between two ranks of a host go through shared memory; so do gathers, and sums
  where `sums` allows it, if all ranks of the group share the host. All else is
  `ProcessGroupTransport`'s: messages to other hosts, collectives of a group that spans hosts, sums
  of dtypes that are not in `SUM_DTYPES`, deadlines, liveness, the arrival counter.
- **Sums are in rank order**: the owner of each shard adds the ranks' values as ((0 + 1) + 2) + ...,
  so the bits are the same on all ranks and in every run. bf16 and fp16 are added in fp32 and
  rounded once, at the end; gloo rounds after each addition. For two ranks, and wherever sums are
  exact, gloo has the same bits.
- **Cost**: each byte that a rank sends is copied into a ring and out of it, by a thread of C++ on
  either side (`cuda_ext.shared_memory`). A rank fills rings of 8 MiB at most; they are allocated at
  the start.
- **Errors** are those of gloo: within `timeout_s`, and as soon as a rank is known to be gone. A
  message that is longer or shorter than its receive is an error on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.cuda_ext.shared_memory import SUM_DTYPES, Engine
from megatron_sparse.transport.base import Work
from megatron_sparse.transport.process_group import ProcessGroupTransport
from megatron_sparse.transport.shared_memory.segment import NAME_BYTES, share_memory
from megatron_sparse.transport.shared_memory.under_way import UnderWay
from megatron_sparse.transport.works import BothWorks, NoWork, WaitedWork

_SUM_CODES = {dtype: code for code, dtype in enumerate(SUM_DTYPES)}

type _Pieces = Sequence[tuple[int, torch.Tensor]]


class SharedMemoryTransport(ProcessGroupTransport):
    """See `Transport`, and the module's docstring. On the CPU only.

    Making one is collective over the group. Where the ranks of a host cannot share memory, their
    messages go over gloo, and `refusals` says why.

    Args:
        group: see `ProcessGroupTransport`; of gloo.
        timeout_s: likewise.
        liveness: likewise.
        sums: also sums of more than two ranks, which gloo adds in another order. Without it the
            bits of all sums are gloo's.

    Attributes:
        refusals: for each rank that could not share memory the reason; empty if all is well. The
            same on all ranks.
        intra_node: `shared_memory`, or `backend` where a rank could not share memory; a group with
            one rank on each host is like others of the run.
        shares_memory: whether this rank shares memory with another one.

    Raises:
        CommunicationError: the ranks cannot reach one another.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Sequence[int],
        timeout_s: float,
        *,
        liveness: bool = SchemeConfig.watch_peers,
        sums: bool = True,
    ) -> None:
        self._sums = sums
        self._under_way: UnderWay | None = None
        self._places: dict[int, int] = {}
        super().__init__(group, timeout_s, torch.device("cpu"), liveness=liveness)
        self.refusals: dict[int, str] = {}
        if len(set(self.nodes)) < self.world_size:
            self._share()
        self.intra_node = "backend" if self.refusals else "shared_memory"
        self.shares_memory = self._under_way is not None

    def _share(self) -> None:
        own = self.nodes[self.rank]
        members = [rank for rank, node in enumerate(self.nodes) if node == own]
        engine, self.refusals = share_memory(members, self.rank, self._gather_texts)
        if engine is not None:
            self._under_way = UnderWay(engine, members)
            self._places = {peer: place for place, peer in enumerate(members)}

    def _gather_texts(self, own: bytes) -> list[bytes]:
        padded = torch.frombuffer(bytearray(own.ljust(NAME_BYTES, b"\0")), dtype=torch.uint8)
        gathered = padded.new_empty(self.world_size * NAME_BYTES)
        super().all_gather(gathered, padded).finish()
        return [bytes(text.tolist()).rstrip(b"\0") for text in gathered.split(NAME_BYTES)]

    @property
    def _alone_on_host(self) -> bool:
        """Whether all ranks of the group share this rank's memory."""
        return len(self._places) == self.world_size

    def _sum_code(self, dtype: torch.dtype) -> int | None:
        """The engine's code of a dtype; None where gloo adds."""
        here = self._alone_on_host and (self._sums or self.world_size == 2)
        return _SUM_CODES.get(dtype) if here else None

    def _posted(
        self, name: str, post: Callable[[Engine, int], None], *buffers: torch.Tensor
    ) -> WaitedWork:
        assert self._under_way is not None, "ranks share memory"
        assert all(each.is_contiguous() for each in buffers), "the engine takes addresses"
        operation = self._announce(name)
        return WaitedWork(operation, self._under_way.post(name, post, *buffers))

    def all_reduce_(self, values_N: torch.Tensor) -> Work:
        """See `Transport`."""
        code = self._sum_code(values_N.dtype)
        if code is None:
            return super().all_reduce_(values_N)
        if values_N.numel() == 0:
            return NoWork()
        at, numel = values_N.data_ptr(), values_N.numel()
        return self._posted(
            "all_reduce",
            lambda engine, number: engine.all_reduce(number, at, numel, code),
            values_N,
        )

    def reduce_scatter(
        self, shard_M: torch.Tensor, values_N: torch.Tensor, *, average: bool = False
    ) -> Work:
        """See `Transport`."""
        code = self._sum_code(values_N.dtype)
        if code is None or (average and not values_N.is_floating_point()):
            return super().reduce_scatter(shard_M, values_N, average=average)
        if values_N.numel() == 0:
            return NoWork()
        divisor = self.world_size if average else 0
        shard, values, numel = shard_M.data_ptr(), values_N.data_ptr(), values_N.numel()
        assert shard_M.numel() * self.world_size == numel, "shards are equal"
        return self._posted(
            "reduce_scatter",
            lambda engine, number: engine.reduce_scatter(
                number, shard, values, numel, code, divisor
            ),
            shard_M,
            values_N,
        )

    def all_gather(self, gathered: torch.Tensor, own_M: torch.Tensor) -> Work:
        """See `Transport`."""
        if not self._alone_on_host:
            return super().all_gather(gathered, own_M)
        if own_M.numel() == 0:
            return NoWork()
        whole, own, size = gathered.data_ptr(), own_M.data_ptr(), own_M.nbytes
        assert gathered.nbytes == size * self.world_size, "all ranks give as much"
        return self._posted(
            "all_gather",
            lambda engine, number: engine.all_gather(number, whole, own, size),
            gathered,
            own_M,
        )

    def exchange(self, sends: _Pieces, receives: _Pieces, tag: int) -> Work:
        """See `Transport`."""
        near_sends, far_sends = self._divided(sends)
        near_receives, far_receives = self._divided(receives)
        if not (near_sends or near_receives):
            return super().exchange(far_sends, far_receives, tag)
        peers = sorted({peer for peer, _ in [*near_sends, *near_receives]})
        near = self._posted(
            f"exchange with ranks {peers}",
            lambda engine, number: engine.exchange(
                number, tag, self._placed(near_sends), self._placed(near_receives)
            ),
            *(values for _, values in [*near_sends, *near_receives]),
        )
        if not (far_sends or far_receives):
            return near
        return BothWorks(near, super().exchange(far_sends, far_receives, tag))

    def _divided(self, pieces: _Pieces) -> tuple[_Pieces, _Pieces]:
        """The pieces for or from ranks that share this one's memory, and the others; none empty."""
        pieces = [(peer, values) for peer, values in pieces if values.numel()]
        near = [(peer, values) for peer, values in pieces if peer in self._places]
        return near, [(peer, values) for peer, values in pieces if peer not in self._places]

    def _placed(self, pieces: _Pieces) -> list[tuple[int, int, int]]:
        return [(self._places[peer], values.data_ptr(), values.nbytes) for peer, values in pieces]

    def close(self, *, broken: bool = False) -> None:
        """See `ProcessGroupTransport`."""
        if self._under_way is not None:
            self._under_way.close()
        super().close(broken=broken)
