"""Options of the benches of codecs. The command line reads them; they import nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    parse_list,
    parse_names,
    parse_size,
)
from megatron_sparse.config.compression import CompressionConfig
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
CODERS = ("rans", "packed", "raw", "zstd", "lz4")
"""Of parameters' moves."""


def _names(usual: Sequence[str], help: str, flag: str, metavar: str = "NAME,...") -> Any:
    """An option of names."""
    return option(",".join(usual), help, parse_names, flag=flag, metavar=metavar)


def _below_one(densities: Sequence[float]) -> Check:
    fits = all(0 < density < 1 for density in densities)
    return "density", densities, fits, "above 0 and below 1"


@dataclass(frozen=True, kw_only=True)
class TimedSweep(Sizes):
    """The options of all benches that time a gradient's operations."""

    threads: int | None = option(None, "CPU threads; all by default.", min=1)

    def timing_checks(self) -> list[Check]:
        """For `check_arguments`."""
        return [*self.range_checks(4), at_least("threads", self.threads, 1)]


@dataclass(frozen=True, kw_only=True)
class CodecSweep(TimedSweep):
    """The options of `bench codecs`. On a GPU the bench times the device's work."""

    densities: Sequence[float] = option(
        "0.001,0.01,0.05,0.1,0.5,1", "Fractions sent.", parse_densities, flag="--density"
    )
    dtypes: Sequence[str] = _names(("fp32",), "fp32 | bf16 | fp16", "--dtype", "TYPE,...")
    forms: Sequence[str] = _names(BUCKET_FORMS, " | ".join(FORMS), "--format", "FORMAT,...")
    ops: Sequence[str] = _names(
        OPS,
        "prune_encode | encode | decode_add | decode_sum (rice) | hash_partition (pairs) | "
        "row_union | row_match | row_expand (row_sparse)",
        "--op",
        "OP,...",
    )
    peers: bool = option(True, "Time torch, numpy, scipy and zstd too.", flag="--peers/--no-peers")
    device: str = option("cpu", "cpu | cuda")

    def __post_init__(self) -> None:
        on_gpu = self.device == "cuda"
        no_rice = not on_gpu or not set(RICE_FORMS) & set(self.forms)
        checks = [
            *self.timing_checks(),
            fractions("density", self.densities),
            known("dtype", self.dtypes, DTYPE_NAMES),
            known("format", self.forms, FORMS),
            known("op", self.ops, OPS),
            known("device", [self.device], ("cpu", "cuda")),
            ("format", self.forms, no_rice, "no rice: it is timed on the CPU"),
        ]
        check_arguments("bench codecs", checks)
        if not on_gpu:
            return
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                "bench codecs: there is no CUDA device",
                expected="a GPU that torch sees",
                got="none",
                remedy="measure with --device cpu; see megatron-sparse doctor",
            )


@dataclass(frozen=True, kw_only=True)
class PruneSweep(TimedSweep):
    """The options of `bench prune`."""

    max_bytes: int = option("256M", "Such as 64M, 1G.", parse_size)
    densities: Sequence[float] = option(
        "0.001,0.01", "Fractions kept.", parse_densities, flag="--density"
    )
    dtype: str = option("fp32", "fp32 | bf16 | fp16")
    residual_dtype: str = option("fp32", "fp32 | bf16")

    def __post_init__(self) -> None:
        checks = [
            *self.timing_checks(),
            _below_one(self.densities),
            known("dtype", [self.dtype], DTYPE_NAMES),
            known("residual_dtype", [self.residual_dtype], ("fp32", "bf16")),
        ]
        check_arguments("bench prune", checks)


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
        checks = [
            ("elements", self.elements, most, "below 2^31"),
            fractions("density", self.densities),
            fractions("tails", self.tails),
            at_least("groups", self.groups, 1),
        ]
        check_arguments("bench bits", checks)


@dataclass(frozen=True, kw_only=True)
class DensitySweep(Options):
    """The options of `bench density`."""

    distributions: Sequence[str] | None = option(
        None, "Of the gradient; all by default.", parse_names, flag="--distribution"
    )
    densities: Sequence[float] = option(
        "0.001,0.01,0.05,0.25", "Fractions asked for.", parse_densities, flag="--density"
    )
    threshold_scope: str = option("parameter", "parameter | bucket")
    samples: int = option(CompressionConfig.samples, "compression.samples", min=1)
    elements: int = option(100_000, "Elements of the gradient.", min=1)
    steps: int = option(20, "Steps of each row.", min=1)

    def __post_init__(self) -> None:
        check_arguments("bench density", [_below_one(self.densities)])

    def config(self) -> CompressionConfig:
        """The settings that rows share.

        Raises:
            ConfigError: an unknown scope.
        """
        return CompressionConfig(threshold_scope=self.threshold_scope, samples=self.samples)


parse_rates = partial(
    parse_list, convert=float, expected="numbers with commas between, such as 1e-4,3e-4"
)
"""Learning rates, separated by commas."""


@dataclass(frozen=True, kw_only=True)
class ParameterSweep(Options):
    """The options of `bench parameters`."""

    rates: Sequence[float] = option(
        "3e-5,1e-4,3e-4,1e-3",
        "Learning rates: updates of RMS 0.3 times the rate on weights of RMS 0.02, both normal.",
        parse_rates,
        flag="--lr",
        metavar="LR,...",
    )
    dtype: str = option("bf16", "fp32 | bf16 | fp16")
    elements: int = option(4_000_000, "Parameters.", min=1)
    coders: Sequence[str] = _names(
        CODERS, "zstd (level 3) and lz4 compress the moves; the rest are the plugin's.", "--coder"
    )
    warmup: int = option(1, "Rounds that are not timed.", min=0)
    iters: int = option(5, "Rounds that are timed.", min=1)
    threads: int = option(1, "Of torch; zstd and lz4 use one.", min=1)

    def __post_init__(self) -> None:
        checks = [
            known("dtype", (self.dtype,), DTYPE_NAMES),
            known("coder", self.coders, CODERS),
            ("lr", self.rates, all(rate >= 0 for rate in self.rates), "0 or more"),
        ]
        check_arguments("bench parameters", checks)
