"""`bench codecs` on a GPU: the codec's CUDA ops and their peers, timed with events.

Times are those of the device. They leave out the few words that `ops` reads on the host afterwards,
and host time between launches for which the device does not wait. Operation, copy and peers take
turns in the same run. Every op is first compared with the CPU's codec, byte for byte.

Beside `prune_encode` stand Triton's kernels, which select where the compiled library is not there:
`Triton prune_` with the same threshold, and `Triton selection`, which samples the threshold too.
Neither writes a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch

from megatron_sparse.bench.codecs import cases, cub_peer
from megatron_sparse.bench.codecs.cases import DTYPES, FORMS, KEY, STEP, Action, Task
from megatron_sparse.config.compression import CompressionConfig
from megatron_sparse.cuda_ext import codec_cuda, load, ops, threshold_triton
from megatron_sparse.cuda_ext.arguments import overload
from megatron_sparse.cuda_ext.codec_checks import record_kind
from megatron_sparse.cuda_ext.record_spec import Expected, Limits, Pruning, RecordSpec, Segments
from megatron_sparse.wire import FORMAT_BLOCKS

SAMPLES = CompressionConfig.samples
SECTOR_BYTES = 32
"""The least bytes that a GPU reads or writes to touch one element of the accumulator."""


def make_tasks(
    size: int, density: float, dtype: str, form: str, device: torch.device
) -> Iterator[Task]:
    """The three operations on one normally distributed gradient of `size` bytes."""
    load("cuda")
    wrong = compare_with_cpu(density, dtype, form, device)
    code, numel = list(DTYPES).index(dtype), size // DTYPES[dtype].itemsize
    generator = torch.Generator(device).manual_seed(numel)
    grad_N = torch.randn(numel, generator=generator, device=device).to(DTYPES[dtype])
    residual_N = torch.zeros(numel, device=device)
    threshold = cases.threshold_of(density)
    host_offsets, keep = torch.tensor([0, numel]), torch.zeros(1, dtype=torch.uint8)
    offsets, thresholds_R = codec_cuda.on_device(host_offsets, device), threshold.to(device)
    spec = RecordSpec(code, STEP, **FORMS[form])
    block_size = spec.block_size if spec.record_format == FORMAT_BLOCKS else 0
    kinds = codec_cuda.record_kinds(keep, record_kind(spec), device)
    capacity = ops.message_capacity(host_offsets, code)
    out = torch.zeros(capacity, dtype=torch.uint8, device=device)

    def used() -> int:
        """Bytes of the one record that was written last."""
        return 48 + int(out[24:32].view(torch.int64))

    # With leak 0 only rounding errors stay in the residual, so all rounds see the same numbers.
    at = (offsets, thresholds_R, 0.0, KEY, offsets, kinds, code, STEP, block_size)
    fused = partial(overload("prune_encode_records"), grad_N, residual_N, *at, out)
    fused()
    rest_N, limit = torch.zeros(numel, device=device), float(threshold)
    yield Task(
        "prune_encode",
        _name(out, form),
        grad_N.nbytes + 2 * residual_N.nbytes + used(),
        wrong,
        fused,
        peers={
            "torch ops": lambda: cases.prune_encode_in_torch(grad_N, rest_N, limit),
            **_triton_peers(grad_N, host_offsets, thresholds_R, density, code),
        },
    )

    pruned_N = grad_N.clone()
    ops.prune_(pruned_N, Pruning(residual_N, host_offsets, thresholds_R, 0.0, KEY), code)
    encode = partial(
        overload("encode_records"), pruned_N, offsets, kinds, code, STEP, block_size, out
    )
    encode()
    message, name = out[: used()].clone(), _name(out, form)
    yield Task(
        "encode",
        name,
        pruned_N.nbytes + message.numel(),
        wrong,
        encode,
        peers=_encode_peers(pruned_N),
    )

    acc_N, peer_N = torch.zeros(numel, device=device), torch.zeros(numel, device=device)
    index_K = pruned_N.nonzero().squeeze(1)
    values_K = pruned_N[index_K].float()
    touched = cases.touched_bytes(
        pruned_N, whole=name in ("dense", "blocks"), line_bytes=SECTOR_BYTES
    )
    yield Task(
        "decode_add",
        name,
        message.numel() + 2 * touched,
        wrong,
        partial(overload("decode_add_"), acc_N, message, offsets, code, STEP, 0, False),
        peers={"torch index_add_": lambda: peer_N.index_add_(0, index_K, values_K)},
    )


def compare_with_cpu(density: float, dtype: str, form: str, device: torch.device) -> int:
    """Bytes of message, residual and sum that differ from the CPU's on a smaller gradient."""
    code, arguments = list(DTYPES).index(dtype), FORMS[form]
    grad_N = cases.gradient(cases.ORACLE_NUMEL + 17, dtype)
    wrong = _triton_wrong(grad_N, density, code, device)
    numel = grad_N.numel()
    offsets, keep = torch.tensor([0, numel]), torch.zeros(1, dtype=torch.uint8)
    thresholds_R = cases.threshold_of(density)
    results: list[tuple[torch.Tensor, ...]] = []
    for place in (torch.device("cpu"), device):
        rest_N, acc_N = torch.zeros(numel, device=place), torch.ones(numel, device=place)
        out = torch.zeros(ops.message_capacity(offsets, code), dtype=torch.uint8, device=place)
        sizes, _ = ops.prune_encode(
            grad_N.to(place),
            Pruning(rest_N, offsets, thresholds_R.to(place), 0.5, KEY),
            Segments(offsets, keep),
            RecordSpec(code, STEP, **arguments),
            out,
        )
        message = out[: int(sizes.sum())]
        ops.decode_add_(acc_N, message, Expected(offsets, code, STEP, rank=0), 0)
        results.append((message.cpu(), rest_N.cpu(), acc_N.cpu()))
    return wrong + _differing_bytes(*results)


