"""The cases of `bench codecs` for records of a bucket, Rice included, on the CPU and on a GPU.

The operations on one gradient: `prune_encode`, `prune` alone, `encode` (but for Rice),
`decode_add`, `place` (a message replaces what is there, as that of a gathered sum does),
`decode_sum` of several messages, and `seal` and `verify`: encoding and adding with
`scheme.checksum`, beside both without. Message (here one record), residual and sum are first
compared with those of the oracles, on a smaller gradient, byte for byte.

On a GPU the host reads no error report of a timed call, as in capacity mode.
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
"""Factor on unselected values as they become residual; 0 or 1 would hide a wrong factor."""
type Encoder = Callable[[], torch.Tensor]
"""A timed call; returns the number of bytes of the record."""
SUMMED = 8
"""Messages that `decode_sum` adds up."""


class Codec:
    """Makes the calls of `ops` that encode and decode one gradient, and has their memory.

    The constructor writes this memory, so that no timed call pays for page faults.
    """

    def __init__(self, case: Case, *, checksum: bool = False) -> None:
        self.case, self.is_rice = case, case.form in RICE_FORMS
        self.spec = replace(case.spec, checksum=checksum)
        self.offsets = torch.tensor([0, case.numel])
        # One segment, and so one record; 0 lets the encoder choose a sparse format for it.
        self.segments = Segments(self.offsets, dense=torch.zeros(1, dtype=torch.uint8))
        self.expected = Expected(  # what a decoder must find in the record's header
            self.offsets, self.spec.value_dtype, STEP, rank=0, checksum=checksum
        )
        self.threshold_R = torch.tensor([case.threshold]).to(case.device)
        capacity_bytes = ops.message_capacity(self.offsets, self.spec.value_dtype)
        self.out = torch.zeros(capacity_bytes, dtype=torch.uint8, device=case.device)

    def pruning(self, residual_N: torch.Tensor, leak: float) -> Pruning:
        """The arguments of pruning: one threshold for the whole gradient."""
        return Pruning(residual_N, self.offsets, self.threshold_R, leak, KEY)

    def prune_encode(
        self, grad_N: torch.Tensor, residual_N: torch.Tensor, leak: float = 0.0
    ) -> Encoder:
        """Makes the call that prunes and encodes the gradient into `out`.

        With leak 0 the residual has only rounding errors, so all calls select almost the same.
        """
        arguments = grad_N, self.pruning(residual_N, leak), self.segments, self.spec, self.out
        return lambda: ops.prune_encode(*arguments, reports=self.reports())[0]  # record's bytes

    def encode(self, pruned_N: torch.Tensor, nnz: torch.Tensor) -> Encoder:
        """Makes the call that encodes a gradient with `nnz` non-zero elements into `out`."""
        given = self.spec, self.out
        counts = nnz if self.case.device == CPU else None  # a GPU counts them itself
        return lambda: ops.encode(pruned_N, self.segments, counts, *given, reports=self.reports())

    def decode_add(self, acc_N: torch.Tensor, message: torch.Tensor, *, fresh=False) -> Action:
        """Makes the call that adds a message to `acc_N`, fp32, or with `fresh` overwrites it."""
        given = acc_N, message, self.expected, 0
        return lambda: ops.decode_add_(*given, fresh=fresh, reports=self.reports())

    def decode_sum(self, sum_N: torch.Tensor, messages: list[torch.Tensor]) -> Action:
        """Makes the call that overwrites `sum_N`, fp32, with the sum of several ranks' messages."""
        given = sum_N, messages, self.expected, 0, range(len(messages))
        return lambda: ops.decode_sum_(*given, reports=self.reports())

    def reports(self) -> Reports | None:
        """On a GPU, takes a call's error reports, which nobody reads: results are compared."""
        return None if self.case.device == CPU else Reports()

    def record(self) -> torch.Tensor:
        """The record that was encoded last, a view of `out`; its header has the payload's size."""
        return self.out[: HEADER_BYTES + int(self.out[24:32].view(torch.int64))]

    def record_name(self) -> str:
        """The format that the encoder chose, which may be dense."""
        name = FORMAT_NAMES[int(self.out[5])]
        return self.case.form if self.is_rice or self.case.form.split("_")[0] == name else name


