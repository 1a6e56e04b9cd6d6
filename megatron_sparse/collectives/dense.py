"""Dense: the backend's own all-reduce or reduce-scatter of the whole bucket.

Agreement, on CPU only: one all-gather of the collective's identity, 8 (2 + n) bytes a rank. It is
needed there because gloo's own reductions end the process where ranks disagree about the size. On
CUDA the host would have to read the answer, so there is no agreement: ranks that disagree wait for
NCCL's watchdog. A run with `compression.enabled=false` agrees about each bucket once, and is then
as fast as Megatron's own.

Bytes on the wire: 2 (n - 1) / n N b for a ring all-reduce, half of it for a reduce-scatter. This
is also how Megatron synchronises, so on the same backend and ranks the sums have the same bits as
Megatron's. A reduce-scatter changes this rank's shard and nothing else. With `Exchange.averages`
the backend also divides, as for Megatron's `average_in_collective`.

Where values travel in a narrower dtype, the backend adds in that dtype. If `Bucket.fp32_sums`
forbids that, `dense_allpairs` does the reduce-scatter, as Megatron's
`reduce_scatter_with_fp32_accumulation` does. It also takes over where `scheme.wire_dtype=fp16`
narrows an fp32 gradient: it sends as many bytes and adds in fp32, while the backend's partial sums
would leave fp16's range although the sum fits.
"""

from __future__ import annotations

import math

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives.base import POSTED, Exchange, Identity, Steps, exchange_sizes
from megatron_sparse.collectives.dense_allpairs import dense_allpairs
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.pricing.dry_run import DryRun


def dense(exchange: Exchange, values_N: torch.Tensor, step: int) -> Steps:
    """Sums `values_N` over all ranks into `exchange.bucket`, or averages it as `exchange` says.

    Returns the bytes of a ring: its reduce-scatter, and for an all-reduce its all-gather too.

    Args:
        exchange: the bucket, and the means to synchronise it.
        values_N: this rank's contribution: the gradient itself or a narrower copy. Overwritten.
        step: the training step; the pairwise schemes keep their messages apart by it.

    Raises:
        CommunicationError: ranks disagree about the bucket, scheme, dtype or step.
    """
    bucket, transport = exchange.bucket, exchange.transport
    if _needs_fp32_sums(bucket, values_N.dtype):
        return (yield from dense_allpairs(exchange, values_N, step))
    if transport.device.type == "cpu" and not exchange.is_agreed:
        # There are no sizes: ranks find out whether they agree about the bucket.
        identity = Identity.of_values("dense", exchange, values_N, step)
        yield from exchange_sizes([], identity, transport)
    if exchange.scatters:
        summed = bucket.shard(transport.rank)  # where the sum will be in `values_N`
        work = transport.reduce_scatter(values_N[summed], values_N, average=exchange.averages)
    else:
        summed = slice(None)
        work = transport.all_reduce_(values_N)
    yield POSTED
    yield work
    if values_N is not bucket.grad_N:
        with exchange.timer.stage("decode"):
            bucket.grad_N[summed].copy_(values_N[summed])
    halves = 1 if exchange.scatters else 2
    return halves * (transport.world_size - 1) * values_N.nbytes // transport.world_size


def _needs_fp32_sums(bucket: Bucket, value_dtype: torch.dtype) -> bool:
    """Whether the backend must not add: fp16 could overflow, or Megatron asks for fp32 sums."""
    overflows = value_dtype == torch.float16 and bucket.grad_N.dtype != torch.float16
    return overflows or (bucket.fp32_sums and bucket.op is CollectiveOp.REDUCE_SCATTER)


def cost(run: DryRun) -> None:
    """The backend's own collective, as a ring over its measured link (`ClusterModel.dense`).

    With s = N b bytes: 2 (n - 1) alpha + 2 (n - 1) / n s beta (Patarasuk and Yuan 2009; equation 2
    of SpCCL and of PCCL, twice). A reduce-scatter takes half. On CPU the ranks agree first, as in
    `dense`.

    A dense plan selects nothing. It sends gradient and residual whole (`Selector.take_whole`),
    which is free while there is no residual.
    """
    if run.cluster.device == "cpu":
        run.agree()
    link = run.cluster.dense_link(run.n)
    rounds = (run.n - 1) * (1 if run.scatter else 2)
    nbytes = math.ceil(run.shape.numel / run.n) * run.b
    run.clocks.work(rounds * (link.alpha_s + link.beta_s * nbytes))


SCHEME = Scheme("dense", Input.DENSE, run=dense, place=10, cost=cost)
