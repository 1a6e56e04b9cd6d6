"""The cases of `bench codecs` for records of a bucket, Rice included, on the CPU and on a GPU.

The operations on one gradient: `prune_encode`, `encode` (but for Rice), `decode_add`, and for Rice
`decode_sum` of several messages. Message, residual and sum are first compared with the oracles' on
a smaller gradient, byte for byte.

On a GPU the compiled ops are called directly. Their times leave out the few words that
`cuda_ext.ops` reads on the host afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron_sparse.bench.codec import peers
from megatron_sparse.bench.codec.frame import CPU, KEY, STEP, Case, Task, differing
from megatron_sparse.bench.codec.options import RICE_FORMS
from megatron_sparse.bench.table import Action
from megatron_sparse.cuda_ext import codec_cuda, load, ops
from megatron_sparse.cuda_ext.arguments import overload
from megatron_sparse.cuda_ext.encode_ops import record_arguments
from megatron_sparse.cuda_ext.record_spec import Expected, Pruning, Segments
from megatron_sparse.formats.message_sizes import capacity, scratch_capacity
from megatron_sparse.reference import message as message_oracle
from megatron_sparse.reference import prune as prune_oracle
from megatron_sparse.reference import rice_message as rice_oracle
from megatron_sparse.wire import FORMAT_NAMES, HEADER_BYTES

ORACLE_NUMEL = 2**18
"""Elements that are compared with the oracles, which take about a microsecond an element."""
type Encoder = Callable[[], torch.Tensor]
"""A timed call; returns the bytes of the record, or on a GPU the op's report."""
SUMMED = 4
"""Messages that `decode_sum` adds up."""


class Codec:
    """The calls of `ops` for one record, and their memory.

    Memory is written here, so that its pages exist.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.spec, self.is_rice = case, case.spec, case.form in RICE_FORMS
        self.offsets = torch.tensor([0, case.numel])
        self.segments = Segments(self.offsets, torch.zeros(1, dtype=torch.uint8))
        self.expected = Expected(self.offsets, self.spec.value_dtype, STEP, rank=0)
        self.threshold_R = torch.tensor([case.threshold]).to(case.device)
        self.scratch = None
        if case.device == CPU:
            self.scratch = torch.zeros(scratch_capacity(self.offsets, self.spec), dtype=torch.uint8)
        room = capacity(self.offsets, self.spec.value_dtype)
        self.out = torch.zeros(room, dtype=torch.uint8, device=case.device)

    def pruning(self, residual_N: torch.Tensor, leak: float) -> Pruning:
        """Of the whole gradient."""
        return Pruning(residual_N, self.offsets, self.threshold_R, leak, KEY)

    def prune_encode(
        self, grad_N: torch.Tensor, residual_N: torch.Tensor, leak: float = 0.0
    ) -> Encoder:
        """With leak 0 only rounding errors stay in the residual: all rounds see almost the same."""
        encoder = ops.rice_prune_encode if self.is_rice else ops.prune_encode
        pruning = self.pruning(residual_N, leak)
        return lambda: encoder(grad_N, pruning, self.segments, self.spec, self.out, self.scratch)[0]

    def encode(self, pruned_N: torch.Tensor, nnz: torch.Tensor) -> Encoder:
        """Of a gradient with so many elements that are not zero."""
        given = self.spec, self.out, self.scratch
        if self.is_rice:
            return lambda: ops.rice_encode(pruned_N, self.segments, *given)[0]
        return lambda: ops.encode(pruned_N, self.segments, nnz, *given)

    def decode_add(self, acc_N: torch.Tensor, message: torch.Tensor) -> Action:
        """To an fp32 accumulator."""
        return lambda: ops.decode_add_(acc_N, message, self.expected, 0)

    def record(self) -> torch.Tensor:
        """What was written last; a view of `out`."""
        return self.out[: HEADER_BYTES + int(self.out[24:32].view(torch.int64))]

    def record_name(self) -> str:
        """The format that the encoder chose, which may be dense."""
        name = FORMAT_NAMES[int(self.out[5])]
        return self.case.form if self.case.form.split("_")[0] in (name, "rice") else name


class DeviceCodec(Codec):
    """The same on a GPU, without waiting for the device; the calls return the ops' reports."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        load("cuda")
        self.device_offsets = codec_cuda.on_device(self.offsets, case.device)

    def _written(self, op: str, grad_N: torch.Tensor) -> tuple[Any, ...]:
        return record_arguments(op, grad_N, self.segments, self.spec, self.out, None)

    def prune_encode(
        self, grad_N: torch.Tensor, residual_N: torch.Tensor, leak: float = 0.0
    ) -> Encoder:
        """As `Codec`'s."""
        op, written = "prune_encode", self._written("prune_encode", grad_N)
        selected = residual_N, self.device_offsets, self.threshold_R, None, leak, KEY
        return partial(overload(op), grad_N, *written, *selected)

    def encode(self, pruned_N: torch.Tensor, nnz: torch.Tensor) -> Encoder:
        """As `Codec`'s; the op counts for itself."""
        return partial(overload("encode"), pruned_N, *self._written("encode", pruned_N))

    def decode_add(self, acc_N: torch.Tensor, message: torch.Tensor) -> Action:
        """As `Codec`'s."""
        given = message, self.device_offsets, self.spec.value_dtype, STEP, 0, False
        return partial(overload("decode_add_"), acc_N, *given)


