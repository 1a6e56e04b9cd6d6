"""Row-sparse gradients (`nn.Embedding(sparse=True)`), summed or averaged over a group's ranks.

Input and output are torch.sparse COO tensors. Nothing is pruned: the sparsity comes from the rows
that no batch touched. A progress thread does the work; `wait` returns the result.

Shape suffixes: R rows of the parameter, D columns, K rows that are not zero.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_sparse.bucket import Reduction
from megatron_sparse.collectives.row_sparse import NAME, row_sparse, stand_in
from megatron_sparse.compression.schedule import Phase
from megatron_sparse.config.checks import one_of
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.formats.row_sparse import RowSparse, check_coo
from megatron_sparse.planner.wire_bytes import dense_wire_bytes
from megatron_sparse.recording import BucketRecord, NullSink, RecordSink, StageTimer
from megatron_sparse.reduction.job import GATE, Pending, Stage, used_here
from megatron_sparse.reduction.progress import Progress, ProgressThread
from megatron_sparse.transport import ProcessGroupTransport, Transport


class PendingRows(Pending[torch.Tensor]):
    """The running synchronisation of a row-sparse gradient."""

    record: BucketRecord

    def wait(self) -> torch.Tensor:
        """Blocks until the job has ended; see `Pending.wait`.

        Returns:
            A coalesced sparse COO tensor [R, D], bit-identical on all ranks.
        """
        reduced = super().wait()
        # The driver's stream allocated them and must not reuse them while this stream reads them.
        used_here([reduced.indices(), reduced.values()])
        return reduced


class RowSparseReducer:
    """Synchronises row-sparse gradients of one group of ranks.

    `sink` receives each gradient's record from the thread that waits for it. Other reducers may
    share `progress`. `checksum` must be the same on every rank.
    """

    def __init__(
        self, transport: Transport, sink: RecordSink, progress: Progress, *, checksum: bool = False
    ) -> None:
        self.transport = transport
        self.buffers = MessageBuffers()
        self._sink = sink
        self._progress = progress
        self._checksum = checksum

    def start(
        self,
        name: str,
        gradient: torch.Tensor,
        reduction: Reduction,
        step: int,
        on_done: Callable[[Pending[torch.Tensor]], None] | None = None,
    ) -> PendingRows:
        """Launches the all-reduce of `gradient`; returns at once.

        Gradients must be started in the same order on every rank, and must not change before the
        result is there.

        Args:
            name: of the parameter, the same on every rank.
            gradient: sparse COO [R, D] with one sparse and one dense dimension, fp32, bf16 or
                fp16; coalesced or not. It is not changed.
            reduction: sum or average.
            step: the same on every rank.
            on_done: see `Pending`.

        Raises:
            ExtensionError: the gradient has another layout, dtype or device.
            DependencyError, ExtensionError: the GPU has no kernels (`check_kernels`).
        """
        check_coo(gradient)
        # A dense bucket of the gradient's shape, without memory, from which the sizes are taken.
        whole = stand_in(name, gradient.shape, gradient.dtype, self.transport.world_size)
        record = BucketRecord(
            bucket=name,
            step=step,
            scheme=NAME,
            phase=Phase.TARGET,
            density=1.0,  # nothing is pruned
            numel=whole.numel,
            dense_bytes=round(dense_wire_bytes(whole, gradient.element_size())),
            timer=StageTimer(gradient.device),
            launched_s=time.perf_counter(),
        )
        steps = self._run(record, gradient, reduction)
        pending = PendingRows(name, steps, record.timer, record, self._sink, on_done)
        self._progress.submit(pending)
        return pending

    def _run(
        self, record: BucketRecord, gradient: torch.Tensor, reduction: Reduction
    ) -> Stage[torch.Tensor]:
        """The job: encodes the rows, all-reduces them, fills the record; returns the result."""
        with record.timer.stage("encode"):
            rows = RowSparse.from_coo(gradient)
        record.nnz = rows.rows_KD.numel()
        yield GATE  # on CUDA the network stream goes on from here
        used_here([rows.indices_K, rows.rows_KD])
        result = yield from row_sparse(
            record.bucket,
            rows,
            reduction,
            self.transport,
            self.buffers,
            step=record.step,
            checksum=self._checksum,
        )
        record.wire_bytes = result.sent_bytes
        record.scheme = f"{NAME}_{result.way}"  # `gather` or `direct`, chosen by the collective
        return result.gradient.to_coo()


def row_sparse_all_reduce(
    gradient: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    op: str = "sum",
    name: str = "gradient",
    timeout_s: float | None = None,
) -> torch.Tensor:
    """Sums or averages a row-sparse gradient over the ranks of a group.

    Collective; blocks. Every call makes a transport (with a process group) and a thread. Use a
    `RowSparseReducer` to make them only once, or to compute during the all-reduce.

    Args:
        gradient: see `RowSparseReducer.start`.
        group: gloo or NCCL, to fit the gradient's device; None takes the default group.
        op: `sum` or `avg`.
        name: for errors, the same on every rank.
        timeout_s: seconds for one operation; None takes the default of `scheme.timeout_s`.

    Returns:
        A coalesced sparse COO tensor, bit-identical on all ranks.

    Raises:
        ConfigError: `op` is unknown, or torch.distributed is not initialised.
        ExtensionError: the gradient has another layout, dtype or device.
        DependencyError, ExtensionError: the GPU has no kernels (`check_kernels`).
        CommunicationError: ranks disagree about shape, dtype or `op`, or one does not take part.
        WireFormatError: a peer's message is damaged.

    Example:
        >>> rows = torch.tensor([[1.0], [2.0]])
        >>> g = torch.sparse_coo_tensor([[3, 3]], rows, (5, 1))
        >>> row_sparse_all_reduce(g).to_dense().T  # doctest: +SKIP
        tensor([[0., 0., 0., 6., 0.]])
    """
    one_of("op", op, tuple(Reduction))
    check_coo(gradient)
    scheme = SchemeConfig() if timeout_s is None else SchemeConfig(timeout_s=timeout_s)
    members = dist.group.WORLD if group is None else group
    if members is None:
        raise ConfigError(
            "there is no process group",
            expected="torch.distributed.init_process_group before the first all-reduce",
            got="an uninitialised torch.distributed",
        )
    transport = ProcessGroupTransport(members, scheme.timeout_s, gradient.device)
    progress = ProgressThread(gradient.device, scheme.timeout_s)
    reducer = RowSparseReducer(transport, NullSink(), progress)
    try:
        return reducer.start(name, gradient, Reduction(op), step=0).wait()
    finally:
        progress.close()
        transport.close(broken=progress.broken)