def make_tasks(case: Case, *, with_peers: bool = True) -> Iterator[Task]:
    """Yields the tasks on one gradient. The caller times a task before it asks for the next one.

    `prune` changes the gradient in place; the tasks after it encode and add the pruned one. Only
    with peers are there `seal` and `verify`. Without peers, this takes up to five times the
    gradient's size in fp32 at once, besides the buffers of the plain copy timed beside each task.
    """
    wrong = wrong_bytes(case)
    codec = Codec(case)
    grad_N, residual_N = case.gradient(), torch.zeros(case.numel, device=case.device)
    prune_encode = codec.prune_encode(grad_N, residual_N)
    prune_encode()  # writes the record, whose size and name the task needs
    its_peers = peers.prune_encode(grad_N, case.threshold) if with_peers else {}
    moved_bytes = grad_N.nbytes + 2 * residual_N.nbytes + codec.record().nbytes
    yield Task("prune_encode", codec.record_name(), moved_bytes, wrong, prune_encode, its_peers)

    its_peers = peers.prune(grad_N, case.threshold) if with_peers else {}
    pruning = codec.pruning(residual_N.zero_(), leak=1.0)
    prune = partial(ops.prune_, grad_N, pruning, case.code)
    nnz = prune()
    # Pruning a pruned gradient does not change it, so all rounds see the same numbers.
    moved_bytes = 2 * (grad_N.nbytes + residual_N.nbytes)
    yield Task("prune", "-", moved_bytes, wrong, prune, its_peers)
    del residual_N, pruning, prune_encode, prune, its_peers  # frees their memory
    encode = codec.encode(grad_N, nnz)
    encode()  # writes the record that is copied next
    message, name = codec.record().clone(), codec.record_name()
    encoded_bytes = grad_N.nbytes + message.nbytes
    if not codec.is_rice:
        its_peers = peers.encode(grad_N) if with_peers else {}
        yield Task("encode", name, encoded_bytes, wrong, encode, its_peers)

    touched_bytes = case.touched_bytes(grad_N, whole=name in ("dense", "blocks"))
    added_bytes = message.nbytes + 2 * touched_bytes  # the accumulator is read and written
    acc_N = torch.zeros(case.numel, device=case.device)
    its_peers = peers.decode_add(grad_N) if with_peers and not codec.is_rice else {}
    decode_add = codec.decode_add(acc_N, message)
    yield Task("decode_add", name, added_bytes, wrong, decode_add, its_peers)
    place = codec.decode_add(acc_N, message, fresh=True)
    yield Task("place", name, message.nbytes + acc_N.nbytes, wrong, place)
    if with_peers:
        sealed = Codec(case, checksum=True)
        seal = sealed.encode(grad_N, nnz)
        seal()
        record = sealed.record().clone()
        # A checksum changes the header only.
        wrong += differing(record[HEADER_BYTES:], message[HEADER_BYTES:])
        yield Task("seal", name, encoded_bytes, wrong, seal, {"no checksum": encode})
        verify = sealed.decode_add(acc_N, record)
        yield Task("verify", name, added_bytes, wrong, verify, {"no checksum": decode_add})
    yield _sum_task(codec, grad_N, nnz, wrong)


