"""The section `scheme` of the configuration: defaults and checks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sparse.config.checks import Checked, choice, number, whole
from megatron_sparse.config.compression import VALUE_BITS
from megatron_sparse.errors import ConfigError

DTYPES = ("fp32", "bf16", "fp16")
MESSAGE_FORMATS = ("auto", "coo", "pici", "rice", "dense")
RING_DENSITIES = {"coo": (0.3, 0.4, 0.5), "pici": (0.4, 0.5, 0.9)}
"""Thresholds of `adaptive_ring` inside nodes, between them, and for its all-gather: SpCCL's choice
for its cluster (sections IV-C and IV-D, there as sparsities)."""
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 64, 4096
"""What the encoder takes."""
AUTO_CAPACITY = 1.25
"""The factor that `scheme.capacity=auto` stands for on CUDA. Thresholds come from samples, so the
number of selected elements is off: with `compression.samples=auto` three standard deviations are
15 %, below a density of 1 % more."""


@dataclass(unsafe_hash=True)
class SchemeConfig(Checked):
    """How the selected gradient is synchronised. Hashable; only trials (`density=auto`) change one.

    Attributes:
        name: `auto`, `dense` (the backend's own collective, uncompressed), or another registered
            scheme; docs/collectives.md says what each costs. `auto` takes the scheme that is
            predicted to take the least time if `planner.cluster` is given; else `agsparse` or
            `direct`, whichever is predicted to send fewer bytes, or `dense` where that would save
            less than 30 %.
        wire_dtype: dtype of values in messages; null takes the gradient's. Values are rounded to a
            narrower dtype stochastically, and the rounding error goes to the residual.
        format: of sparse messages: `coo` (4 bytes an entry beside its value), `pici` (a bitmap:
            1/32 of fp32's dense size, whatever the density), `rice` (positions near their entropy:
            about 6.1 bits an entry at density 5 %, 8.3 at 1 %, where `coo` takes 32), `dense`, or
            `auto`: `rice` with `compression.value_bits`, else the smallest of dense, COO and Pici
            in each segment. A sparse record that would not be smaller than a dense one is sent
            dense. `omnireduce` (blocks) and `zen` (index and value, hash bitmaps) have formats of
            their own, and take `auto` only.
        capacity: null exchanges the sizes of messages, for which the CPU waits if gradients are on
            a GPU. A factor such as 1.25 fixes them beforehand: a segment sends at most this many
            times the target density of its elements, and the rest stays in the residual. For
            `agsparse`, `direct`, `ssar_split_ag` and `dsar_split_ag`. `auto` is 1.25 on CUDA, for
            each bucket whose scheme is one of these, and null elsewhere: on a CPU, and with
            `lossless_patterns`; docs/collectives.md, Capacity mode.
        block_size: `omnireduce`: elements of a block, a power of two from 64 to 4096.
        hash_rounds: `zen`: rehashes k of the paper's Algorithm 1, which cuts a message by partition
            in a hash memory; 0 sorts instead, which is faster on a CPU. The bytes are the same.
        ring_intra_density: `adaptive_ring`: density (nnz / numel) from which a partial sum goes
            dense over a link inside a node. 0 sends all but a rank's own contribution dense, more
            than 1 nothing; null takes SpCCL's value for `format`: 0.3 for `coo`, else 0.4.
        ring_inter_density: the same for links between nodes; SpCCL's: 0.4 for `coo`, else 0.5.
        ring_gather_density: the same for complete sums, whatever link they cross; SpCCL's: 0.5 for
            `coo`, else 0.9.
        sum_bits: 8, 4, 3 or 2: where an all-reduce gathers complete sums from their owners
            (`direct`, `ssar_split_ag`, `sparse_ring`), they are quantised to this many bits; the
            owner's residual keeps the error. With `format=rice` or `compression.value_bits`, and an
            fp32 residual. null: in full. `auto` is 8 where `compression.value_bits` is a number and
            the residual allows it, else null. A reduce-scatter gathers no sums.
        timeout_s: seconds after which a collective that has not finished is an error.
        watch_peers: notice ranks that die or stop by a side channel (one TCP connection for each
            rank and group), long before the timeout; docs/collectives.md, Faults.
        nccl_engine: buckets of `direct` and `agsparse` of fixed size are one call of C++ on a
            communicator of NCCL's own, for groups whose CPUs cannot keep up (docs/nccl.md,
            The NCCL engine). On CUDA, with the backend nccl as torch's ProcessGroupNCCL.
        checksum: the checksums of gradients' records cover the payloads too (docs/wire-format.md).
        deterministic: freeze every decision that would be taken from timing.
    """

    SECTION = "scheme"

    name: str = "auto"
    wire_dtype: str | None = choice(None, (*DTYPES, None))
    format: str = choice("auto", MESSAGE_FORMATS)
    capacity: str | int | float | None = number("auto", 0, besides=(None,), low_open=True)
    block_size: int = whole(256, MIN_BLOCK_SIZE, MAX_BLOCK_SIZE)
    hash_rounds: int = whole(0, 0, 64)
    ring_intra_density: float | None = number(None, 0)
    ring_inter_density: float | None = number(None, 0)
    ring_gather_density: float | None = number(None, 0)
    timeout_s: float = number(300.0, 0, low_open=True)
    watch_peers: bool = True
    nccl_engine: bool = False
    sum_bits: int | str | None = choice("auto", ("auto", *VALUE_BITS, None))
    checksum: bool = False
    deterministic: bool = True

    def __post_init__(self) -> None:
        """Checks each key, then that the block is a power of two and checksums are possible."""
        super().__post_init__()
        if int(self.block_size).bit_count() != 1:  # `int`, because 64.0 is allowed
            raise ConfigError(
                "scheme.block_size does not fit",
                expected=f"a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}",
                got=self.block_size,
            )
        if self.checksum and self.nccl_engine:
            raise ConfigError(
                "scheme.checksum does not reach the records of scheme.nccl_engine",
                expected="one of them",
                got="both",
                remedy="set scheme.nccl_engine=false, or scheme.checksum=false",
            )

    @property
    def given_capacity(self) -> float | None:
        """The factor that the user has set; None for `auto` and null."""
        return None if isinstance(self.capacity, str) else self.capacity

    @property
    def given_sum_bits(self) -> int | None:
        """Bits of a gathered sum; None: in full, as `auto` outside a `SparseConfig` is."""
        return None if isinstance(self.sum_bits, str) else self.sum_bits

    def capacity_on(self, device_type: str, *, takes_slots: bool) -> float | None:
        """The capacity factor of a bucket, which fixes its messages' size; None: sizes vary.

        Args:
            device_type: `cuda` or `cpu`, where the gradients are.
            takes_slots: whether the bucket's scheme can send messages of fixed size (slots).

        Example:
            >>> SchemeConfig().capacity_on("cuda", takes_slots=True)
            1.25
            >>> SchemeConfig(capacity=2).capacity_on("cuda", takes_slots=False)
        """
        if not takes_slots:
            return None
        if self.capacity == "auto":
            # With `lossless_patterns` it is not `auto` any more: `SparseConfig` has set null.
            return AUTO_CAPACITY if device_type == "cuda" else None
        return self.given_capacity

    def ring_densities(self) -> tuple[float, float, float]:
        """Returns the thresholds (intra, inter, gather) of `adaptive_ring`; null takes SpCCL's."""
        # SpCCL has values for COO and for bitmaps; other formats take those for bitmaps.
        defaults = RING_DENSITIES.get(self.format, RING_DENSITIES["pici"])
        configured = (self.ring_intra_density, self.ring_inter_density, self.ring_gather_density)
        intra, inter, gather = (
            default if density is None else density
            for density, default in zip(configured, defaults, strict=True)
        )
        return intra, inter, gather
