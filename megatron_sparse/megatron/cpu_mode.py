"""Megatron-LM on a machine without a GPU: CPU tensors, gloo, the same code paths.

Megatron uses `device="cuda"`, `tensor.cuda()` and `torch.cuda.something()` throughout. `enable`
maps all of them to the CPU: the functions of torch that make or move tensors are wrapped, and those
of `torch.cuda` that Megatron calls are replaced by ones for a CPU, most of which do nothing. (A
`TorchFunctionMode` would slow down every call of torch.) `enable_training` adds the replacements
for `megatron.training`. Nothing here runs where torch sees a GPU. A 2-rank training is slow, but it
is Megatron's own: buckets, overlap, distributed optimizer, checkpoints.

`enable` also makes the process batch work (SCHED_BATCH), for ranks that share cores. Otherwise a
thread that sends loses its core to the rank that its message wakes, in the middle of the send and
with gloo's lock held; gloo's own thread spins until the sender has its core back.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.jit import _builtins

from megatron_sparse.errors import HostError
from megatron_sparse.megatron import repairs

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


def _is_cuda(device: Any) -> bool:
    """Whether an argument `device` names a GPU: as torch's device, a string, or a number."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _Stream:
    """The one stream of a CPU: every operation on it is done when its call returns."""

    device = _CPU
    cuda_stream = 0
    __init__ = wait_stream = wait_event = synchronize = _do_nothing

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()


class _Event:
    """An event on that stream: passed when it is recorded."""

    wait = synchronize = _do_nothing

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return (end._recorded_s - self._recorded_s) * 1e3


@dataclass(frozen=True)
class Patch:
    """One symbol that is replaced.

    Attributes:
        symbol: dotted name.
        replace: makes the replacement from the original.
        needed_by: the module of Megatron that calls it in a training run, and for what.
    """

    symbol: str
    replace: Callable[[Any], Any]
    needed_by: str


def _always(value: Any) -> Callable[[Any], Any]:
    """A function of any arguments that returns `value`, in place of the original."""
    return lambda original: lambda *args, **kwargs: value


def _put(value: Any) -> Callable[[Any], Any]:
    """`value` itself, in place of the original."""
    return lambda original: value


def _on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that makes a tensor: its `device` is the CPU where it would be a GPU."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original(*args, **kwargs)

    if (operator := _builtins._find_builtin(original)) is not None:
        _builtins._register_builtin(run, operator)  # so `torch.jit.script` takes it for `original`
    return run


