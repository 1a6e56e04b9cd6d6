"""Buckets, contributions and oracles for the collectives' tests.

Legend: N elements of the bucket, n ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, Layout, ParameterSlice
from megatron_sparse.collectives import SCHEMES, Exchange, Input
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.errors import MegatronSparseError
from megatron_sparse.formats.message import (
    VALUE_DTYPES,
    WIRE_CODES,
    Message,
    MessageBuffers,
    encode,
    record_spec,
)
from megatron_sparse.recording import StageTimer
from megatron_sparse.transport import Topology, VirtualCluster
from megatron_sparse.transport.topology import NO_TIME
from megatron_sparse.wire import (
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_PICI,
    HEADER_BYTES,
    payload_bytes,
)

STEP = 3
DTYPES = (("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"))
"""Of gradients, and of values in messages."""
NAMES = tuple(SCHEMES)
BY_FORM = [(name, op) for name in NAMES for op in CollectiveOp if op in SCHEMES[name].ops]
SPARSE = [name for name in NAMES if SCHEMES[name].takes is Input.SPARSE]
OPTIONS = SchemeConfig(block_size=64)
"""Small, so that the small buckets here have several blocks."""


@dataclass(frozen=True)
class Case:
    """One collective on one kind of data.

    `wire` is the dtype of values in messages; `dtype` that of the gradient.
    """

    scheme: str
    n: int
    op: CollectiveOp = CollectiveOp.ALL_REDUCE
    dtype: str = "fp32"
    wire: str = "fp32"
    density: float = 0.3
    numel: int = 240
    floats: bool = False
    """Random floats instead of small integers."""
    options: SchemeConfig = OPTIONS
    straggler: int | None = 1

    def __post_init__(self) -> None:
        """A whole number of shards where the form needs it: more elements than were asked for."""
        object.__setattr__(self, "numel", numel_for(self.n, self.numel, self.op))


class Forwarding:
    """A transport that is another one, but for what a test gives it or overrides."""

    def __init__(self, transport: Any, **attributes: Any) -> None:
        self._transport = transport
        self.__dict__ |= attributes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Changing(Forwarding):
    """A transport that sends what `change(values, peer)` returns; the peer is None in a gather."""

    def __init__(
        self, transport: Any, change: Callable[[torch.Tensor, int | None], torch.Tensor]
    ) -> None:
        super().__init__(transport)
        self._change = change

    def all_gather(self, gathered, own):
        return self._transport.all_gather(gathered, self._change(own, None))

    def exchange(self, sends, receives, tag):
        changed = [(peer, self._change(values, peer)) for peer, values in sends]
        return self._transport.exchange(changed, receives, tag)


def parameters(numel: int) -> list[ParameterSlice]:
    """Two pruned parameters with a kept one and padding between, where there is room."""
    if numel < 20:
        return [ParameterSlice("w", 0, numel)] if numel else []
    a, b = numel // 2, numel // 2 + 5
    return [
        ParameterSlice("w0", 0, a),
        ParameterSlice("b", a, b, keep=True),
        ParameterSlice("w1", b + 2, numel),
    ]


def contribution(case: Case, rank: int) -> torch.Tensor:
    """A rank's contribution: zeros where it was pruned; kept and padding elements whole.

    Small integers, whose sum over 16 ranks is exact even in bf16, or floats that need rounding.
    """
    generator = torch.Generator().manual_seed(1000 * case.n + rank)
    if case.floats:
        values = torch.randn(case.numel, generator=generator)
    else:
        values = torch.randint(1, 5, (case.numel,), generator=generator).float()
        values *= torch.randint(0, 2, (case.numel,), generator=generator) * 2 - 1
    kept = torch.rand(case.numel, generator=generator) < case.density
    for piece in parameters(case.numel):
        if piece.keep:
            kept[piece.start : piece.stop] = True
    values = (values * kept).to(VALUE_DTYPES[case.wire])
    return values.to(VALUE_DTYPES[case.dtype])


def make_bucket(case: Case, rank: int) -> Bucket:
    grad = contribution(case, rank)
    return Bucket("b", grad, parameters(case.numel), case.op, case.n)


def make_message(bucket: Bucket, case: Case, buffers: MessageBuffers) -> Message:
    form = SCHEMES[case.scheme].own_format or "coo"
    block_size, checksum = case.options.block_size, case.options.checksum
    spec = record_spec(case.wire, STEP, form, block_size, checksum=checksum)
    return encode(bucket, layout_of(case.scheme, bucket), spec, buffers)


def layout_of(scheme: str, bucket: Bucket) -> Layout:
    """The records of a message, as the planner would have it cut."""
    entry = SCHEMES[scheme]
    return bucket.layout(entry.is_sharded(bucket.op), entry.extra_cuts(bucket))


def run_gradients(scheme: str, gradients: list[torch.Tensor], options: SchemeConfig):
    """An all-reduce of fp32 gradients, one a rank, without kept parameters.

    Returns each rank's result, the (peer, records) that each sent, and each one's message.
    """
    numel = gradients[0].numel()
    case = Case(scheme, len(gradients), numel=numel, options=options)
    return run_tapped(case, gradients, [ParameterSlice("w", 0, numel)])


def run_tapped(
    case: Case,
    gradients: Sequence[torch.Tensor],
    pieces: list[ParameterSlice],
    device: torch.device | None = None,
):
    """As `run_gradients`: a sparse case of these gradients [N], on this device."""
    sent, messages = [[] for _ in gradients], {}

    def start(transport):
        rank = transport.rank

        def kept(data, peer):
            if data.dtype == torch.uint8:  # sizes are not bytes
                sent[rank].append((peer, data))
            return data

        tap = Changing(transport, kept)
        bucket = Bucket("b", gradients[rank].clone(), pieces, case.op, case.n)
        message = messages[rank] = make_message(bucket, case, MessageBuffers())
        exchange = Exchange(bucket, tap, MessageBuffers(), StageTimer(), case.options)
        return (yield from summed(case.scheme, exchange, message))[0]

    results = VirtualCluster(case.n, device=device).run(start)
    return results, sent, [messages[rank] for rank in range(case.n)]


def steps_of(case: Case, transport, *, poison: bool = False, values: torch.Tensor | None = None):
    """One rank's whole collective: a generator that returns (result, reported bytes).

    With `poison` element 7 is NaN and element 100 infinite. `values`, in the case's dtype, replace
    `contribution`.
    """
    bucket, buffers, timer = make_bucket(case, transport.rank), MessageBuffers(), StageTimer()
    if values is not None:
        bucket.grad_N.copy_(values)
    if poison:
        bucket.grad_N[7], bucket.grad_N[100] = float("nan"), float("inf")
    exchange = Exchange(bucket, transport, buffers, timer, case.options, case.straggler)
    if SCHEMES[case.scheme].takes is Input.SPARSE:
        message = make_message(bucket, case, buffers)
        return (yield from summed(case.scheme, exchange, message))
    values_N = bucket.grad_N.to(VALUE_DTYPES[case.wire])
    return (yield from summed(case.scheme, exchange, values_N, STEP))


def summed(scheme: str, exchange: Exchange, content: Message | torch.Tensor, *step: int):
    """The steps of a scheme: a generator that returns (this rank's part of the sum, bytes sent)."""
    bucket = exchange.bucket
    if content is not bucket.grad_N:
        # Selection may leave anything in the gradient: the message is the contribution.
        bucket.grad_N.fill_(float("nan"))
    sent = yield from SCHEMES[scheme].run(exchange, content, *step)
    own = bucket.shard(exchange.transport.rank) if exchange.scatters else slice(None)
    return bucket.grad_N[own].clone(), sent


def error_of(steps):
    """Drives steps; returns their error, or None, instead of raising it."""
    try:
        yield from steps
    except MegatronSparseError as error:
        return error
    return None


@dataclass(frozen=True)
class Ran:
    """What a case's ranks have got and sent, in rank order, and the cluster they ran on."""

    results: list[torch.Tensor]
    sent: list[int]
    cluster: VirtualCluster

    def sent_bytes(self) -> list[int]:
        """What has gone over each rank's links, agreements included."""
        return [self.cluster.sent_bytes(rank) for rank in range(len(self.sent))]


def on_nodes(sizes: Sequence[int]) -> Topology:
    """Nodes of so many ranks, without time."""
    return Topology(tuple(sizes), NO_TIME, NO_TIME)


def run_case(
    case: Case,
    topology: Topology | None = None,
    wrap: Callable[[Any], Any] = lambda transport: transport,
    *,
    poisoned: int | None = None,
    values: Sequence[torch.Tensor] | None = None,
    delays_s: Mapping[int, float] | None = None,
    message_scale: float = 1.0,
) -> Ran:
    """Runs a case on virtual ranks, by default of one node, without time.

    `wrap` makes each rank's transport from the cluster's. `values` replace the case's
    contributions, in any dtype. `delays_s`: seconds by which some ranks begin later. `poisoned`:
    see `poison` of `steps_of`; `message_scale`: see `VirtualCluster`.
    """
    cluster = VirtualCluster(case.n, topology, message_scale=message_scale)

    def start(transport):
        rank, own = transport.rank, None
        transport.charge((delays_s or {}).get(rank, 0.0))
        if values is not None:
            own = values[rank].to(VALUE_DTYPES[case.wire]).to(VALUE_DTYPES[case.dtype])
        return steps_of(case, wrap(transport), poison=rank == poisoned, values=own)

    outcomes = cluster.run(start)
    return Ran([result for result, _ in outcomes], [sent for _, sent in outcomes], cluster)


def whole_sums(case: Case, results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The sum as each rank holds it; after a reduce-scatter the one that all shards make."""
    results = list(results)
    return results if case.op is CollectiveOp.ALL_REDUCE else [torch.cat(results)]


def same_on_all_ranks(op: CollectiveOp, results: list[torch.Tensor]) -> torch.Tensor:
    """The whole sum, of which all ranks must hold the same bits."""
    if op is CollectiveOp.REDUCE_SCATTER:
        return torch.cat(results)
    for result in results:
        assert torch.equal(result.view(torch.uint8), results[0].view(torch.uint8))
    return results[0]


def assert_exact(case: Case, results: Iterable[torch.Tensor]) -> None:
    """The sum over all ranks, to the last bit, on every rank that holds some of it."""
    expected = exact_sum(case)
    for rank, whole in enumerate(whole_sums(case, results)):
        assert torch.equal(whole.double(), expected), (case, rank)


def exact_sum(case: Case) -> torch.Tensor:
    """The sum over all ranks, in fp64."""
    return sum((contribution(case, r).double() for r in range(case.n)), torch.zeros(case.numel))


def numel_for(n: int, numel: int, op: CollectiveOp) -> int:
    """At least `numel` elements, and a whole number of shards where the form needs it."""
    return -(-numel // n) * n if op is CollectiveOp.REDUCE_SCATTER else numel


def record_bytes(numel: int, nnz: int, wire: str, *, dense: bool = False) -> int:
    """A record in the smallest of dense, COO and Pici; or a dense one."""
    forms = [FORMAT_DENSE] if dense else [FORMAT_DENSE, FORMAT_COO, FORMAT_PICI]
    return HEADER_BYTES + min(payload_bytes(form, numel, nnz, WIRE_CODES[wire]) for form in forms)
