"""Dense: the backend's own all-reduce or reduce-scatter of the whole bucket.

Agreement, on CPU only: one all-gather of the collective's identity, 8 (2 + n) bytes a rank. It is
needed there because gloo's own reductions end the process where ranks disagree about the size. On
CUDA the CPU would have to wait for the answer, so there is no agreement: ranks that disagree wait
for NCCL's watchdog. A run with `compression.enabled=false` agrees about each bucket once, and is
then as fast as Megatron's own.

Bytes on the wire, for n ranks and N values of b bytes: 2 (n - 1) / n N b for a ring all-reduce,
half of it for a reduce-scatter. This is also how Megatron synchronises, so on the same backend and
ranks the sums have the same bits as Megatron's. A reduce-scatter changes this rank's shard and
nothing else. With `Exchange.averages` the backend also divides, as for Megatron's
`average_in_collective`.

Where values travel in a narrower dtype, the backend adds in that dtype. If `Bucket.fp32_sums`
forbids that, `dense_allpairs` does the reduce-scatter, as Megatron's
`reduce_scatter_with_fp32_accumulation` does. It also takes over where `scheme.wire_dtype=fp16`
narrows an fp32 gradient: it sends as many bytes and adds in fp32, while the backend's partial sums
would leave fp16's range although the sum fits.
"""

import math

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives.base import POSTED, Exchange, Identity, Steps, exchange_sizes
from megatron_sparse.collectives.dense_allpairs import dense_allpairs
from megatron_sparse.collectives.scheme import Input, Scheme
from megatron_sparse.pricing.dry_run import DryRun


def dense(exchange: Exchange, values_N: torch.Tensor, step: int) -> Steps:
    """Sums `values_N` over all ranks into `exchange.bucket`; averages if `exchange.averages`.

    Returns the bytes that a rank would send in a ring: the backend does not report its own.

    Args:
        exchange: the bucket, and the means to synchronise it.
        values_N: this rank's contribution: the gradient itself or a narrower copy. Overwritten.
        step: the training step; it is part of the tag of pairwise messages.

    Raises:
        CommunicationError: ranks disagree about the bucket, scheme, dtype or step.
    """
    bucket, transport = exchange.bucket, exchange.transport
    if _needs_fp32_sums(bucket, values_N.dtype):
        return (yield from dense_allpairs(exchange, values_N, step))
    if transport.device.type == "cpu" and not exchange.is_agreed:
        # Every rank knows the sizes: the agreement only compares identities.
        identity = Identity.of_values("dense", exchange, values_N, step)
        yield from exchange_sizes([], identity, transport)
    if exchange.scatters:
        summed = bucket.shard(transport.rank)  # the elements of `values_N` that receive the sum
        work = transport.reduce_scatter(values_N[summed], values_N, average=exchange.averages)
    else:
        summed = slice(None)
        work = transport.all_reduce_(values_N)
    yield POSTED
    yield work
    if values_N is not bucket.grad_N:  # a narrower copy of the gradient
        with exchange.timer.stage("decode"):
            bucket.grad_N[summed].copy_(values_N[summed])
    passes = 1 if exchange.scatters else 2  # a reduce-scatter, and an all-gather
    return passes * (transport.world_size - 1) * values_N.nbytes // transport.world_size


def _needs_fp32_sums(bucket: Bucket, value_dtype: torch.dtype) -> bool:
    """Whether the backend must not add: fp16 could overflow, or Megatron asks for fp32 sums."""
    overflows = value_dtype == torch.float16 and bucket.grad_N.dtype != torch.float16
    return overflows or (bucket.fp32_sums and bucket.op is CollectiveOp.REDUCE_SCATTER)


def cost(run: DryRun) -> None:
    """Predicts the time of the backend's own collective: a ring over `ClusterModel.dense_link`.

    With s = N b bytes: 2 (n - 1) alpha + 2 (n - 1) / n s beta (Patarasuk and Yuan 2009; equation 2
    of SpCCL and of PCCL, twice). A reduce-scatter takes half. On CPU the ranks agree first, as in
    `dense`. Adding the residual (`Selector.take_whole`), if there is one, is not priced.
    """
    if run.cluster.device == "cpu":
        run.agree()
    link = run.cluster.dense_link(run.n)
    rounds = (run.n - 1) * (1 if run.scatter else 2)
    nbytes = math.ceil(run.shape.numel / run.n) * run.b
    run.clocks.work(rounds * (link.alpha_s + link.beta_s * nbytes))


SCHEME = Scheme("dense", Input.DENSE, run=dense, place=10, cost=cost)
