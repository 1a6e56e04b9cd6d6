"""Options of the benches of codecs. The command line reads them; they import nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_sparse.bench.options import (
    DTYPE_NAMES,
    Options,
    Sizes,
    at_least,
    density_option,
    names_option,
    option,
    parse_numbers,
)

BUCKET_FORMS = ("auto", "coo", "pici", "pici_paper", "blocks")
"""Records of a bucket."""
RICE_FORMS = ("rice", "rice_q8", "rice_q4", "rice_q3", "rice_q2", "dense_q4")
"""Records of format Rice; `dense_q4` holds every element in 4 bits, as those of `dense_q`."""
FORMS = (*BUCKET_FORMS, *RICE_FORMS, "hash_bitmap", "pairs", "row_sparse")
USUAL_OPS = (
    *("prune_encode", "encode", "decode_add", "place", "decode_sum"),
    *("seal", "verify", "hash_partition"),
)
"""Each format has some of them."""
OPS = ("prune", *USUAL_OPS)
"""`prune` makes no record: it is the same whatever the format."""


def _is_here(device: str) -> str:
    """A `Fits` of `--device`: empty if torch sees such a device, else what to give instead."""
    if device != "cuda":
        return ""
    import torch

    return "" if torch.cuda.is_available() else "cpu: torch sees no CUDA device here"


def device_option() -> str:
    """Where a bench runs."""
    return option("cpu", among=("cpu", "cuda"), fits=_is_here)


@dataclass(frozen=True, kw_only=True)
class CodecSweep(Sizes):
    """The message codec: pruning, selection with encoding, encoding, adding up.

    On a GPU the bench times the device's work.
    """

    NAME = "bench codecs"
    RUNNER = "codec.codecs"
    LEAST_BYTES = 4

    threads: int | None = option(None, "CPU threads; all by default.", min=1)
    densities: Sequence[float] = density_option("0.001,0.01,0.05,0.1,0.5,1", "Fractions sent.")
    dtypes: Sequence[str] = names_option(
        "fp32", flag="--dtype", metavar="TYPE,...", among=DTYPE_NAMES
    )
    forms: Sequence[str] = names_option(
        ",".join(BUCKET_FORMS), flag="--format", metavar="FORMAT,...", among=FORMS
    )
    ops: Sequence[str] = names_option(
        ",".join(USUAL_OPS),
        "prune | prune_encode | encode | decode_add | place | decode_sum | seal | verify "
        "(checksums) | hash_partition (pairs); all but prune by default.",
        "--op",
        metavar="OP,...",
        among=OPS,
    )
    peers: bool = option(True, "Time the same in torch too.", flag="--peers/--no-peers")
    device: str = device_option()


@dataclass(frozen=True, kw_only=True)
class ParameterSweep(Options):
    """The coder of parameters' moves: bits beside their entropy, and speed."""

    NAME = "bench parameters"
    RUNNER = "codec.parameters"

    rates: Sequence[float] = option(
        "3e-5,1e-4,3e-4,1e-3",
        "Learning rates: updates of RMS 0.3 times the rate on weights of RMS 0.02, both normal.",
        parse_numbers,
        flag="--lr",
        metavar="LR,...",
        fits=at_least(0),
    )
    dtype: str = option("bf16", among=DTYPE_NAMES)
    elements: int = option(4_000_000, "Parameters.", min=1)
    warmup: int = option(1, "Rounds that are not timed.", min=0)
    iters: int = option(5, "Rounds that are timed.", min=1)
    threads: int = option(1, "CPU threads.", min=1)
    device: str = device_option()