def _to_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `Tensor.to`, whose device may also come first."""
    by_name = _on_cpu(original)

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        return by_name(tensor, *args, **kwargs)

    return to


def _named_as_on_gpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `Tensor.type`: without an argument it returns the name of the CUDA type."""

    def named(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(tensor, *args, **kwargs)
        return found if args or kwargs else found.replace("torch.", "torch.cuda.", 1)

    return named


def _keeps_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `original`: each call leaves the state of torch's CPU generator unchanged."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_rng_state()
        try:
            return original(*args, **kwargs)
        finally:
            torch.set_rng_state(before)

    return run


def _as_numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `maybe_move_tensor_to_cpu`, whose `as_numpy` skips CPU tensors: converts them too."""

    @functools.wraps(original)
    def run(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return original(tensor, as_numpy, record_stream)

    return run


def _fuses(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps `Adam.__init__`: it fuses the update unless it is told how to run it."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("fused") is None:
            kwargs["fused"] = not (kwargs.get("foreach") or kwargs.get("differentiable"))
        original(self, *args, **kwargs)

    return init


_STREAM = _Stream()
_PROPERTIES = SimpleNamespace(name="cpu", major=8, minor=0)

_MAKERS = (
    *("arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones"),
    *("ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor"),
    *("zeros", "zeros_like", "Tensor.new_empty", "Tensor.new_full", "Tensor.new_ones"),
    *("Tensor.new_tensor", "Tensor.new_zeros"),
)

CORE_PATCHES = (
    *(Patch(f"torch.{name}", _on_cpu, "core throughout: new tensors") for name in _MAKERS),
    Patch(
        "torch.Tensor.cuda",
        lambda original: lambda tensor, *args, **kwargs: tensor,
        "core throughout, also for whole modules",
    ),
    Patch("torch.Tensor.to", _to_cpu, "core throughout"),
    Patch(
        "torch.Tensor.type",
        _named_as_on_gpu,
        "core.optimizer, which sorts parameters by the name torch.cuda.FloatTensor",
    ),
    Patch(
        "torch.cuda.device_count",
        _always(1),
        "training.initialize: zero leaves the model-parallel groups unmade",
    ),
    Patch(
        "torch.cuda.current_device",
        _always(0),
        "core throughout: the device of new tensors, of gradient buffers, of the loss scale",
    ),
    Patch(
        "torch.cuda.random.current_device",
        _always(0),
        "torch.cuda.get_rng_state, which tensor_parallel.random and checkpointing call",
    ),
    Patch("torch.cuda.set_device", _always(None), "training.initialize: the rank's GPU"),
    Patch("torch.cuda.synchronize", _always(None), "core.timers, at every start and stop"),
    Patch(
        "torch.cuda.Stream",
        _put(_Stream),
        "training.models.dist_utils: the stream on which the model is wrapped in DDP",
    ),
    Patch(
        "torch.cuda.Event",
        _put(_Event),
        "core.transformer.moe.token_dispatcher: counts of tokens that are copied to the host",
    ),
    Patch(
        "torch.cuda.current_stream",
        _always(_STREAM),
        "core.distributed.param_and_grad_buffer: lets it wait for CUDA graphs",
    ),
    # With these two torch.cuda's own generator code works on the CPU's generator.
    Patch(
        "torch.cuda._initialized",
        _put(True),
        "core.tensor_parallel.random: otherwise it tries to initialise CUDA",
    ),
    Patch(
        "torch.cuda.default_generators",
        lambda original: (torch.default_generator,),
        "core.tensor_parallel.random: the generator whose state it saves and sets",
    ),
    Patch(
        # The seed of a loader's workers is drawn from the generator, and a resumed run makes its
        # loaders after it has loaded the generator's state. On a GPU this cannot disturb dropout,
        # which has the GPU's generator; here both are the same one.
        "torch.utils.data.DataLoader.__iter__",
        _keeps_generator,
        "training.training: dropout in a resumed run repeats that of an uninterrupted one",
    ),
    Patch(
        "torch.optim.Adam.__init__",  # also AdamW's, which calls it
        _fuses,
        "core.optimizer, without Apex: like Apex's, it reads and writes its tensors once",
    ),
    Patch(
        "torch.cuda.memory_stats",
        lambda original: lambda *a, **k: defaultdict(int),
        "training.training with --log-memory-to-tensorboard",
    ),
    Patch("torch.cuda.memory_allocated", _always(0), "training.utils.report_memory"),
    Patch("torch.cuda.max_memory_allocated", _always(0), "training.utils.report_memory"),
    Patch("torch.cuda.memory_reserved", _always(0), "training.utils.report_memory"),
    Patch("torch.cuda.max_memory_reserved", _always(0), "training.utils.report_memory"),
    Patch(
        "torch.cuda.get_device_properties",
        _always(_PROPERTIES),
        "training.arguments with tensor parallelism: the architecture; 8 is Ampere",
    ),
)

TRAINING_PATCHES = (
    Patch(
        "megatron.training.training.initialize_megatron",
        lambda original: functools.partial(original, allow_no_cuda=True),
        "pretrain calls it without allow_no_cuda and stops where there is no GPU",
    ),
    Patch(
        "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        _as_numpy,
        "the all-to-all of tokens: its sizes become numbers only on their way from a GPU",
    ),
)

# Symbols, in the order of their patches: the mode is on when it has the last of CORE_PATCHES.
_applied: set[str] = set()


def enable() -> None:
    """Lets `megatron.core` run on the CPU. Idempotent.

    Call it before anything imports megatron: at import Megatron looks for GPUs, and binds functions
    of torch to names in its own modules, which a later patch would not reach. This thread, and
    threads that it starts later, are batch work from then on, unless the process was given another
    scheduling policy than the default.

    Raises:
        HostError: megatron is imported already, torch sees a GPU, or torch lacks a symbol.
    """
    if CORE_PATCHES[-1].symbol in _applied:
        return
    if torch.cuda.is_available():
        raise HostError(
            "CPU mode is for machines without a GPU",
            expected="torch.cuda.is_available() to be False",
            got=f"{torch.cuda.device_count()} GPU(s)",
            remedy="hide them: CUDA_VISIBLE_DEVICES= (or cluster.device=cpu)",
        )
    # The package `megatron` has no code of its own: only its submodules bind functions.
    loaded = sorted(name for name in sys.modules if name.startswith("megatron."))
    if loaded:
        raise HostError(
            "CPU mode was enabled too late",
            expected="cpu_mode.enable() before anything imports megatron",
            got=f"{loaded[-1]} is imported",
            remedy="move the call to the top of the script",
        )
    _become_batch_work()
    _apply(CORE_PATCHES)
    # Megatron warns if use of a GPU generator changes the CPU generator; here they are the same.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _become_batch_work() -> None:
    """Changes the default scheduling policy to SCHED_BATCH, which needs no privilege."""
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:  # a sandbox has no such policy
        logger.warning("no batch scheduling (%s): ranks that share cores train more slowly", error)


def properties() -> AbstractContextManager[object]:
    """Within the `with` block, lets Megatron read a GPU's properties on a machine without a GPU.

    For a launcher: it does not train, and it may have imported megatron, which `enable` refuses.
    """
    if torch.cuda.is_available():
        return nullcontext()
    return mock.patch.object(torch.cuda, "get_device_properties", return_value=_PROPERTIES)


def enable_training() -> None:
    """Imports `megatron.training` and lets it run on the CPU; also applies `repairs`. Idempotent.

    Raises:
        HostError: `enable` was not called, or Megatron lacks a symbol.
    """
    if CORE_PATCHES[-1].symbol not in _applied:
        raise HostError(
            "CPU mode is not enabled",
            expected="cpu_mode.enable() first, before anything imports megatron",
            got="cpu_mode.enable_training()",
            remedy="call cpu_mode.enable() at the top of the script",
        )
    _apply(TRAINING_PATCHES)
    repairs.apply()


def _apply(patches: Sequence[Patch]) -> None:
    """Replaces each patch's symbol, unless an earlier call has replaced it.

    Raises:
        HostError: a symbol is missing. Earlier symbols stay replaced, so the process should end.
    """
    for patch in patches:
        if patch.symbol in _applied:
            continue
        owner_name, _, attribute = patch.symbol.rpartition(".")
        try:
            owner = resolve_name(owner_name)
            original = getattr(owner, attribute)
        except (ImportError, AttributeError) as error:
            raise HostError(
                f"CPU mode cannot replace {patch.symbol}",
                expected=f"the symbol that this needs: {patch.needed_by}",
                got=error,
                remedy="pip install 'megatron-core>=0.19,<0.20' 'torch>=2.11', or use a GPU",
            ) from None
        setattr(owner, attribute, patch.replace(original))
        _applied.add(patch.symbol)
