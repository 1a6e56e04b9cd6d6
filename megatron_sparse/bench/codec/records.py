"""The cases of `bench codecs` for records of a bucket, Rice included, on the CPU and on a GPU.

The operations on one gradient: `prune_encode`, `prune` alone, `encode` (but for Rice),
`decode_add`, `place` (a message replaces what is there, as that of a gathered sum does),
`decode_sum` of several messages, and `seal` and `verify`: encoding and adding with
`scheme.checksum`, beside both without. Message, residual and sum are first compared with the
oracles' on a smaller gradient, byte for byte.

On a GPU the host reads no report meanwhile, as in capacity mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from megatron_sparse.bench.codec import peers
from megatron_sparse.bench.codec.frame import CPU, KEY, STEP, Case, Task, differing
from megatron_sparse.bench.codec.options import RICE_FORMS
from megatron_sparse.bench.table import Action
from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, Pruning, Segments
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.reference import message as message_oracle
from megatron_sparse.reference import prune as prune_oracle
from megatron_sparse.reference import rice_message as rice_oracle
from megatron_sparse.wire import FORMAT_NAMES, HEADER_BYTES

ORACLE_NUMEL = 2**18
"""Elements that are compared with the oracles, which take about a microsecond an element."""
ORACLE_LEAK = 0.5
type Encoder = Callable[[], torch.Tensor]
"""A timed call; returns the bytes of the record."""
SUMMED = 8
"""Messages that `decode_sum` adds up."""


class Codec:
    """The calls of `ops` for one record, and their memory.

    Memory is written here, so that its pages exist.
    """

    def __init__(self, case: Case, *, checksum: bool = False) -> None:
        self.case, self.is_rice = case, case.form in RICE_FORMS
        self.spec = replace(case.spec, checksum=checksum)
        self.offsets = torch.tensor([0, case.numel])
        self.segments = Segments(self.offsets, torch.zeros(1, dtype=torch.uint8))
        self.expected = Expected(
            self.offsets, self.spec.value_dtype, STEP, rank=0, checksum=checksum
        )
        self.threshold_R = torch.tensor([case.threshold]).to(case.device)
        room = ops.message_capacity(self.offsets, self.spec.value_dtype)
        self.out = torch.zeros(room, dtype=torch.uint8, device=case.device)

    def pruning(self, residual_N: torch.Tensor, leak: float) -> Pruning:
        """Of the whole gradient."""
        return Pruning(residual_N, self.offsets, self.threshold_R, leak, KEY)

    def prune_encode(
        self, grad_N: torch.Tensor, residual_N: torch.Tensor, leak: float = 0.0
    ) -> Encoder:
        """With leak 0 only rounding errors stay in the residual: all rounds see almost the same."""
        given = grad_N, self.pruning(residual_N, leak), self.segments, self.spec, self.out
        return lambda: ops.prune_encode(*given, reports=self.reports())[0]

    def encode(self, pruned_N: torch.Tensor, nnz: torch.Tensor) -> Encoder:
        """Of a gradient with so many elements that are not zero."""
        given = self.spec, self.out
        counts = nnz if self.case.device == CPU else None
        return lambda: ops.encode(pruned_N, self.segments, counts, *given, reports=self.reports())

    def decode_add(self, acc_N: torch.Tensor, message: torch.Tensor, *, fresh=False) -> Action:
        """To an fp32 accumulator; fresh: in place of what is there."""
        given = acc_N, message, self.expected, 0
        return lambda: ops.decode_add_(*given, fresh=fresh, reports=self.reports())

    def decode_sum(self, sum_N: torch.Tensor, messages: list[torch.Tensor]) -> Action:
        """Of several ranks' messages."""
        given = sum_N, messages, self.expected, 0, range(len(messages))
        return lambda: ops.decode_sum_(*given, reports=self.reports())

    def reports(self) -> Reports | None:
        """On a GPU, of one call: they are dropped, for the results are compared."""
        return None if self.case.device == CPU else Reports()

    def record(self) -> torch.Tensor:
        """What was written last; a view of `out`."""
        return self.out[: HEADER_BYTES + int(self.out[24:32].view(torch.int64))]

    def record_name(self) -> str:
        """The format that the encoder chose, which may be dense."""
        name = FORMAT_NAMES[int(self.out[5])]
        return self.case.form if self.is_rice or self.case.form.split("_")[0] == name else name


