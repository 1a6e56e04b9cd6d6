"""The profile of one bucket in training, from a sample that all ranks take of the same elements.

Each rank counts exactly its non-zero elements in each of 2,048 partitions, and its non-zero blocks.
Characteristics that need the positions of other ranks (definitions 3 and 4 of ZEN, and all of the
sum) are estimated from at most `WINDOWS` windows of 256 elements. The positions of the windows are
a pure function of (seed, step, bucket), spread evenly over the bucket.

Estimates: partitions are put into classes by their density, which all ranks know exactly. In each
class the ratio of the density of k ranks' sum to that of one rank is taken from the class's
windows, mixed with `PRIOR` elements' worth of the whole bucket's ratio, because a class with few
sampled elements is uncertain. So dense parts, where ranks overlap most, are neither missed nor
counted twice by chance. The fraction of a sum's blocks that are not empty is interpolated between
that of full overlap and that of independent ranks, by as much as in the windows.

Cost. Bytes: two all-gathers, of 8 (2 + n) bytes a rank and of 8 bytes for each partition and each
64 elements of the windows: 80 KiB. Work: one decoding of the rank's own message and two passes over
the bucket, in the stage `profile`; waiting for the all-gathers is `network`. On CUDA the CPU waits
twice. Memory: 1 byte for each element of the largest bucket.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives.base import Identity, Yielded, even_cuts, exchange_sizes
from megatron_sparse.compression.selection import draw_key
from megatron_sparse.formats.message import Message, MessageBuffers, decode_add_
from megatron_sparse.pricing.profile import (
    BLOCK_SIZES,
    SparsityProfile,
    partition_counts,
    quantiles,
)
from megatron_sparse.recording import StageTimer
from megatron_sparse.sparsity.characteristics import (
    WORD_BITS,
    overlap_ratios,
    skewness_ratio,
    unions,
)
from megatron_sparse.transport import Transport
from megatron_sparse.wire import wrong_field

WINDOWS, WINDOW_NUMEL = 2048, 256
FINEST = 2048
"""Partitions that are counted, if they have at least a window's elements."""
WORDS = WINDOW_NUMEL // WORD_BITS
PRIOR = 8.0
MOST_PAIRS = 128
"""Pairs of ranks whose overlap is measured: quantiles need no more."""

_BYTE_SUM, _GATHER_BITS = 0x0101010101010101, 0x0102040810204080


def sample_profile(
    bucket: Bucket,
    message: Message,
    transport: Transport,
    buffers: MessageBuffers,
    timer: StageTimer,
    *,
    seed: int,
) -> Generator[Yielded, None, SparsityProfile]:
    """Estimates the profile of all ranks' selections; the same bits on every rank.

    Call it between the selection and the exchange of the message.

    Args:
        bucket: the gradients that the message was selected from. Mutated: an fp32 gradient is
            overwritten by this rank's selection, as in `selected_values`.
        message: this rank's selection, in any format.
        transport: the group.
        buffers: provide scratch memory.
        timer: receives the time of the stage `profile`.
        seed: of the windows; the same on every rank.

    Returns:
        The profile. `density`, `skewness` and `block_density` are exact. Where the bucket has no
        more than `WINDOWS` windows, so are `densification`, `overlap` (of at most `MOST_PAIRS`
        pairs) and `sum_block_density` of the smallest blocks.

    Raises:
        CommunicationError: ranks disagree about the bucket, seed, dtype or step.
        WireFormatError: the part of a rank was damaged on its way.
    """
    n = transport.world_size
    with timer.stage("profile"):
        plan = SamplePlan.of(bucket.name, bucket.numel, n, seed, message.step)
        measured = plan.measure(selected_values(bucket, message, buffers), buffers)
        own_checksum = zlib.crc32(measured.numpy().tobytes())
    # Refuses ranks of another bucket, seed, dtype or step; returns every rank's size and checksum.
    scheme = f"profile/{seed}/{WINDOWS}"
    identity = Identity(scheme, bucket, message.value_dtype, message.step)
    announced = yield from exchange_sizes([measured.numel(), own_checksum], identity, transport)
    part = measured.to(transport.device)
    gathered = part.new_empty(n * part.numel())
    yield transport.all_gather(gathered, part)
    with timer.stage("profile"):
        parts = gathered.view(n, -1).cpu().numpy()
        for rank, (row, (_, checksum)) in enumerate(zip(parts, announced, strict=True)):
            got = zlib.crc32(row.tobytes())
            if got != checksum:
                field = "part of a sparsity profile"
                raise wrong_field(rank, field, f"checksum {checksum:#010x}", f"{got:#010x}")
        return plan.profile(parts)


