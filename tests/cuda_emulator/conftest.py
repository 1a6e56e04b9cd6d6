"""The emulator, compiled once for all tests of this folder, and where a test's tensors lie."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cuda_emulator.compilation import compile_library, find_gxx
from tests.cuda_emulator.device import (
    EmulatedGpu,
    NotWaiting,
    Place,
    pretend_driver,
    sync_debug_error,
    to_gpu,
    torch_sync_debug_error,
)
from tests.cuda_emulator.emulator import RANDOM, EmulatedDevice, Emulator


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """The ops; the test chooses the schedule."""
    if find_gxx() is None:
        pytest.skip("the emulator needs g++")
    # test_emulator.py runs the codecs' tests again, with a library built for AddressSanitizer.
    built = os.environ.get("MEGATRON_SPARSE_EMULATED_CODECS")
    return Emulator(Path(built) if built else _compiled_once(tmp_path_factory))


def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, which pytest-xdist's processes share: the first one compiles it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "emulated"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = list(folder.glob("*.so"))
        return found[0] if found else compile_library(folder)


@pytest.fixture
def emulated_gpu(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    """The package, with a GPU that is emulated in a random schedule."""
    emulator.schedule(RANDOM, 3)
    pretend_driver(monkeypatch)
    device = EmulatedDevice(emulator, monkeypatch)
    with EmulatedGpu():
        yield device


def on_gpu(tensor: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """A copy on the GPU, `shift` elements behind an aligned address."""
    storage = torch.empty(tensor.numel() + shift, dtype=tensor.dtype, device="cuda")
    return storage[shift:].view(tensor.shape).copy_(tensor)


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "gpu":
        return on_gpu
    return request.getfixturevalue("emulated_gpu").place


@pytest.fixture
def not_waiting(place: Place) -> NotWaiting:
    return sync_debug_error if place is to_gpu else torch_sync_debug_error