def _triton_wrong(grad_N: torch.Tensor, density: float, code: int, device: torch.device) -> int:
    """Bytes in which Triton's selection differs from the CPU's: limits, gradient and residual."""
    numel = grad_N.numel()
    results: list[tuple[torch.Tensor, ...]] = []
    for place, sample in (
        (torch.device("cpu"), ops.sample_threshold),
        (device, threshold_triton.sample_threshold),
    ):
        sent_N, rest_N = grad_N.clone().to(place), torch.zeros(numel, device=place)
        _select(sample, sent_N, rest_N, torch.tensor([0, numel]), density, code)
        results.append((sent_N.cpu(), rest_N.cpu()))
    return _differing_bytes(*results)


def _differing_bytes(wanted: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> int:
    return sum(
        cases.differing(mine.view(torch.uint8), theirs.view(torch.uint8).numpy().tobytes())
        for theirs, mine in zip(wanted, got, strict=True)
    )


def _select(
    sample: Callable[..., Limits],
    grad_N: torch.Tensor,
    residual_N: torch.Tensor,
    offsets: torch.Tensor,
    density: float,
    code: int,
) -> None:
    """Samples the threshold and prunes, with leak 0.5; mutates both."""
    densities_R, keys_R = torch.tensor([density]), torch.tensor([KEY])
    limits = sample(grad_N, residual_N, offsets, densities_R, SAMPLES, keys_R)
    pruning = Pruning(
        residual_N, offsets, limits.thresholds, 0.5, KEY, tie_chances_R=limits.tie_chances
    )
    ops.prune_(grad_N, pruning, code)


def _triton_peers(
    grad_N: torch.Tensor,
    offsets: torch.Tensor,
    thresholds_R: torch.Tensor,
    density: float,
    code: int,
) -> dict[str, Action]:
    """See the module; each works on copies, which pruning again does not change."""
    sent_N, selected_N = grad_N.clone(), grad_N.clone()
    rests = [torch.zeros(grad_N.numel(), device=grad_N.device) for _ in range(2)]
    pruning = Pruning(rests[0], offsets, thresholds_R, 0.0, KEY)

    def select() -> None:
        _select(threshold_triton.sample_threshold, selected_N, rests[1], offsets, density, code)

    return {"Triton prune_": lambda: ops.prune_(sent_N, pruning, code), "Triton selection": select}


def time_in_turn(actions: Sequence[Action], warmup: int, iters: int) -> list[list[float]]:
    """Microseconds of the device for each action, in each round after the warm-up."""
    times_us: list[list[float]] = [[] for _ in actions]
    for round_index in range(warmup + iters):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in actions]
        for action, (begin, end) in zip(actions, events, strict=True):
            begin.record()
            action()
            end.record()
        torch.cuda.synchronize()
        if round_index >= warmup:
            for kept, (begin, end) in zip(times_us, events, strict=True):
                kept.append(begin.elapsed_time(end) * 1e3)
    return times_us


def _encode_peers(pruned_N: torch.Tensor) -> dict[str, Action]:
    peers = cases.torch_encode_peers(pruned_N)
    if pruned_N.dtype == torch.float32 and (cub := cub_peer.action(pruned_N)) is not None:
        peers["CUB DeviceSelect"] = cub
    if pruned_N.dtype != torch.bfloat16 and find_spec("cupy") is not None:
        cupy = import_module("cupy")
        array = cupy.from_dlpack(pruned_N)
        peers["cupy flatnonzero"] = lambda: array[cupy.flatnonzero(array)]
    return peers


def _name(out: torch.Tensor, form: str) -> str:
    return cases.record_name(out[:48].cpu(), form)