def selected_values(bucket: Bucket, message: Message, buffers: MessageBuffers) -> torch.Tensor:
    """Decodes a rank's own message to fp32 [N]: zeros where nothing was selected.

    The values overwrite an fp32 gradient, as the collective will do with the sum anyway. A narrower
    gradient is not touched: the values then lie in an fp32 buffer.

    Args:
        bucket: the bucket that the message was selected from.
        message: in any format.
        buffers: lend the fp32 buffer, on a CPU the one that the collective sums in.
    """
    sum_N = bucket.grad_N
    if sum_N.dtype != torch.float32:
        # This bucket's own: on a GPU another bucket's exchange may be using the collective's.
        sum_N = buffers.take_own("sum", bucket, bucket.numel, torch.float32)
    records = message.records()
    slots_S = None if message.slots is None else message.slots.offsets
    # Rank 0 stands for this rank: it would only be named as the sender of a damaged record.
    expected = message.expected(message.layout.segment_offsets, 0, slots_S)
    decode_add_(sum_N, records, expected, fresh=True)
    return sum_N


@dataclass(frozen=True)
class SamplePlan:
    """What a step samples of a bucket, and how each rank's numbers, its part, are laid out.

    A part is int64: non-zero elements in each finest partition, and in each of n even partitions;
    non-zero blocks of each size in `BLOCK_SIZES`; the windows, bit i of a word being its element i.

    Attributes:
        numel: elements of the bucket.
        world_size: n.
        finest: number of the finest partitions; those of a smaller power of two are unions of them.
        window_W: int64, ascending; window w holds the elements from 256 w on.
    """

    numel: int
    world_size: int
    finest: int
    window_W: torch.Tensor

    @classmethod
    def of(cls, name: str, numel: int, world_size: int, seed: int, step: int) -> SamplePlan:
        """Draws the sample of a bucket in a step, the same on all ranks.

        One window is drawn from each of at most `WINDOWS` equal strata of the bucket's windows.
        """
        windows = -(-numel // WINDOW_NUMEL)
        count = min(windows, WINDOWS)
        generator = torch.Generator().manual_seed(draw_key(seed, step, "profile", name))
        fraction_W = torch.rand(count, generator=generator, dtype=torch.float64)
        # Stratum i holds the windows from edges[i] to before edges[i + 1].
        edges = torch.arange(count + 1) * windows // max(count, 1)  # count may be 0
        drawn_W = edges[:-1] + (fraction_W * edges.diff()).long()
        # As many finest partitions as windows, at most `FINEST`, rounded down to a power of two.
        of_windows = 2 ** (min(max(windows, 1), FINEST).bit_length() - 1)
        # But at least the largest power of two in `partition_counts` (with one rank it has only
        # powers): `profile` makes those partitions of whole finest ones.
        finest = max([*partition_counts(numel, world_size=1), of_windows])
        return cls(numel, world_size, finest, drawn_W)

    @property
    def is_whole(self) -> bool:
        """Whether the windows cover every element."""
        return self.window_W.numel() * WINDOW_NUMEL >= self.numel

    @cached_property
    def _cuts(self) -> np.ndarray:
        """`even_cuts` of the finest partitions: lists of thousands took a sixth of the time."""
        return np.arange(self.finest + 1, dtype=np.int64) * self.numel // self.finest

    def measure(self, values_N: torch.Tensor, buffers: MessageBuffers) -> torch.Tensor:
        """Counts this rank's part, in the layout of `SamplePlan`; on the CPU, so it waits for CUDA.

        Suffixes: B blocks of 64 elements, P partitions, W words of the windows.

        Args:
            values_N: zeros where nothing was selected; only read.
            buffers: lend a mask, of one byte for each element.
        """
        padded_numel = -(-self.numel // WINDOW_NUMEL) * WINDOW_NUMEL
        mask_N = buffers.take("profile", padded_numel, values_N.device, torch.bool)
        # A conversion, because a comparison takes five times as long on a CPU.
        mask_N[: self.numel].copy_(values_N)
        mask_N[self.numel :] = False
        mask_B64 = mask_N.view(-1, WORD_BITS)
        # Eight bytes are added at once: the product's highest byte is the sum of the 64.
        nnz_B = (mask_N.view(torch.int64).view(-1, WORD_BITS // 8).sum(1) * _BYTE_SUM) >> 56
        window_bits = mask_N.view(-1, WINDOW_NUMEL)[self.window_W.to(mask_N.device)]
        # Eight bytes of 0 or 1 become eight bits: byte i is bit i of the product's highest byte.
        packed_W = (window_bits.view(torch.int64).flatten() * _GATHER_BITS) >> 56 & 0xFF
        before_B = torch.cat([nnz_B.new_zeros(1), nnz_B.cumsum(0)])  # elements before each block
        finest_P = _counts(mask_B64, before_B, self._cuts)
        even_P = _counts(mask_B64, before_B, even_cuts(self.numel, self.world_size))
        words_W = packed_W.to(torch.uint8).view(torch.int64)  # eight bytes make a word
        return torch.cat([finest_P, even_P, _nonempty_blocks(nnz_B > 0), words_W]).cpu()

    def profile(self, parts: np.ndarray) -> SparsityProfile:
        """Computes the profile from all ranks' parts.

        Only operations that IEEE 754 rounds exactly are used, and sums that do not depend on their
        order: ranks on different processors get the same bits.

        Args:
            parts: int64 [n, ...], a row for each rank.
        """
        n, numel = parts.shape[0], self.numel
        if not numel:
            return SparsityProfile.uniform(0, 0.0, n)
        finest_nP, even_nP, blocks_nB, words = np.split(
            parts, np.cumsum([self.finest, n, len(BLOCK_SIZES)]), axis=1
        )
        words_nW = np.ascontiguousarray(words).view(np.uint64)
        # p -> each rank's non-zero elements in each of p partitions. For p = n the ranks counted
        # them; other p are powers of two, whose partitions are unions of finest ones.
        counts = {
            p: even_nP if p == n else finest_nP.reshape(n, p, -1).sum(2)
            for p in partition_counts(numel, n)
        }
        total_P = finest_nP.sum(0)
        nnz = int(total_P.sum())
        density = nnz / (n * numel)
        unions_P = self._unions(total_P, words_nW)
        union_nnz = {k: math.fsum(union_P.tolist()) for k, union_P in unions_P.items()}
        sum_counts = {  # p -> estimated non-zero elements of the sum in each of p partitions
            p: self._sum_counts(found_nP.sum(0) / n, total_P / n, unions_P[n])
            for p, found_nP in counts.items()
        }
        blocks = {  # block size -> fraction of blocks with a non-zero element, mean over ranks
            size: count / (n * -(-numel // size))
            for size, count in zip(BLOCK_SIZES, blocks_nB.sum(0).tolist(), strict=True)
        }
        return SparsityProfile(
            numel=numel,
            world_size=n,
            density=density,
            densification={
                k: size / (density * numel) if nnz else 1.0 for k, size in union_nnz.items()
            },
            skewness={p: _mean_skewness(found_nP, numel) for p, found_nP in counts.items()},
            sum_skewness={p: skewness_ratio(found, numel) for p, found in sum_counts.items()},
            overlap=quantiles(overlap_ratios(words_nW, MOST_PAIRS)),
            block_density=blocks,
            sum_block_density=self._sum_blocks(blocks, words_nW),
        )

    def _unions(self, total_P: np.ndarray, words_nW: np.ndarray) -> dict[int, np.ndarray]:
        """Estimates k -> mean non-zero elements of k ranks' union in each finest partition.

        Partitions of similar density form a class. The windows in a class give the ratio of a
        union's elements to one rank's; it is mixed with the whole bucket's ratio (`PRIOR`).
        Suffixes: P finest partitions, W windows (words in `words_`, `sets_`), C classes, g sets.

        Args:
            total_P: int64, non-zero elements of all ranks together in each finest partition.
            words_nW: each rank's elements in the windows, as bits.
        """
        mean_P, size_P = total_P / len(words_nW), np.diff(self._cuts).astype(np.float64)
        class_P, classes = _classes_by_density(mean_P / size_P)
        # A window is of the class of the partition that its middle lies in.
        middle_W = np.minimum(
            self.window_W.numpy() * WINDOW_NUMEL + WINDOW_NUMEL // 2, self.numel - 1
        )
        class_W = class_P[np.searchsorted(self._cuts, middle_W, side="right") - 1]

        def by_class(words_gW: np.ndarray) -> np.ndarray:
            """Counts the elements in the windows of each class; returns the mean over the sets."""
            # Axes: sets, windows, words of a window.
            bits = np.bitwise_count(words_gW).reshape(len(words_gW), -1, WORDS)
            nnz_W = bits.sum((0, 2), dtype=np.int64)
            # Whole numbers, so the order of the additions does not matter.
            return np.bincount(class_W, nnz_W, classes) / len(words_gW)

        single_C, found = by_class(words_nW), {}
        single = math.fsum(single_C.tolist())
        for k, sets_gW in unions(words_nW):
            union_C = by_class(sets_gW)
            union = math.fsum(union_C.tolist())
            overall = union / single if single else 1.0
            # The class's own ratio, with `PRIOR` elements of the whole bucket's ratio added.
            ratio_C = (union_C + PRIOR * overall) / (single_C + PRIOR)
            union_P = np.minimum(ratio_C[class_P] * mean_P, size_P)
            if self.is_whole and union:
                # The windows give the total exactly; only its spread over partitions is estimated.
                union_P = union_P * (union / math.fsum(union_P.tolist()))
            found[k] = union_P
        return found

    def _sum_counts(
        self, mean_Q: np.ndarray, mean_P: np.ndarray, union_P: np.ndarray
    ) -> list[float]:
        """Estimates how many elements the ranks' union has in each of Q even partitions.

        That is the exact mean over ranks there, times the ratio of the union to one rank. The ratio
        follows from the finest partitions (P), in which elements are assumed to lie evenly. No
        estimate exceeds the size of its partition.

        Args:
            mean_Q: non-zero elements of one rank in each of the Q partitions, the mean over ranks.
            mean_P: the same in each of the finest partitions.
            union_P: estimated elements of the union in each of the finest partitions.
        """
        knots, cuts = self._cuts, np.array(even_cuts(self.numel, mean_Q.size))
        # Each cut lies in finest partition `left`, at the fraction `inside` of its length.
        left = np.minimum(np.searchsorted(knots, cuts, side="right") - 1, self.finest - 1)
        inside = (cuts - knots[left]) / (knots[left + 1] - knots[left])

        def between(part_P: np.ndarray) -> np.ndarray:
            """Elements between each cut and the next, from those of the finest partitions."""
            before = np.concatenate([[0.0], np.cumsum(part_P)])
            return np.diff(before[left] + inside * part_P[left])

        # The ratio of the union to one rank, around each partition.
        one_Q, many_Q = between(mean_P), between(union_P)
        found_Q = np.divide(mean_Q * many_Q, one_Q, out=np.zeros_like(one_Q), where=one_Q > 0)
        return np.minimum(found_Q, np.diff(cuts)).tolist()

    def _sum_blocks(self, blocks: dict[int, float], words_nW: np.ndarray) -> dict[int, float]:
        """Estimates block size -> the fraction of the sum's blocks that hold a non-zero element.

        It lies between one rank's fraction (full overlap, share 0) and that of independent ranks
        (share 1). `share` is measured in the windows. Sizes ascend, so blocks larger than a window
        use the last share that was measured.

        Args:
            blocks: the fraction of one rank's blocks in the whole bucket that hold an element, by
                size.
            words_nW: the bits of each rank's windows.
        """
        n, found, share = words_nW.shape[0], {}, 0.0
        union_W = np.bitwise_or.reduce(words_nW, axis=0, keepdims=True)
        seen = self.numel if self.is_whole else self.window_W.numel() * WINDOW_NUMEL  # elements
        for size, fraction in blocks.items():
            if size <= WINDOW_NUMEL:
                # Of the `count` blocks in the windows, how many hold an element of one rank (the
                # mean), and how many one of the union.
                of_one = np.count_nonzero(_any_of(words_nW, size // WORD_BITS)) / n
                of_union = np.count_nonzero(_any_of(union_W, size // WORD_BITS))
                count = -(-seen // size)
                if_independent = count * _independent(of_one / count, n)
                span = if_independent - of_one
                share = (of_union - of_one) / span if span > 0 else 0.0
            most = _independent(fraction, n)
            found[size] = min(max(fraction + share * (most - fraction), 0.0), 1.0)
        return found


def _classes_by_density(density_P: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns (class of each partition, number of classes): two classes for each doubling of the
    density, and one for density 0.
    """
    mantissa_P, exponent_P = np.frexp(density_P)  # a mantissa is in [0.5, 1)
    keys_P = 2 * exponent_P + (mantissa_P >= 0.75)
    keys_P[density_P == 0] = np.iinfo(np.int32).min  # no other density has this key
    classes, class_P = np.unique(keys_P, return_inverse=True)
    return class_P, classes.size


def _any_of(words_gW: np.ndarray, count: int) -> np.ndarray:
    """The bitwise or of each `count` adjacent words, as a column; `count` is a power of two."""
    found = words_gW.reshape(-1, count)
    # Halving is faster than `np.bitwise_or.reduce`.
    while found.shape[1] > 1:
        found = found[:, ::2] | found[:, 1::2]
    return found


def _independent(fraction: float, n: int) -> float:
    """The fraction that the union of n independent sets, each of this fraction, holds."""
    # By products: a power may round differently on another machine.
    return 1 - math.prod([1 - fraction] * n)


def _mean_skewness(counts_nP: np.ndarray, numel: int) -> float:
    """The mean over ranks of `skewness_ratio`, from each rank's counts in even partitions."""
    total_n = counts_nP.sum(1)
    densest_n = (counts_nP / np.diff(even_cuts(numel, counts_nP.shape[1]))).max(1)
    ratio_n = np.divide(densest_n, total_n / numel, out=np.ones_like(densest_n), where=total_n > 0)
    return math.fsum(ratio_n.tolist()) / len(ratio_n)


def _counts(
    mask_B64: torch.Tensor, before_B: torch.Tensor, cuts: np.ndarray | list[int]
) -> torch.Tensor:
    """Counts the non-zero elements between each cut and the next; int64 on the mask's device.

    `mask_B64`: whether each element is non-zero, in blocks of 64. `before_B`: non-zero elements
    before each block, and before the end.
    """
    if mask_B64.shape[0] == 0:
        return before_B.new_zeros(len(cuts) - 1)
    # Before a cut lie the elements of all earlier blocks, and some of the block that it cuts.
    cut_P = torch.as_tensor(cuts, device=mask_B64.device)
    block_P = (cut_P // WORD_BITS).clamp_(max=mask_B64.shape[0] - 1)
    offset_P = cut_P - block_P * WORD_BITS
    offsets = torch.arange(WORD_BITS, device=mask_B64.device)
    of_block_P = (mask_B64[block_P] & (offsets < offset_P.unsqueeze(1))).sum(1)
    return (before_B[block_P] + of_block_P).diff()


def _nonempty_blocks(full_B: torch.Tensor) -> torch.Tensor:
    """Counts the blocks with a non-zero element, for each size of `BLOCK_SIZES`; sizes double.

    `full_B` says which blocks of the smallest size have one.
    """
    counts = []
    for _ in BLOCK_SIZES:
        counts.append(full_B.count_nonzero())
        # Pairs are joined with `|`, because `any` over two columns takes several times as long.
        pairs = torch.nn.functional.pad(full_B, (0, full_B.numel() % 2)).view(-1, 2)
        full_B = pairs[:, 0] | pairs[:, 1]
    return torch.stack(counts)