def _sum_task(codec: Codec, pruned_N: torch.Tensor, nnz: torch.Tensor, wrong: int) -> Task:
    """Makes the task that adds several ranks' messages in one pass; its peer adds one at a time.

    To `wrong`, the wrong bytes of earlier checks, it adds those in which the two sums differ.
    """
    messages = []
    for rank in range(SUMMED):
        # Each rank's gradient is rotated by another distance; all have `nnz` non-zero elements.
        codec.encode(pruned_N.roll(rank * pruned_N.numel() // SUMMED), nnz)()
        messages.append(codec.record().clone())
    sum_N = torch.zeros(pruned_N.numel(), device=pruned_N.device)
    peer_sum_N = torch.zeros_like(sum_N)
    in_one_pass = codec.decode_sum(sum_N, messages)
    adds = [
        codec.decode_add(peer_sum_N, message, fresh=rank == 0)  # the first one overwrites
        for rank, message in enumerate(messages)
    ]

    def one_by_one() -> None:
        for add in adds:
            add()

    in_one_pass()
    one_by_one()
    wrong += differing(sum_N, peer_sum_N)
    moved_bytes = sum(message.nbytes for message in messages) + sum_N.nbytes
    peers: dict[str, Action] = {"one by one": one_by_one}
    return Task("decode_sum", codec.record_name(), moved_bytes, wrong, in_one_pass, peers)


def wrong_bytes(case: Case) -> int:
    """Counts bytes of record, residual and sum that differ from the oracles' (small gradient)."""
    case = case.of_numel(ORACLE_NUMEL + 17)  # the codec's last tile is not full
    on_cpu, codec = Codec(replace(case, device=CPU)), Codec(case)  # `on_cpu`: for the oracles
    grad_N = on_cpu.case.gradient()
    record, residual_N = _by_oracle(on_cpu, grad_N)
    wrong = _wrong_sum(codec, on_cpu, record)
    wrong += _wrong_record(codec, grad_N, record, residual_N)
    if not codec.is_rice:
        wrong += _wrong_record(codec, grad_N, record, residual_N, in_two_passes=True)
    return wrong


def _by_oracle(on_cpu: Codec, grad_N: torch.Tensor) -> tuple[bytes, torch.Tensor]:
    """Prunes and encodes with the oracles, from a residual of zeros.

    Returns the record and the new residual. `on_cpu` has the oracles' arguments.
    """
    pruning = on_cpu.pruning(torch.zeros(grad_N.numel()), ORACLE_LEAK)
    segments, spec = on_cpu.segments, on_cpu.spec
    if on_cpu.is_rice:
        (record,), residual_N = rice_oracle.prune_encode(grad_N, pruning, segments, spec)
    else:
        pruned_N, residual_N, nnz = prune_oracle.prune(grad_N, pruning, on_cpu.case.code)
        (record,) = message_oracle.encode(pruned_N, segments, nnz, spec)
    return record, residual_N


def _wrong_sum(codec: Codec, on_cpu: Codec, record: bytes) -> int:
    """Adds a record with the codec and with the oracle; returns the bytes in which sums differ."""
    # To ones: adding to zeros would not differ from overwriting.
    sum_N = torch.ones(codec.case.numel, device=codec.case.device)
    message = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(sum_N.device)
    codec.decode_add(sum_N, message)()
    expected_N = torch.ones(codec.case.numel)
    message_oracle.decode_add_(expected_N, record, on_cpu.expected, 0)
    return differing(sum_N, expected_N)


def _wrong_record(
    codec: Codec,
    grad_N: torch.Tensor,
    expected_record: bytes,
    expected_residual_N: torch.Tensor,
    *,
    in_two_passes: bool = False,
) -> int:
    """Encodes a gradient; returns how many bytes of record and residual differ from the expected.

    Encodes with `prune_encode`, or `in_two_passes` with `prune_` and then `encode`.
    """
    codec.out.fill_(0xFF)  # so that a byte that the encoder fails to write differs
    copy_N = grad_N.to(codec.case.device, copy=True)
    residual_N = torch.zeros(copy_N.numel(), device=copy_N.device)
    if in_two_passes:
        nnz = ops.prune_(copy_N, codec.pruning(residual_N, ORACLE_LEAK), codec.case.code)
        record_bytes = codec.encode(copy_N, nnz)()
    else:
        record_bytes = codec.prune_encode(copy_N, residual_N, ORACLE_LEAK)()
    wrong = differing(codec.out[: int(record_bytes)], expected_record)
    return wrong + differing(residual_N, expected_residual_N)
