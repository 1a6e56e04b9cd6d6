"""Options of `bench codecs`, `bench bits` and `bench prune`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_sparse.bench.options import (
    DTYPE_NAMES,
    Check,
    Options,
    Sizes,
    at_least,
    check_arguments,
    fractions,
    known,
    option,
    parse_densities,
    parse_names,
    parse_size,
)
from megatron_sparse.errors import ConfigError

BUCKET_FORMS = ("auto", "coo", "pici", "pici_paper", "blocks")
"""Records of a bucket."""
RICE_FORMS = ("rice", "rice_q8", "rice_q4", "rice_q3", "rice_q2")
"""Records of format Rice; timed on the CPU only."""
FORMS = (*BUCKET_FORMS, *RICE_FORMS, "hash_bitmap", "pairs", "row_sparse")
OPS = (
    *("prune_encode", "encode", "decode_add", "decode_sum"),
    *("hash_partition", "row_union", "row_match", "row_expand"),
)
"""All operations; each format has some of them."""
RESIDUAL_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class CodecSizes(Sizes):
    """The options that all benches of the codec share."""

    threads: int | None = option(None, "CPU threads; all by default.", min=1)

    def size_checks(self) -> list[Check]:
        """For `check_arguments`."""
        return [*self.range_checks(4), at_least("threads", self.threads, 1)]


@dataclass(frozen=True, kw_only=True)
class Sweep(CodecSizes):
    """The options of `bench codecs`.

    On a GPU the bench times the device's work.
    """

    densities: Sequence[float] = option(
        "0.001,0.01,0.05,0.1,0.5,1", "Fractions sent.", parse_densities, flag="--density"
    )
    dtypes: Sequence[str] = option(
        "fp32", "fp32 | bf16 | fp16", parse_names, flag="--dtype", metavar="TYPE,..."
    )
    forms: Sequence[str] = option(
        ",".join(BUCKET_FORMS),
        " | ".join(FORMS),
        parse_names,
        flag="--format",
        metavar="FORMAT,...",
    )
    ops: Sequence[str] = option(
        ",".join(OPS),
        "prune_encode | encode | decode_add | decode_sum (rice) | hash_partition (pairs) | "
        "row_union | row_match | row_expand (row_sparse)",
        parse_names,
        flag="--op",
        metavar="OP,...",
    )
    peers: bool = option(True, "Time torch, numpy, scipy and zstd too.", flag="--peers/--no-peers")
    device: str = option("cpu", "cpu | cuda")

    def __post_init__(self) -> None:
        check_arguments(
            "bench codecs",
            [
                *self.size_checks(),
                fractions("density", self.densities),
                known("dtype", self.dtypes, DTYPE_NAMES),
                known("format", self.forms, FORMS),
                known("op", self.ops, OPS),
                known("device", [self.device], ("cpu", "cuda")),
            ],
        )
        if self.device == "cuda":
            without = [form for form in self.forms if form not in RICE_FORMS]
            check_arguments(
                "bench codecs --device cuda",
                [
                    (
                        "format",
                        self.forms,
                        without == list(self.forms),
                        "no rice: it is timed on the CPU",
                    )
                ],
            )
            import torch

            if not torch.cuda.is_available():
                raise ConfigError(
                    "bench codecs: there is no CUDA device",
                    expected="a GPU that torch sees",
                    got="none",
                    remedy="measure with --device cpu; see megatron-sparse doctor",
                )


def parse_sizes(option: str, text: str) -> tuple[int, ...]:
    """Sizes as `parse_size` reads them, separated by commas."""
    return tuple(parse_size(option, part) for part in text.split(","))


@dataclass(frozen=True, kw_only=True)
class BitsSweep(Options):
    """The options of `bench bits`."""

    elements: Sequence[int] = option(
        "1M,16M", "Elements of a segment, such as 64K,1M.", parse_sizes, metavar="N,..."
    )
    densities: Sequence[float] = option(
        "0.001,0.005,0.01,0.05,0.1,0.25,0.5", "Fractions sent.", parse_densities, flag="--density"
    )
    tails: Sequence[float] = option(
        "0.05,0.25", "Largest fractions, whose values are quantised.", parse_densities
    )
    groups: int = option(400, "Groups of 128 values to quantise.", min=1)

    def __post_init__(self) -> None:
        most = all(elements < 2**31 for elements in self.elements)
        check_arguments(
            "bench bits",
            [
                ("elements", self.elements, most, "below 2^31"),
                fractions("density", self.densities),
                fractions("tails", self.tails),
                at_least("groups", self.groups, 1),
            ],
        )


@dataclass(frozen=True, kw_only=True)
class PruneSweep(CodecSizes):
    """The options of `bench prune`."""

    max_bytes: int = option("256M", "Such as 64M, 1G.", parse_size)
    densities: Sequence[float] = option(
        "0.001,0.01", "Fractions kept.", parse_densities, flag="--density"
    )
    dtype: str = option("fp32", "fp32 | bf16 | fp16")
    residual_dtype: str = option("fp32", "fp32 | bf16")

    def __post_init__(self) -> None:
        below_one = all(0 < density < 1 for density in self.densities)
        check_arguments(
            "bench prune",
            [
                *self.size_checks(),
                ("density", self.densities, below_one, "above 0 and below 1"),
                known("dtype", [self.dtype], DTYPE_NAMES),
                known("residual_dtype", [self.residual_dtype], RESIDUAL_DTYPES),
            ],
        )