def make_tasks(case: Case, *, with_peers: bool = True) -> Iterator[Task]:
    """The operations on one gradient; each is to be timed before the next is made.

    Without peers, this takes up to five times the gradient's size in fp32 at once, besides the
    buffers of the copy that is timed in turn with each operation.
    """
    wrong = wrong_bytes(case)
    on_gpu = case.device.type == "cuda"
    codec = DeviceCodec(case) if on_gpu else Codec(case)
    grad_N, residual_N = case.gradient(), torch.zeros(case.numel, device=case.device)
    prune_encode = codec.prune_encode(grad_N, residual_N)
    prune_encode()
    others: dict[str, Action] = {}
    if with_peers:
        others = peers.prune_encode(grad_N, case.threshold, zstd=codec.is_rice)
        if on_gpu:
            others |= peers.triton(case, grad_N)
    moved = grad_N.nbytes + 2 * residual_N.nbytes + codec.record().nbytes
    yield Task("prune_encode", codec.record_name(), moved, wrong, prune_encode, peers=others)

    residual_N.zero_()
    nnz = ops.prune_(grad_N, codec.pruning(residual_N, 0.0), case.code)
    del residual_N, prune_encode, others
    encode = codec.encode(grad_N, nnz)
    encode()
    message, name = codec.record().clone(), codec.record_name()
    if not codec.is_rice:
        others = peers.encode(grad_N) if with_peers else {}
        moved = grad_N.nbytes + message.nbytes
        yield Task("encode", name, moved, wrong, encode, lambda: grad_N.sum(), others)

    touched = case.touched_bytes(grad_N, whole=name in ("dense", "blocks"))
    written = torch.zeros(touched, dtype=torch.uint8, device=case.device)
    acc_N = torch.zeros(case.numel, device=case.device)
    others = peers.decode_add(grad_N) if with_peers and not codec.is_rice else {}
    moved, decode_add = message.nbytes + 2 * touched, codec.decode_add(acc_N, message)
    yield Task("decode_add", name, moved, wrong, decode_add, lambda: written.fill_(1), others)
    if codec.is_rice:
        yield _sum_task(codec, grad_N, nnz, wrong)


def _sum_task(codec: Codec, pruned_N: torch.Tensor, nnz: torch.Tensor, wrong: int) -> Task:
    """Several ranks' messages in one pass; the peer adds one after another."""
    messages = []
    for rank in range(SUMMED):
        codec.encode(pruned_N.roll(rank * pruned_N.numel() // SUMMED), nnz)()
        messages.append(codec.record().clone())
    sum_N, other_N, stream_N = (torch.zeros(pruned_N.numel()) for _ in range(3))

    def in_one_pass() -> None:
        ops.decode_sum_(sum_N, messages, codec.expected, 0, range(SUMMED))

    def one_by_one() -> None:
        for rank, message in enumerate(messages):
            ops.decode_add_(other_N, message, codec.expected, 0, fresh=rank == 0)

    in_one_pass()
    one_by_one()
    wrong += differing(sum_N, other_N)
    moved, form = sum(message.nbytes for message in messages) + sum_N.nbytes, codec.case.form
    peers: dict[str, Action] = {"one by one": one_by_one}
    return Task("decode_sum", form, moved, wrong, in_one_pass, lambda: stream_N.fill_(1), peers)


def wrong_bytes(case: Case) -> int:
    """Bytes of message, residual and sum that differ from the oracles' on a smaller gradient."""
    case = case.of_numel(ORACLE_NUMEL + 17)
    host, codec = Codec(replace(case, device=CPU)), Codec(case)
    grad_N, before_N = host.case.gradient(), torch.zeros(case.numel)
    pruning = host.pruning(before_N, 0.5)
    if codec.is_rice:
        (record,), rest_N = rice_oracle.prune_encode(grad_N, pruning, host.segments, host.spec)
    else:
        sent_N, rest_N, nnz = prune_oracle.prune(grad_N, pruning, case.code)
        (record,) = message_oracle.encode(sent_N, host.segments, nnz, host.spec)
    acc_N, expected_acc_N = torch.ones(case.numel, device=case.device), torch.ones(case.numel)
    message_oracle.decode_add_(expected_acc_N, record, host.expected, 0)
    message = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(case.device)
    codec.decode_add(acc_N, message)()
    wrong = differing(acc_N, expected_acc_N)
    for fused in (True,) if codec.is_rice else (True, False):
        codec.out.fill_(0xFF)
        given_N, residual_N = grad_N.to(case.device, copy=True), before_N.to(case.device, copy=True)
        if fused:
            used = codec.prune_encode(given_N, residual_N, 0.5)()
        else:
            nnz = ops.prune_(given_N, codec.pruning(residual_N, 0.5), case.code)
            used = codec.encode(given_N, nnz)()
        wrong += differing(codec.out[: int(used)], record) + differing(residual_N, rest_N)
    return wrong + (peers.wrong_triton(case) if case.device.type == "cuda" else 0)