def make_tasks(case: Case, *, with_peers: bool = True) -> Iterator[Task]:
    """The operations on one gradient; each is to be timed before the next is made.

    Without peers, this takes up to five times the gradient's size in fp32 at once, besides the
    buffers of the copy that is timed in turn with each operation.
    """
    wrong = wrong_bytes(case)
    codec = Codec(case)
    grad_N, residual_N = case.gradient(), torch.zeros(case.numel, device=case.device)
    prune_encode = codec.prune_encode(grad_N, residual_N)
    prune_encode()
    others: dict[str, Action] = {}
    if with_peers:
        others = peers.prune_encode(grad_N, case.threshold)
        if case.device.type == "cuda":
            others |= peers.triton(case, grad_N)
    moved = grad_N.nbytes + 2 * residual_N.nbytes + codec.record().nbytes
    yield Task("prune_encode", codec.record_name(), moved, wrong, prune_encode, peers=others)

    others = peers.prune(grad_N, case.threshold) if with_peers else {}
    prune = partial(ops.prune_, grad_N, codec.pruning(residual_N.zero_(), 1.0), case.code)
    nnz = prune()
    # Pruning a pruned gradient does not change it, so all rounds see the same numbers.
    moved = 2 * (grad_N.nbytes + residual_N.nbytes)
    yield Task("prune", "-", moved, wrong, prune, peers=others)
    del residual_N, prune_encode, prune, others
    encode = codec.encode(grad_N, nnz)
    encode()
    message, name = codec.record().clone(), codec.record_name()
    if not codec.is_rice:
        others = peers.encode(grad_N) if with_peers else {}
        moved = grad_N.nbytes + message.nbytes
        yield Task("encode", name, moved, wrong, encode, others)

    touched = case.touched_bytes(grad_N, whole=name in ("dense", "blocks"))
    acc_N = torch.zeros(case.numel, device=case.device)
    others = peers.decode_add(grad_N) if with_peers and not codec.is_rice else {}
    moved, decode_add = message.nbytes + 2 * touched, codec.decode_add(acc_N, message)
    yield Task("decode_add", name, moved, wrong, decode_add, others)
    moved, place = message.nbytes + acc_N.nbytes, codec.decode_add(acc_N, message, fresh=True)
    yield Task("place", name, moved, wrong, place)
    if with_peers:
        sealed = Codec(case, checksum=True)
        seal = sealed.encode(grad_N, nnz)
        seal()
        record = sealed.record().clone()
        wrong += differing(record[HEADER_BYTES:], message[HEADER_BYTES:])
        verify, moved = sealed.decode_add(acc_N, record), grad_N.nbytes + message.nbytes
        yield Task("seal", name, moved, wrong, seal, peers={"no checksum": encode})
        others, moved = {"no checksum": decode_add}, message.nbytes + 2 * touched
        yield Task("verify", name, moved, wrong, verify, peers=others)
    yield _sum_task(codec, grad_N, nnz, wrong)


def _sum_task(codec: Codec, pruned_N: torch.Tensor, nnz: torch.Tensor, wrong: int) -> Task:
    """Several ranks' messages in one pass; the peer adds one after another."""
    messages = []
    for rank in range(SUMMED):
        codec.encode(pruned_N.roll(rank * pruned_N.numel() // SUMMED), nnz)()
        messages.append(codec.record().clone())
    sum_N, other_N = (torch.zeros(pruned_N.numel(), device=pruned_N.device) for _ in range(2))
    in_one_pass = codec.decode_sum(sum_N, messages)
    adds = [
        codec.decode_add(other_N, message, fresh=rank == 0) for rank, message in enumerate(messages)
    ]

    def one_by_one() -> None:
        for add in adds:
            add()

    in_one_pass()
    one_by_one()
    wrong += differing(sum_N, other_N)
    moved, name = sum(message.nbytes for message in messages) + sum_N.nbytes, codec.record_name()
    peers: dict[str, Action] = {"one by one": one_by_one}
    return Task("decode_sum", name, moved, wrong, in_one_pass, peers=peers)


def wrong_bytes(case: Case) -> int:
    """Bytes of message, residual and sum that differ from the oracles' on a smaller gradient.

    On a GPU those of Triton's kernels count too.
    """
    case = case.of_numel(ORACLE_NUMEL + 17)  # the last tile is not full
    host, codec = Codec(replace(case, device=CPU)), Codec(case)
    grad_N = host.case.gradient()
    record, rest_N = _by_oracle(host, grad_N)
    wrong = _wrong_sum(codec, host, record) + _wrong_record(codec, grad_N, record, rest_N)
    if not codec.is_rice:
        wrong += _wrong_record(codec, grad_N, record, rest_N, in_two_passes=True)
    return wrong + (peers.wrong_triton(case) if case.device.type == "cuda" else 0)


def _by_oracle(host: Codec, grad_N: torch.Tensor) -> tuple[bytes, torch.Tensor]:
    """The record of a gradient without a residual before it, and the residual after it."""
    pruning = host.pruning(torch.zeros(grad_N.numel()), ORACLE_LEAK)
    if host.is_rice:
        (record,), rest_N = rice_oracle.prune_encode(grad_N, pruning, host.segments, host.spec)
    else:
        sent_N, rest_N, nnz = prune_oracle.prune(grad_N, pruning, host.case.code)
        (record,) = message_oracle.encode(sent_N, host.segments, nnz, host.spec)
    return record, rest_N


def _wrong_sum(codec: Codec, host: Codec, record: bytes) -> int:
    """Bytes in which sums of ones and a record differ."""
    sum_N = torch.ones(codec.case.numel, device=codec.case.device)
    codec.decode_add(
        sum_N, torch.frombuffer(bytearray(record), dtype=torch.uint8).to(sum_N.device)
    )()
    expected_N = torch.ones(codec.case.numel)
    message_oracle.decode_add_(expected_N, record, host.expected, 0)
    return differing(sum_N, expected_N)


def _wrong_record(
    codec: Codec,
    grad_N: torch.Tensor,
    record: bytes,
    rest_N: torch.Tensor,
    *,
    in_two_passes: bool = False,
) -> int:
    """Bytes of record and residual that differ: of `prune_encode`, or of `prune_` and `encode`."""
    codec.out.fill_(0xFF)
    given_N = grad_N.to(codec.case.device, copy=True)
    residual_N = torch.zeros(given_N.numel(), device=given_N.device)
    if in_two_passes:
        nnz = ops.prune_(given_N, codec.pruning(residual_N, ORACLE_LEAK), codec.case.code)
        used = codec.encode(given_N, nnz)()
    else:
        used = codec.prune_encode(given_N, residual_N, ORACLE_LEAK)()
    return differing(codec.out[: int(used)], record) + differing(residual_N, rest_N)
